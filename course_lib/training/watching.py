"""Histograms of gradients and parameters while a model trains."""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from course_lib.tracking.base import Histogram
from course_lib.training.accelerated import AcceleratedTrainer

if TYPE_CHECKING:
    from course_lib.training.basic import BasicTrainer

BINS = 64


class TensorWatch:
    """Looks at this rank's gradients just before a step that is logged, and at its parameters after it.

    Gradients are those that the optimizer is given: of the global batch, clipped. Where state is sharded, they are
    this rank's shards.

    Args:
        trainer: about to train.
        kind: ``gradients``, ``parameters``, ``all`` or ``none``.
    """

    def __init__(self, trainer: "BasicTrainer", kind: str):
        self.trainer = trainer
        self.watches_parameters = kind in ("parameters", "all")
        self.gradients: dict[str, Histogram] = {}
        self.hook: Any = None
        if kind in ("gradients", "all"):
            self.names = dict(trainer.model.named_parameters())
            self.hook = trainer.optimizer.register_step_pre_hook(self._look_at_gradients)

    def _look_at_gradients(self, *_: Any) -> None:
        state = self.trainer.state
        step = state.step + 1  # counted after the optimizer's
        if step % self.trainer.config.run.logging_steps == 0 or step >= state.max_steps:
            self.gradients = {f"gradients/{name}": _histogram(parameter.grad)
                              for name, parameter in self.names.items()
                              if parameter.grad is not None and _held(parameter.grad)}

    def collect(self) -> dict[str, Histogram]:
        """The histograms of the step just done, by ``gradients/NAME`` and ``parameters/NAME``."""
        found, self.gradients = self.gradients, {}
        if self.watches_parameters:
            found |= {f"parameters/{name}": _histogram(tensor) for name, tensor in self._parameters() if _held(tensor)}
        return found

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        trainer = self.trainer
        if isinstance(trainer, AcceleratedTrainer) and trainer.engine.shards_state:
            return [(name, piece.data) for name, piece in trainer.engine.pieces().items()]
        return list(trainer.model.named_parameters())

    def close(self) -> None:
        """Stop looking."""
        if self.hook:
            self.hook.remove()


def _held(tensor: torch.Tensor) -> int:
    """Elements of a tensor that are on this rank."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


def _histogram(tensor: torch.Tensor) -> Histogram:
    """Of the finite elements held here, in :data:`BINS` bins between the least and the largest."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().float()
    finite = local[torch.isfinite(local)]
    low, high = (float(end) for end in finite.aminmax()) if finite.numel() else (0.0, 0.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(finite, BINS, low, high)
    return Histogram([int(count) for count in counts.tolist()], torch.linspace(low, high, BINS + 1).tolist())
