"""Distributed data parallel through Accelerate: every rank holds everything, and DDP averages the gradients."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.training.engines.base import StepEngine
from course_lib.training.overflow import OverflowWatch
from course_lib.training.unwrapping import take_back_forward


def ddp_options(config: Config) -> DistributedDataParallelKwargs:
    """Options with which Accelerate wraps a model in torch's DistributedDataParallel."""
    # static_graph stays off: it spares the search for unused parameters, which most models do without, its first
    # backward sends nothing before its end, and a first backward under no_sync it does not survive.
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    if config.parallel.bucket_mb is not None:
        options.bucket_cap_mb = config.parallel.bucket_mb  # type: ignore[assignment]
    return options


class AccelerateDDP(StepEngine):
    """``--strategy ddp --engine torch``, also on one process and on one GPU."""

    by_ddp = True

    @classmethod
    def plugins(cls, config: Config, device: torch.device, precision: str) -> dict[str, Any]:
        return {"kwargs_handlers": [ddp_options(config)]}

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.accelerator = self.ranks.accelerator
        self.accelerator.ddp_handler.find_unused_parameters = self.finds_unused
        self.wrapped, self.scaled_optimizer = self.accelerator.prepare(model, optimizer)
        self.stored.scaler, self.overflow = self.accelerator.scaler, OverflowWatch()
        take_back_forward(model)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self.wrapped)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        # DDP takes the mean over the ranks; the loss is already a share of their sum.
        self.accelerator.backward(loss * self.ranks.num_processes)

    def clip(self, max_norm: float) -> torch.Tensor:
        return self.accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)

    def update(self) -> None:
        with self.overflow.watching(self.accelerator.scaler):
            self.scaled_optimizer.step()

    def zero_grad(self) -> None:
        self.scaled_optimizer.zero_grad()

    @property
    def step_was_skipped(self) -> bool:  # type: ignore[override]
        return self.overflow.skipped()

    @property
    def knows_at_once(self) -> bool:  # type: ignore[override]
        return self.accelerator.scaler is None
