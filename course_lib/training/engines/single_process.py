"""Plain PyTorch on one device: no Accelerate, no process group, nothing hidden."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from course_lib.data.collating import moved
from course_lib.training.engines.base import Engine
from course_lib.training.overflow import OverflowWatch
from course_lib.training.precision import pick_device, pick_precision


class SingleProcess(Engine):
    """One process that has everything, for ``training_type: basic``."""

    name = "torch"
    rank, num_processes, is_main = 0, 1, True

    def connect(self) -> None:
        self.device = pick_device(self.config.run.device)
        self.precision = pick_precision(self.config.run.mixed_precision, self.device)

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.wrapped = model
        # fp16 gradients below 6e-8 would vanish, so the loss is scaled up (arXiv 1710.03740, section 3.2).
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.overflow = OverflowWatch()

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

    def state(self) -> dict[str, Any]:
        return {"scaler": self.scaler.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["scaler"]:  # a run in another precision had none
            self.scaler.load_state_dict(state["scaler"])

    # --- with nobody to talk to ---

    def deal(self, loader: Any) -> Any:
        return loader

    def to_device(self, batch: Any) -> Any:
        return moved(batch, self.device)

    def votes_to_stop(self, own: int, summed: torch.Tensor, waited: bool) -> int:
        return own

    def gather(self, tensors: Any) -> Any:
        return tensors

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def from_main(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
