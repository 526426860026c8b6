"""The course's own data parallel, ZeRO and FSDP in the trainer."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import ConfigError
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.ddp import Bucket, DataParallel, ReductionHandle, sum_gradients
from course_lib.parallel.experts import expert_groups
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard, names_of
from course_lib.parallel.topology import RankGrid
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.engines.sharded import ShardedEngine, gradients_of, without_weights

GATHERED = ("zero3", "fsdp")
"""Strategies that leave a rank pieces of parameters and gradients: they cast what they gather, and keep no whole
gradients between micro-batches."""


class Scratch(ShardedEngine):
    """``--engine scratch``: :mod:`course_lib.parallel` around the model; the optimizer is torch's own."""

    wrapped: Any
    experts: ExpertParallel | None = None
    """Where the experts of a layer are spread over ranks: how."""
    hook: Callable[[Bucket], ReductionHandle] = staticmethod(sum_gradients)
    """What sums a bucket of gradients under ddp."""

    @property
    def shards_state(self) -> bool:  # type: ignore[override]
        return self.strategy != "ddp" or self.grid.tp > 1 or self.config.parallel.expert_parallel_size > 1

    @property
    def by_ddp(self) -> bool:  # type: ignore[override]
        return self.strategy == "ddp"

    @property
    def casts(self) -> bool:  # type: ignore[override]
        return self.strategy in GATHERED

    def refuse(self, device: torch.device, precision: str) -> None:
        if self.strategy == "ddp" and precision == "fp16":
            raise ConfigError(
                "engine scratch does not scale losses, which fp16 needs",
                "use --mixed_precision bf16, or --engine torch",
            )
        super().refuse(device, precision)

    def make_grid(self) -> RankGrid:
        grid, size = super().make_grid(), self.config.parallel.expert_parallel_size
        if size > 1 and grid.dp < self.num_processes:
            raise ConfigError(
                f"expert_parallel_size shares experts among {grid.dp} data parallel ranks, and there are "
                f"{self.num_processes}: others have the same rows",
                "leave the other sizes out",
            )
        return grid

    def split_layers(self, model: nn.Module) -> None:
        super().split_layers(model)
        size = self.config.parallel.expert_parallel_size
        if size > 1:
            self.shell = without_weights(model)
            self.experts = ExpertParallel(model, expert_groups(size, self.grid.lines("dp")))  # type: ignore[arg-type]
            self.names = names_of(model)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.remember_order()
        groups = self.experts.summed_over() if self.experts else None
        bucket, group = self.config.parallel.bucket_bytes, self.gradient_group
        low = torch.bfloat16 if self.precision == "bf16" else None  # in which gathered parameters travel and compute
        if self.strategy == "ddp":
            self.wrapped = DataParallel(
                model,
                group=group,
                groups=groups,
                bucket_bytes=bucket,
                find_unused_parameters=self.finds_unused,
                communication_hook=self.hook,
            )
        elif self.strategy == "zero1":
            self.wrapped = OverlappedZero1(model, optimizer, group=group, groups=groups, bucket_bytes=bucket)
        elif self.strategy == "zero2":
            self.wrapped = Zero2(model, optimizer, group=group, groups=groups, bucket_bytes=bucket)
        elif self.strategy == "zero3":
            self.wrapped = Zero3(model, optimizer, group=group, param_dtype=low)
        else:
            self.wrapped = FullyShardedDataParallel(
                model, optimizer, group=group, param_dtype=low, reduce_dtype=torch.float32
            )

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last or self.strategy in GATHERED else self.wrapped.no_sync()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self.gradient_ranks).backward()  # they all take the mean over the ranks

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.tensor is not None:
            return self.clip_together(self.gradients(), max_norm)
        if self.strategy == "ddp" and self.experts is not None:
            return self.clip_with_experts(self.experts, max_norm)
        if self.strategy == "ddp":  # every rank has the whole gradient
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return self.wrapped.clip_grad_norm_(max_norm)

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
        """This rank's gradients after a backward, by name: whole under ddp, else of its shards."""
        if self.strategy == "ddp":
            return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if self.strategy in ("zero1", "zero2"):
            return gradients_of(self.wrapped)
        return {name: piece.data.grad for name, piece in self.wrapped.pieces().items() if piece.data.grad is not None}

    def update(self) -> None:
        (self.optimizer if self.strategy == "ddp" else self.wrapped).step()

    def zero_grad(self) -> None:
        (self.optimizer if self.strategy == "ddp" else self.wrapped).zero_grad()

    def pieces(self) -> dict[str, Shard]:
        own = (
            self.wrapped.pieces()
            if self.strategy != "ddp"
            else {name: Shard(p.shape, 0, p.detach().view(-1)) for name, p in self.parameters().items()}
        )
        return {name: self.experts.in_whole(name, piece) for name, piece in own.items()} if self.experts else own

    def parameters_by_part(self) -> list[tuple[int, dict[str, torch.Tensor]]]:
        (part, all_of_them), *_ = super().parameters_by_part()
        if self.experts is None:
            return [(part, all_of_them)]
        spread = {name: all_of_them.pop(name) for name in self.experts.shapes}
        return [(part, all_of_them), (self.experts.place, spread)]

    def describe(self) -> Mapping[str, Any]:
        size = self.config.parallel.expert_parallel_size
        return super().describe() | (
            {
                "experts": {  # type: ignore[operator]
                    "expert_parallel_size": size,
                    "expert_data_parallel_size": self.grid.dp // size,
                }
            }
            if self.experts
            else {}
        )

    def refresh(self) -> None:
        if self.strategy != "ddp":
            self.wrapped.refresh()
