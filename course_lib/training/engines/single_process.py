"""Plain PyTorch on one device: no Accelerate, no process group, nothing hidden."""

import contextlib
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.config import Config
from course_lib.training.engines.base import StepEngine
from course_lib.training.overflow import OverflowWatch
from course_lib.training.precision import pick_device, pick_precision
from course_lib.training.ranks import OneProcess


class SingleProcess(StepEngine):
    """One process that has everything, for ``training_type: basic``."""

    name = "torch"

    @classmethod
    def start(cls, config: Config) -> Self:
        device = pick_device(config.run.device)
        return cls(config, OneProcess(device, pick_precision(config.run.mixed_precision, device)))

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.wrapped = model
        # fp16 gradients below 6e-8 would vanish, so the loss is scaled up (arXiv 1710.03740, section 3.2).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.stored.scaler, self.overflow = self.scaler, OverflowWatch()

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        self.scaler.scale(loss).backward()

    def clip(self, max_norm: float) -> torch.Tensor:
        self.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def update(self) -> None:
        with self.overflow.watching(self.scaler):
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @property
    def step_was_skipped(self) -> bool:  # type: ignore[override]
        return self.overflow.skipped()

    @property
    def knows_at_once(self) -> bool:  # type: ignore[override]
        return not self.scaler.is_enabled()
