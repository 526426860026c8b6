"""Engines over the course's own data parallelism, ZeRO and FSDP."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.parallel.ddp import Bucket, DataParallel, ReductionHandle, sum_gradients
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.checkpoints.sharded_state import ShardedState, SplitState
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines.sharded import ShardedEngine, WholeGradients, gradients_of


class ScratchState(ShardedState):
    """State of an engine whose ``wrapped`` knows its shards."""

    def own_shards(self) -> dict[str, Shard]:
        return self.wrapped.shards()

    def refresh(self) -> None:
        self.wrapped.refresh()


class Scratch(ShardedEngine):
    """``--engine scratch``: :mod:`course_lib.parallel` around the model; the optimizer is torch's own."""

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self.ranks.gradient_ranks).backward()  # they all take the mean over the ranks

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.clip_together(self.gradients(), max_norm) if self.tensor else self.wrapped.clip_grad_norm_(max_norm)

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients after a backward, by name, of its shards."""
        raise NotImplementedError

    def update(self) -> None:
        self.wrapped.step()

    def zero_grad(self) -> None:
        self.wrapped.zero_grad()


class ScratchDDP(WholeGradients, Scratch):
    """The course's DDP: every rank has the whole gradient, except for layers and experts that ranks share."""

    hook: Callable[[Bucket], ReductionHandle] = staticmethod(sum_gradients)
    """What sums a bucket of gradients."""

    @property
    def stored_class(self) -> type[StoredState]:  # type: ignore[override]
        whole = self.ranks.grid.tp == self.config.parallel.expert_parallel_size == 1
        return StoredState if whole else SplitState

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.wrapped = DataParallel(
            model,
            group=self.ranks.gradient_group,
            groups=self.experts.summed_over() if self.experts else None,
            bucket_bytes=self.config.parallel.bucket_bytes,
            find_unused_parameters=self.finds_unused,
            communication_hook=self.hook,
        )


class ScratchZero(Scratch):
    """ZeRO stages 1 and 2: whole parameters, sharded optimizer states."""

    stored_class = ScratchState

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        group, bucket = self.ranks.gradient_group, self.config.parallel.bucket_bytes
        groups = self.experts.summed_over() if self.experts else None
        if self.strategy == "zero1":
            self.wrapped = OverlappedZero1(model, optimizer, group=group, groups=groups, bucket_bytes=bucket)
        else:
            self.wrapped = Zero2(model, optimizer, group=group, groups=groups, bucket_bytes=bucket)

    def gradients(self) -> dict[str, torch.Tensor]:
        return gradients_of(self.wrapped)


class ScratchGathered(Scratch):
    """ZeRO stage 3 and FSDP: a rank keeps shards of parameters and gradients, and casts what it gathers."""

    stored_class = ScratchState

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        group, low = self.ranks.gradient_group, torch.bfloat16 if self.precision == "bf16" else None
        if self.strategy == "zero3":
            self.wrapped = Zero3(model, optimizer, group=group, param_dtype=low)
        else:
            self.wrapped = FullyShardedDataParallel(
                model, optimizer, group=group, param_dtype=low, reduce_dtype=torch.float32
            )

    def autocast(self) -> AbstractContextManager:
        return contextlib.nullcontext()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()  # no whole gradients are kept between micro-batches

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: shard.data.grad for name, shard in self.wrapped.shards().items() if shard.data.grad is not None}


BY_STRATEGY = {
    "ddp": ScratchDDP,
    "zero1": ScratchZero,
    "zero2": ScratchZero,
    "zero3": ScratchGathered,
    "fsdp": ScratchGathered,
}
