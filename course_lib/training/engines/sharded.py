"""Base class for engines that shard parameters, gradients or optimizer states."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.experts import expert_groups
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.zero import Zero1
from course_lib.training.engines.base import StepEngine


class ShardedEngine(StepEngine):
    """Splits layers and spreads experts over ranks, and clips where ranks hold parts of the gradient."""

    needs_group = True
    stored: Any
    """A ``ShardedState``; whole where neither data parallelism nor anything else leaves a rank a part."""
    tensor: TensorParallel | None = None
    """How layers are split over tensor-parallel ranks; None where they are whole."""
    experts: ExpertParallel | None = None
    """How the experts of a layer are spread over ranks; None where every rank has all."""

    def split_layers(self, model: nn.Module) -> None:
        if self.ranks.grid.tp > 1:
            self.stored.keep_shell()
            vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
            self.tensor = TensorParallel(
                model,
                self.ranks.groups.tp,
                sequence=self.config.parallel.sequence_parallel,
                split_vocabulary=vocabulary % self.ranks.grid.tp == 0,
            )
            self.stored.remember_split(self.tensor)
        size = self.config.parallel.expert_parallel_size
        if size > 1:
            self.stored.keep_shell()
            self.experts = ExpertParallel(model, expert_groups(size, self.ranks.grid.lines("dp")))  # type: ignore[arg-type]
            self.stored.remember_split()
            self.stored.experts = self.experts

    def clip_together(
        self, gradients: Mapping[str, torch.Tensor], max_norm: float, copies: Collection[str] = ()
    ) -> torch.Tensor:
        """Scale gradients down to an L2 norm over the whole model; gives the norm before.

        Every element counts once: what tensor-parallel ranks have alike on the first of them, a tied weight's second
        copy not at all, and what all copies of the model have alike in one of them.

        Args:
            gradients: of this rank, by name; shards where data parallelism leaves shards.
            max_norm: to clip to.
            copies: names of second copies.
        """
        ranks, shards = self.ranks, self.stored.holds_shards
        counted = [
            gradient
            for name, gradient in gradients.items()
            if name not in copies and (ranks.place.tp == 0 or self.stored.split_of(name))
        ]
        square = sum_of_squares(counted, self.device)
        for group in (ranks.groups.tp, ranks.groups.pp, *([ranks.gradient_group] if shards else [])):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(square, group=group)
        norm = square.sqrt()
        scale_down_(list(gradients.values()), norm, max_norm)
        return norm

    def clip_with_experts(
        self, experts: ExpertParallel, gradients: Mapping[str, torch.Tensor], max_norm: float
    ) -> torch.Tensor:
        """As :meth:`clip_together`, where ranks have different experts: each counts once.

        Args:
            experts: the layout.
            gradients: of this rank, by name: of its experts and of all else, whole or shards of both.
            max_norm: to clip to.
        """
        own = {name: gradient for name, gradient in gradients.items() if name in experts.shapes}
        alike = [gradient for name, gradient in gradients.items() if name not in own]
        shards = self.stored.holds_shards
        square = sum_of_squares([*own.values(), *(alike if shards else ())], self.device)
        dist.all_reduce(square, group=None if shards else experts.groups.sharing)
        if not shards:
            square += sum_of_squares(alike, self.device)
        norm = square.sqrt()
        scale_down_(list(gradients.values()), norm, max_norm)
        return norm

    def describe(self) -> Mapping[str, Any]:
        grid, parallel, told = self.ranks.grid, self.config.parallel, dict[str, Any]()
        if self.tensor:
            told["tensor"] = {
                "tensor_parallel_size": grid.tp,
                "data_parallel_size": grid.dp,
                "sequence_parallel": parallel.sequence_parallel,
            }
        if self.experts:
            size = parallel.expert_parallel_size
            told["experts"] = {"expert_parallel_size": size, "expert_data_parallel_size": grid.dp // size}
        return told


class WholeGradients(ShardedEngine):
    """Every rank has the whole gradient of what it computes with, as DDP leaves it, and the optimizer updates that."""

    by_ddp = True

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients after a backward, by name."""
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.tensor is not None:
            return self.clip_together(self.gradients(), max_norm)
        if self.experts is not None:
            return self.clip_with_experts(self.experts, self.gradients(), max_norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def gradients_of(zero: Zero1) -> dict[str, torch.Tensor]:
    """The gradients of this rank's shards, by the parameter's name, once they are reduced."""
    zero.reduce()
    return {
        zero.names[parameter]: bucket.gradient[shard_slice]
        for bucket in zero.buckets
        if bucket.gradient is not None
        for parameter, shard_slice in bucket.shard_slices.items()
    }
