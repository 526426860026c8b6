"""The course's own data parallel, ZeRO and FSDP in the trainer."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import ConfigError
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.engines.sharded import ShardedEngine, gradients_of


class Scratch(ShardedEngine):
    """``--engine scratch``: :mod:`course_lib.parallel` around the model; the optimizer is torch's own."""

    wrapped: Any

    @property
    def shards_state(self) -> bool:  # type: ignore[override]
        return self.strategy != "ddp" or self.grid.tp > 1

    @property
    def by_ddp(self) -> bool:  # type: ignore[override]
        return self.strategy == "ddp"

    @property
    def casts(self) -> bool:  # type: ignore[override]
        return self.strategy in ("zero3", "fsdp")

    def refuse(self, device: torch.device, precision: str) -> None:
        if self.strategy == "ddp" and precision == "fp16":
            raise ConfigError("engine scratch does not scale losses, which fp16 needs",
                              "use --mixed_precision bf16, or --engine torch")
        super().refuse(device, precision)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.remember_order()
        bucket, group = self.config.parallel.bucket_bytes, self.groups.dp if self.tensor else None
        low = torch.bfloat16 if self.precision == "bf16" else None  # in which gathered parameters travel and compute
        if self.strategy == "ddp":
            self.wrapped = DataParallel(model, group=group, bucket_bytes=bucket,
                                        find_unused_parameters=self.finds_unused)
        elif self.strategy == "zero1":
            self.wrapped = OverlappedZero1(model, optimizer, group=group, bucket_bytes=bucket)
        elif self.strategy == "zero2":
            self.wrapped = Zero2(model, optimizer, group=group, bucket_bytes=bucket)
        elif self.strategy == "zero3":
            self.wrapped = Zero3(model, optimizer, group=group, param_dtype=low)
        else:
            self.wrapped = FullyShardedDataParallel(model, optimizer, group=group, param_dtype=low,
                                                    reduce_dtype=torch.float32)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        (loss * self.data_ranks).backward()  # they all take the mean over the ranks

    def clip(self, max_norm: float) -> torch.Tensor:
        if self.tensor is not None:
            return self.clip_together(self.gradients(), max_norm)
        if self.strategy == "ddp":  # every rank has the whole gradient
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return self.wrapped.clip_grad_norm_(max_norm)

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
        if self.strategy == "ddp":
            return {name: Shard(p.shape, 0, p.detach().view(-1)) for name, p in self.parameters().items()}
        return self.wrapped.pieces()

    def refresh(self) -> None:
        if self.strategy != "ddp":
            self.wrapped.refresh()
