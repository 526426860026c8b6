"""Histograms of gradients and parameters while a model trains."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from course_lib.tracking.base import Histogram
from course_lib.training.checkpoints.sharded_state import ShardedState
from course_lib.training.session import Session

BINS = 64


class TensorWatch:
    """Looks at this rank's gradients just before a step that is due, and at its parameters after it.

    Gradients are those that the optimizer is given: of the global batch, clipped. Where state is sharded, they are
    this rank's shards.

    Args:
        trainer: about to train.
        kind: ``gradients``, ``parameters``, ``all`` or ``none``.
        every: optimizer steps between two looks; the last step is looked at too.
    """

    def __init__(self, trainer: Session, kind: str, every: int):
        self.trainer, self.kind, self.every = trainer, kind, every
        self.gradients: dict[str, Histogram] = {}
        self.hook: Any = None
        if kind in ("gradients", "all"):
            self.names = dict(trainer.model.named_parameters())
            self.hook = trainer.optimizer.register_step_pre_hook(self._look_at_gradients)

    def is_due(self, step: int) -> bool:
        """Whether this optimizer step, counted from 1, is looked at."""
        return self.kind != "none" and (step % self.every == 0 or step >= self.trainer.state.max_steps)

    def _look_at_gradients(self, *_: Any) -> None:
        if self.is_due(self.trainer.state.step + 1):  # counted after the optimizer's
            self.gradients = histograms(
                {
                    f"gradients/{name}": parameter.grad
                    for name, parameter in self.names.items()
                    if parameter.grad is not None
                }
            )

    def collect(self) -> dict[str, Histogram]:
        """The histograms of the step just done, by ``gradients/NAME`` and ``parameters/NAME``."""
        collected, self.gradients = self.gradients, {}
        if self.kind in ("parameters", "all"):
            collected |= histograms({f"parameters/{name}": tensor for name, tensor in self._parameters()})
        return collected

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        trainer = self.trainer
        if isinstance(trainer.stored, ShardedState):
            return [(name, shard.data) for name, shard in trainer.stored.shards().items()]
        return list(trainer.model.named_parameters())

    def close(self) -> None:
        """Stop looking."""
        if self.hook:
            self.hook.remove()


def histograms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Histogram]:
    """Of the finite elements held here, in :data:`BINS` bins between the least and the largest; none of empty tensors.

    The device is waited for twice, however many tensors there are: once for all ends, once for all counts.
    """
    held = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        for name, tensor in tensors.items()
    }
    held = {name: tensor.float() for name, tensor in held.items() if tensor.numel()}
    if not held:
        return {}
    ends = torch.stack([torch.stack(tensor.aminmax()) for tensor in held.values()]).tolist()
    for row, (name, tensor) in enumerate(held.items()):
        if not all(map(math.isfinite, ends[row])):
            held[name] = tensor[torch.isfinite(tensor)]
            ends[row] = [float(end) for end in held[name].aminmax()] if held[name].numel() else [0.0, 0.0]
        if ends[row][0] == ends[row][1]:
            ends[row] = [ends[row][0] - 0.5, ends[row][1] + 0.5]
    counts = torch.stack(
        [torch.histc(tensor, BINS, *pair) for tensor, pair in zip(held.values(), ends, strict=True)]
    ).tolist()
    return {
        name: Histogram([int(count) for count in row], *pair)
        for name, row, pair in zip(held, counts, ends, strict=True)
    }
