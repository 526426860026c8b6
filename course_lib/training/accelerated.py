"""The same loop through Accelerate: CPU processes, one GPU, many GPUs, many machines."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, gather_object
from torch import nn

from course_lib.errors import LaunchError
from course_lib.launching import launch_environment
from course_lib.launching.interrupts import exit_code
from course_lib.parallel.sharding import Shard, scatter_whole
from course_lib.training.basic import BasicTrainer, Batch
from course_lib.training.checkpoints import formats, safetensors_tree, sharded
from course_lib.training.checkpoints.async_save import BackgroundSaver
from course_lib.training.engines import Engine, build_engine, process_group
from course_lib.training.votes import Votes


class AcceleratedTrainer(BasicTrainer):
    """Trains a model on every process that was launched; see :class:`TrainerFrame` for its arguments.

    What differs from the plain loop: the targets are counted over all processes, an engine carries
    the gradients and holds the state (DDP, ZeRO or FSDP), and evaluation gathers every process's rows.
    """

    saver: BackgroundSaver | None = None
    """Writes checkpoints while training goes on; made for the first of them."""

    def connect(self) -> None:
        run = self.config.run
        self.engine = self.build_engine()
        self.engine.connect()
        self.accelerator = self.engine.accelerator
        self.device = self.accelerator.device
        self.rank, self.is_main = self.accelerator.process_index, self.accelerator.is_main_process
        self.num_processes = self.accelerator.num_processes
        here = launch_environment.discover()
        wanted = here.world_size if here.elastic else run.num_processes or here.world_size
        if self.num_processes != wanted:
            raise LaunchError(f"Accelerate joined {self.num_processes} processes, not {wanted}",
                              "start with `course train --num_processes N`, which starts the ranks itself")
        self.votes = Votes(self.device)

    def build_engine(self) -> Engine:
        """The engine that the config names."""
        return build_engine(self.config)

    def prepare(self) -> None:
        self.engine.wrap(self.model, self.optimizer)
        process_group.have_patience(self.config.guard.watchdog)
        self.model, self.wrapped, self.optimizer = self.engine.model, self.engine.wrapped, self.engine.optimizer
        self.train_loader = self.accelerator.prepare_data_loader(self.train_loader)
        self.eval_loaders = {split: self.accelerator.prepare_data_loader(loader)
                             for split, loader in self.eval_loaders.items()}

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.count_targets(micro_batches)
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with self.engine.accumulating(last):
                with self.phases("forward"):
                    loss = self.loss(batch, targets, len(micro_batches))
                with self.phases("backward"):
                    # Engines take the mean over processes; the loss is already a share of their sum.
                    weight = self.num_processes if self.config.run.loss_weighting == "token" else 1
                    self.engine.backward(loss * weight, last)
            total += loss.detach() * weight / self.num_processes
        with self.phases("optimizer"):
            self.settle()
            norm = self.engine.step(self.max_grad_norm)
            self.stepped(knows_at_once=self.engine.knows_at_once)
        return total, norm

    def count_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        mine = self.own_targets(micro_batches)
        # One reduction carries both: how many targets there are, and whether anyone was asked to stop.
        own_vote = torch.full_like(mine, self.stop_request.vote)  # filled in there: a copy would wait for the device
        targets, votes = self.sum_over_processes(torch.stack([mine, own_vote]))
        self.votes.cast(votes)
        return targets

    def own_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Targets in this process's rows."""
        return super().count_targets(micro_batches)

    @property
    def step_was_skipped(self) -> bool:
        return self.engine.step_was_skipped

    def asked_to_stop(self, waited: bool) -> int:
        return exit_code(self.votes.counted(waited))

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the prepared loader has moved it

    def gather(self, tensors: Any) -> Any:
        return self.accelerator.gather_for_metrics(tensors)

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_object([value])

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        about = self.gather_objects({name: (each.shape, each.dtype) for name, each in tensors.items()})[0]
        found = {}
        for name, (shape, dtype) in about.items():
            room = tensors[name] if self.is_main else torch.empty(shape, dtype=dtype)
            found[name] = broadcast(room.to(self.device)).cpu()
        return found

    def autocast(self) -> AbstractContextManager:
        return self.engine.autocast(self.precision)

    def bare_model(self) -> nn.Module:
        return self.engine.bare_model()

    def whole_weights(self) -> dict[str, torch.Tensor]:
        return self.engine.whole_weights()

    def load_whole_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.engine.load_whole_weights(weights)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        self.accelerator.wait_for_everyone()
        self.accelerator.state.destroy_process_group()  # not end_training(): whoever tracks has the model yet to come

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.engine.shapes()

    def tensors(self) -> dict[str, Shard]:
        """This rank's pieces of all that a checkpoint stores in pieces."""
        return ({f"model/{name}": piece for name, piece in self.engine.pieces().items()}
                | {f"optimizer/{name}": piece for name, piece in self.engine.optimizer_pieces().items()})

    def write_whole_tensors(self, folder: Path) -> None:
        if self.engine.shards_state:
            safetensors_tree.save(self.engine.buffers(), folder / formats.BUFFERS)
        else:
            super().write_whole_tensors(folder)

    def put_checkpoint(self, write_files: Callable[[Path], None]) -> None:
        if not self.engine.shards_state:
            return super().put_checkpoint(write_files)
        if self.config.output.async_save:
            limit = self.config.output.save_total_limit
            self.saver = self.saver or BackgroundSaver(
                self.output_dir, limit, self.barrier, process_group.patience(self.config.guard.watchdog))
            return self.saver.start(self.state.step, write_files, self.tensors())

        def write_all(folder: Path) -> None:
            write_files(folder)
            self.barrier()
            sharded.save(self.tensors(), folder)

        super().put_checkpoint(write_all)

    def checkpoints_written(self) -> None:
        if self.saver:
            self.saver.wait()

    def let_checkpoints_end(self) -> None:
        if self.saver:
            self.saver.let_end()

    def check_tensors(self, folder: Path) -> None:
        if not self.engine.shards_state:
            super().check_tensors(folder)
        elif not formats.is_sharded(folder):
            formats.check_model(safetensors_tree.load(folder / formats.MODEL), self.shapes(), folder)

    def read_tensors(self, folder: Path) -> None:
        engine = self.engine
        if not engine.shards_state:
            return super().read_tensors(folder)
        if formats.is_sharded(folder):
            states = sharded.sizes(folder, "optimizer/")
            room = engine.prepare_optimizer_pieces(states)
            sharded.load({f"model/{name}": piece for name, piece in engine.pieces().items()}
                         | {f"optimizer/{name}": piece for name, piece in room.items()}, folder)
            engine.load_buffers(safetensors_tree.load(folder / formats.BUFFERS))
        else:
            engine.load_whole_weights(safetensors_tree.load(folder / formats.MODEL))
            whole = formats.whole_optimizer_state(folder, engine.trained_names)
            scatter_whole(whole, engine.prepare_optimizer_pieces({key: v.numel() for key, v in whole.items()}))
        engine.refresh()

    @property
    def engine_name(self) -> str:
        return self.config.parallel.chosen_engine

    def engine_state(self) -> dict[str, Any]:
        return self.engine.state()

    def load_engine_state(self, state: dict[str, Any]) -> None:
        self.engine.load_state(state)
