"""The same loop through Accelerate: CPU processes, one GPU, many GPUs, many machines."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object
from torch import nn

from course_lib.errors import LaunchError
from course_lib.training.basic import BasicTrainer, Batch
from course_lib.training.precision import pick_device, pick_precision


class AcceleratedTrainer(BasicTrainer):
    """Trains a model on every process that was launched; see :class:`TrainerFrame` for its arguments.

    What differs from the plain loop: the targets are counted over all processes, DDP averages the
    gradients of the processes while backward runs, and evaluation gathers every process's rows.
    """

    def connect(self) -> None:
        run = self.config.run
        device = pick_device(run.device)
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            mixed_precision=pick_precision(run.mixed_precision, device),
            dataloader_config=DataLoaderConfiguration(non_blocking=True),
        )
        self.device = self.accelerator.device
        self.rank, self.is_main = self.accelerator.process_index, self.accelerator.is_main_process
        self.num_processes = self.accelerator.num_processes
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if self.num_processes != (run.num_processes or launched):
            raise LaunchError(f"Accelerate joined {self.num_processes} processes, not {run.num_processes or launched}",
                              "start with `course train --num_processes N`, which starts the ranks itself")

    def prepare(self) -> None:
        self.wrapped, self.optimizer, self.train_loader = self.accelerator.prepare(
            self.model, self.optimizer, self.train_loader)
        self.eval_loaders = {split: self.accelerator.prepare(loader) for split, loader in self.eval_loaders.items()}

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.count_targets(micro_batches)
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro_batches):
            with self.gradients_stay_here(unless=i == len(micro_batches) - 1):
                with self.phases("forward"):
                    loss = self.loss(batch, targets, len(micro_batches))
                with self.phases("backward"):
                    # DDP takes the mean over processes; the loss is already a share of their sum.
                    weight = self.num_processes if self.config.run.loss_weighting == "token" else 1
                    self.accelerator.backward(loss * weight)
            total += loss.detach() * weight / self.num_processes
        with self.phases("optimizer"):
            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.max_grad_norm)
            self.optimizer.step()
            if not self.accelerator.optimizer_step_was_skipped:
                self.scheduler.step()
            self.optimizer.zero_grad()
        return total, norm

    @contextlib.contextmanager
    def gradients_stay_here(self, unless: bool) -> Iterator[None]:
        """Accumulate without telling the other processes, unless this is the last micro-batch."""
        with contextlib.nullcontext() if unless else self.accelerator.no_sync(self.wrapped):
            yield

    def count_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        mine = super().count_targets(micro_batches)
        # One reduction carries both: how many targets there are, and whether anyone was asked to stop.
        votes = torch.tensor(int(bool(self.stop_request)), device=self.device)
        targets, self.stop_votes = self.sum_over_processes(torch.stack([mine, votes]))
        return targets

    def asked_to_stop(self) -> bool:
        return bool(self.stop_votes > 0)

    def to_device(self, batch: Batch) -> Batch:
        return batch  # the prepared loader has moved it

    def gather(self, tensors: Any) -> Any:
        return self.accelerator.gather_for_metrics(tensors)

    def sum_over_processes(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def gather_objects(self, value: Any) -> list[Any]:
        return gather_object([value])

    def bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.wrapped, keep_fp32_wrapper=False)

    def barrier(self) -> None:
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def engine_state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {"scaler": scaler.state_dict() if scaler else {}}

    def load_engine_state(self, state: dict[str, Any]) -> None:
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
