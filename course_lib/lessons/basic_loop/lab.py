"""Measurements of lesson 01: a step's bytes by kind and by moment, its seconds, padding, and the gradient.

Bytes are exact counts of tensors, not readings of the process's memory, so they are the same on
every machine; what an allocator adds on top is not in them.
"""

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from course_lib.parallel.clock import Clock, Phases, Stamp, between
from course_lib.training.evaluation import evaluating

if TYPE_CHECKING:
    from course_lib.training.trainer import Trainer

Batch = dict[str, torch.Tensor]


def bytes_by_kind(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Bytes of ``parameters``, ``gradients`` and ``optimizer states`` that are held now; a tied weight counts once."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer states": sum(value.nbytes for value in states),
    }


class _Kept:
    """One saved tensor; autograd drops it when the backward of its operation is done."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class SavedForBackward(saved_tensors_hooks):
    """Counts what autograd keeps for backward, from operations that run while it is entered.

    A storage that several operations save counts once, and parameters, which are held anyway, not at
    all. What activation checkpointing computes again during backward is not seen.

    Args:
        model: whose parameters are left out.

    Attributes:
        bytes: kept now; falls while backward lets go.
        kept: shape, dtype and bytes of each storage so far, in order; shape and dtype are those of the tensor that
            was the first to save it.
    """

    def __init__(self, model: nn.Module):
        self.bytes, self.kept = 0, list[tuple[tuple[int, ...], torch.dtype, int]]()
        self._left_out = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._holders = Counter[int]()
        super().__init__(self._keep, lambda kept: kept.tensor)

    def _keep(self, tensor: torch.Tensor) -> _Kept:
        kept, storage = _Kept(tensor), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._left_out:
            if not self._holders[address]:
                self.bytes += size
                self.kept.append((tuple(tensor.shape), tensor.dtype, size))
            self._holders[address] += 1
            weakref.finalize(kept, self._let_go, address, size)
        return kept

    def _let_go(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self.bytes -= size


@dataclass(frozen=True)
class Moment:
    """Bytes by kind at one moment of a step."""

    seconds: float
    """Since the timeline began; on a GPU when the device came to it, as its memory is handed out in that order."""
    phase: str
    """`forward`, `backward` or `optimizer`."""
    held: dict[str, int]
    """Bytes of `parameters`, `optimizer states`, `gradients` and `activations`."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


class MemoryTimeline(Phases):
    """Phases that also note the bytes held: around each phase, at each gradient, before and after the update.

    Args:
        model: the bare model.
        optimizer: steps it.
        clock: of the device that they are on; None for a CPU.

    Attributes:
        moments: in order of time, up to the last :meth:`settle`.
        saved: counts the activations.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, clock: Clock | None = None):
        super().__init__(clock)
        self.model, self.optimizer = model, optimizer
        self.saved, self.moments = SavedForBackward(model), list[Moment]()
        self._phase, self._start = "", self.stamp()
        self._noted: list[tuple[Stamp, str, dict[str, int]]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time towards ``name``, and note what is held as it begins and as it ends."""
        self._phase = name
        self.note()
        with super().__call__(name), self.saved if name == "forward" else contextlib.nullcontext():
            yield
        self.note()

    def note(self, *_: object) -> None:
        """Add a moment."""
        held = bytes_by_kind(self.model, self.optimizer) | {"activations": self.saved.bytes}
        self._noted.append((self.stamp(), self._phase, held))

    def settle(self) -> None:
        super().settle()
        self.moments += [Moment(between(self._start, stamp), phase, held) for stamp, phase, held in self._noted]
        self._noted.clear()


def watch_memory(trainer: "Trainer", batches: Iterable[Batch]) -> tuple[list[Moment], list[float]]:
    """Take one training step per batch, by the trainer's own unchanged code, and note what is held as it goes.

    Returns:
        The moments in order of time, and the loss of each step.
    """
    timeline, phases = MemoryTimeline(trainer.model, trainer.optimizer, trainer.clock), trainer.phases
    hooks = [p.register_post_accumulate_grad_hook(timeline.note) for p in trainer.model.parameters()]
    hooks += [module.register_forward_hook(timeline.note) for module in trainer.model.modules()]
    hooks += [
        trainer.optimizer.register_step_pre_hook(timeline.note),
        trainer.optimizer.register_step_post_hook(timeline.note),
    ]
    trainer.phases = timeline
    trainer.wrapped.train()
    try:
        losses = [trainer.train_step([batch])[0].item() for batch in batches]
        trainer.clock.settle()
        timeline.settle()
        return timeline.moments, losses
    finally:
        trainer.phases = phases
        for hook in hooks:
            hook.remove()


def seconds_by_turns(
    trainer: "Trainer", ways: Mapping[str, Sequence[Batch]], prepare: Callable[[str], object] = lambda name: None
) -> dict[str, list[dict[str, float]]]:
    """Train in several ways by turns, a step each, so that what else the machine does falls on all alike.

    Args:
        trainer: takes the steps, in training mode.
        ways: batches by the name of the way, as many for each.
        prepare: called with the name before each step.
    Returns:
        Seconds by phase, for each way and turn; on a GPU the device's, see :class:`Phases`.
    """
    before = trainer.phases
    phases: dict[str, list[Phases]] = {name: [] for name in ways}
    trainer.wrapped.train()
    for turn in zip(*ways.values(), strict=True):
        for name, batch in zip(ways, turn, strict=True):
            prepare(name)
            trainer.phases = Phases(trainer.clock)
            phases[name].append(trainer.phases)
            trainer.train_step([batch])
    trainer.phases = before
    trainer.clock.settle()
    for phase in itertools.chain(*phases.values()):
        phase.settle()
    return {name: [dict(phase.seconds) for phase in taken] for name, taken in phases.items()}


def gradient(trainer: "Trainer", micro_batches: Sequence[Batch], loss_weighting: str = "token") -> torch.Tensor:
    """The gradient that a trainer accumulates over the micro-batches of one global batch, without dropout.

    Args:
        trainer: keeps its weights; its gradients are left cleared.
        micro_batches: parts of the global batch.
        loss_weighting: see :class:`course_lib.config.RunConfig`.
    Returns:
        float32 [P], the parameters one after the other.
    """
    config, trainer.config = trainer.config, trainer.config.replace(loss_weighting=loss_weighting)
    with evaluating(trainer.wrapped):
        trainer.optimizer.zero_grad()
        targets = trainer.count_targets(micro_batches)
        for batch in micro_batches:
            trainer.loss(batch, targets, len(micro_batches)).backward()
    taken = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    trainer.optimizer.zero_grad()
    trainer.config = config
    return taken


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """L2 norm of the difference over the L2 norm of ``other``."""
    return ((one - other).norm() / other.norm()).item()


def padding_share(lengths: np.ndarray, batches: Sequence[np.ndarray]) -> float:
    """Share of the tokens of some batches that are padding, where each batch is padded to its longest row.

    Args:
        lengths: int [rows], tokens of each row of the data.
        batches: row numbers of each batch.
    """
    real = sum(lengths[rows].sum() for rows in batches)
    return float(1 - real / sum(len(rows) * lengths[rows].max() for rows in batches))
