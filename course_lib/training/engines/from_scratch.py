"""Engines over the course's own data parallelism, ZeRO and FSDP."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.errors import ConfigError
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.ddp import Bucket, DataParallel, ReductionHandle, sum_gradients
from course_lib.parallel.experts import expert_groups
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.topology import RankGrid
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.checkpoints.sharded_state import ShardedState, whole_pieces
from course_lib.training.checkpoints.stored_state import StoredState
from course_lib.training.engines.sharded import ShardedEngine, gradients_of


class ScratchState(ShardedState):
    """State of an engine whose ``wrapped`` knows its pieces, of experts those of this rank."""

    experts: ExpertParallel | None = None

    def pieces(self) -> dict[str, Shard]:
        own = self.own_pieces()
        return {name: self.experts.in_whole(name, piece) for name, piece in own.items()} if self.experts else own

    def own_pieces(self) -> dict[str, Shard]:
        """Pieces of what this rank computes with."""
        return self.wrapped.pieces()

    def refresh(self) -> None:
        self.wrapped.refresh()

    def parameters_by_part(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        ((part, parameters),) = super().parameters_by_part()
        if self.experts is None:
            return [(part, parameters)]
        spread = {name: parameters.pop(name) for name in self.experts.shapes}
        return [(part, parameters), (self.experts.place, spread)]


class PiecesState(ScratchState):
    """State of a rank that has whole pieces of split layers, and its own experts."""

    shards_pieces = False

    def own_pieces(self) -> dict[str, Shard]:
        return whole_pieces(self.model)

    def refresh(self) -> None:
        pass  # the next forward reads what stands in the pieces


class Scratch(ShardedEngine):
    """``--engine scratch``: :mod:`course_lib.parallel` around the model; the optimizer is torch's own.

    Attributes:
        experts: how the experts of a layer are spread over ranks; None where every rank has all.
    """

    experts: ExpertParallel | None = None

    @classmethod
    def make_grid(cls, config: Config, processes: int) -> RankGrid:
        grid = super().make_grid(config, processes)
        if config.parallel.expert_parallel_size > 1 and grid.dp < processes:
            raise ConfigError(
                f"expert_parallel_size shares experts among {grid.dp} data parallel ranks, and there are "
                f"{processes}: others have the same rows",
                "leave the other sizes out",
            )
        return grid

    def split_layers(self, model: nn.Module) -> None:
        super().split_layers(model)
        size = self.config.parallel.expert_parallel_size
        if size > 1:
            self.stored.keep_shell()
            groups = expert_groups(size, self.ranks.grid.lines("dp"))
            self.experts = ExpertParallel(model, groups)  # type: ignore[arg-type]
            self.stored.remember_split()
            self.stored.experts = self.experts

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

    def describe(self) -> Mapping[str, Any]:
        size, told = self.config.parallel.expert_parallel_size, dict(super().describe())
        if self.experts:
            told["experts"] = {
                "expert_parallel_size": size,
                "expert_data_parallel_size": self.ranks.grid.dp // size,
            }
        return told


class ScratchDDP(Scratch):
    """The course's DDP: every rank has the whole gradient, but for layers and experts that ranks share."""

    by_ddp = True
    hook: Callable[[Bucket], ReductionHandle] = staticmethod(sum_gradients)
    """What sums a bucket of gradients."""

    @classmethod
    def refuse(cls, config: Config, device: torch.device, precision: str) -> None:
        if precision == "fp16":
            raise ConfigError(
                "engine scratch does not scale losses, which fp16 needs",
                "use --mixed_precision bf16, or --engine torch",
            )
        super().refuse(config, device, precision)

    @property
    def stored_class(self) -> type[StoredState]:  # type: ignore[override]
        whole = self.ranks.grid.tp == self.config.parallel.expert_parallel_size == 1
        return StoredState if whole else PiecesState

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.wrapped = DataParallel(
            model,
            group=self.ranks.gradient_group,
            groups=self.experts.summed_over() if self.experts else None,
            bucket_bytes=self.config.parallel.bucket_bytes,
            find_unused_parameters=self.finds_unused,
            communication_hook=self.hook,
        )

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.tensor is not None:
            return self.clip_together(self.gradients(), max_norm)
        if self.experts is not None:
            return self.clip_with_experts(self.experts, max_norm)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def clip_with_experts(self, experts: ExpertParallel, max_norm: float) -> torch.Tensor:
        """As :meth:`clip`, where each expert counts once: those of all ranks that share them, the rest of this one."""
        gradients = self.gradients()
        square = sum_of_squares([grad for name, grad in gradients.items() if name in experts.shapes], self.device)
        dist.all_reduce(square, group=experts.groups.sharing)
        square += sum_of_squares([grad for name, grad in gradients.items() if name not in experts.shapes], self.device)
        norm = square.sqrt()
        scale_down_(list(gradients.values()), norm, max_norm)
        return norm

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def update(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


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
        return {name: piece.data.grad for name, piece in self.wrapped.pieces().items() if piece.data.grad is not None}


BY_STRATEGY = {
    "ddp": ScratchDDP,
    "zero1": ScratchZero,
    "zero2": ScratchZero,
    "zero3": ScratchGathered,
    "fsdp": ScratchGathered,
}
