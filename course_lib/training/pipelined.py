"""The same loop with the model's stages on the ranks of a pipeline, and pipelines side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch import nn

from course_lib.parallel.sharding import Shard
from course_lib.training.accelerated import AcceleratedTrainer
from course_lib.training.basic import Batch
from course_lib.training.engines import process_group
from course_lib.training.engines.pipeline import PipelineEngine
from course_lib.training.evaluation import scores_of_rows
from course_lib.training.loss import count_targets


class PipelineTrainer(AcceleratedTrainer):
    """Trains a model in stages; see :class:`TrainerFrame` for its arguments.

    What differs from the other trainers: a rank holds its stages alone, all ranks of a pipeline see the same batch,
    and a batch goes through it in ``pipeline_chunks`` micro-batches, in the order of the schedule. The gradient is
    that of the plain loop for the same global batch.
    """

    engine: PipelineEngine

    def build_engine(self) -> PipelineEngine:
        return PipelineEngine(self.config)

    @property
    def data_ranks(self) -> int:
        return self.engine.grid.dp

    def take_part(self, model: nn.Module) -> nn.Module:
        return self.engine.take(model)

    def prepare(self) -> None:
        self.engine.wrap(self.model, self.optimizer)
        process_group.have_patience(self.config.guard.watchdog)
        self.wrapped = self.engine.wrapped
        grid, place = self.engine.grid, self.engine.place

        def dealt(loader: Any) -> Any:
            """Each pipeline's share of the batches, the same on all its ranks."""
            return prepare_data_loader(loader, self.device, num_processes=grid.dp, process_index=place.dp,
                                       put_on_device=True, rng_types=[], non_blocking=True)

        self.train_loader = dealt(self.train_loader)
        self.eval_loaders = {split: dealt(loader) for split, loader in self.eval_loaders.items()}

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.count_targets(micro_batches)
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            if self.config.run.loss_weighting == "token":
                scale = 1 / targets
            else:  # the naive share: each pipeline's mean counts the same
                own = count_targets(batch["labels"], self.task).clamp(min=1)
                scale = 1 / (own * len(micro_batches) * self.data_ranks)
            with self.phases("pipeline"):
                losses = self.engine.run(batch, scale).losses
            total += sum(losses, torch.zeros((), device=self.device)) * scale
        with self.phases("optimizer"):
            norm = self.engine.step(self.max_grad_norm)
            self.scheduler.step()
        return total, norm

    def own_targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        found = super().own_targets(micro_batches)
        return found if self.engine.place.pp == 0 else torch.zeros_like(found)  # a pipeline's rows count once

    def scores(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        logits = self.engine.evaluate(batch)
        labels = batch["labels"]
        if self.engine.has_last_stage:
            assert logits is not None
            found = scores_of_rows(logits, labels, self.task)
        else:
            room = torch.empty(len(labels), 2, device=self.device)
            found = (room, torch.empty_like(labels)) if self.num_labels else (room,)
        return tuple(self.engine.from_last_stage(tensor.contiguous()) for tensor in found)

    def gather(self, tensors: Any) -> Any:
        if self.data_ranks == 1:
            return tensors
        found = []
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in range(self.data_ranks)]
            dist.all_gather(parts, tensor.contiguous(), group=self.engine.groups.dp)
            found.append(torch.cat(parts))
        state = self.accelerator.gradient_state
        if state.end_of_dataloader and state.remainder > 0:
            found = [tensor[: state.remainder] for tensor in found]
        return tuple(found)

    def tensors(self) -> dict[str, Shard]:
        return ({f"model/{name}": piece for name, piece in self.engine.stored(self.engine.pieces()).items()}
                | {f"optimizer/{name}": piece
                   for name, piece in self.engine.stored(self.engine.optimizer_pieces()).items()})

    def describe(self) -> Mapping[str, Any]:
        return {"pipeline": self.engine.describe()}
