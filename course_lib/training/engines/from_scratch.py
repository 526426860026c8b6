"""The course's own data parallel, ZeRO and FSDP in the trainer."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import ConfigError
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.engines.base import Engine
from course_lib.training.engines.sharded import PieceEngine


class ScratchDDP(Engine):
    """:class:`~course_lib.parallel.ddp.DataParallel`; the optimizer is torch's own."""

    needs_group = True

    def refuse(self, device: torch.device, precision: str) -> None:
        super().refuse(device, precision)
        _refuse_fp16(precision)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.wrapped = DataParallel(model, bucket_bytes=self.config.parallel.bucket_bytes)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.wrapped.no_sync()  # type: ignore[operator]

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        loss.backward()

    def step(self, max_norm: float) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    @property
    def step_was_skipped(self) -> bool:
        return False

    def bare_model(self) -> nn.Module:
        return self.model


class ScratchSharded(PieceEngine):
    """One of ZeRO's stages, or FSDP: they share a face."""

    def make(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        """The engine around the model."""
        raise NotImplementedError

    def low_precision(self) -> torch.dtype | None:
        """In which gathered parameters travel and compute, where it is not their own."""
        return torch.bfloat16 if self.accelerator.mixed_precision == "bf16" else None

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.remember()
        self.remember_order()
        self.wrapped = self.make(model, optimizer)

    def pieces(self) -> dict[str, Shard]:
        return self.wrapped.pieces()

    def refresh(self) -> None:
        self.wrapped.refresh()

    def resident(self) -> dict[str, list[torch.Tensor]]:
        return self.wrapped.resident()


class ScratchZero1(ScratchSharded):
    """Optimizer states split."""

    def make(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return OverlappedZero1(model, optimizer, bucket_bytes=self.config.parallel.bucket_bytes)


class ScratchZero2(ScratchSharded):
    """Gradients split as well."""

    def make(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return Zero2(model, optimizer, bucket_bytes=self.config.parallel.bucket_bytes)


class ScratchZero3(ScratchSharded):
    """Parameters split as well."""

    casts = True

    def make(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return Zero3(model, optimizer, param_dtype=self.low_precision())


class ScratchFSDP(ScratchSharded):
    """A unit a block."""

    casts = True

    def make(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return FullyShardedDataParallel(model, optimizer, param_dtype=self.low_precision(),
                                        reduce_dtype=torch.float32)


SCRATCH: dict[str, type[Engine]] = {"ddp": ScratchDDP, "zero1": ScratchZero1, "zero2": ScratchZero2,
                                    "zero3": ScratchZero3, "fsdp": ScratchFSDP}


def _refuse_fp16(precision: str) -> None:
    if precision == "fp16":
        raise ConfigError("engine scratch does not scale losses, which fp16 needs",
                          "use --mixed_precision bf16, or --engine torch")
