"""Bytes that stay on a rank, by kind, and their peaks: distinct storages, each counted once and while it lives."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from course_lib.metering.storages import TrackedStorage, TrainingStorages

KINDS = ("parameters", "gradients", "optimizer states", "communication buffers", "activations")
"""A storage that serves as several of these counts as the first."""

INPUTS = "inputs"  # batches and module buffers: known, so that they are not taken for activations

Resident = Callable[[], Mapping[str, Iterable[torch.Tensor]]]


class Residency(TrainingStorages):
    """The storages of a model, its gradients, its optimizer and its communication, and what autograd saved.

    Parameters and gradients are those of the module and of the optimizer; a tensor that the optimizer updates
    and that is no parameter of the module (a shard, an fp32 master) counts under optimizer states, as do all
    tensors of its state, step counters too. A tensor handed to a collective that is nothing else is a
    communication buffer. An engine that knows better hands in ``resident``, which decides on these four kinds.
    Activations are what autograd saved for backward, except for parameters, module buffers and inputs, until their
    storage is freed; what activation checkpointing computes again within backward is not seen.
    Of DeepSpeed's ZeRO the averaged gradients of this rank's shard count as gradients, and the buckets in which
    it lays gradients to reduce them (``ipg_buckets``) as communication buffers.

    Args:
        module: None to watch only what collectives and autograd hold.
        optimizer: torch's, or Accelerate's or DeepSpeed's wrapper of one.
        resident: the tensors now alive by kind.
    Attributes:
        now: bytes by kind.
        peak: the most of each kind.
        peak_total: the most of all kinds together.
    """

    def __init__(self, module: nn.Module | None, optimizer: Any, resident: Resident | None):
        super().__init__((*KINDS[:4], INPUTS, *KINDS[4:]))
        self.model, self.resident = module, resident
        wrappers = _wrappers(optimizer) or _wrappers(getattr(module, "optimizer", None))
        self.optimizer: torch.optim.Optimizer | None = wrappers[-1] if wrappers else None
        self._zero = next((wrapper for wrapper in wrappers if hasattr(wrapper, "ipg_buckets")), None)
        self.now = dict.fromkeys(KINDS, 0)
        self.peak = dict.fromkeys(KINDS, 0)
        self.peak_total = 0
        self._gradients: dict[int, Callable[[], Any]] = {}  # by parameter, those already watched

    def hold_handed_over(self, tensors: list[torch.Tensor]) -> None:
        """Hold what a collective is given."""
        self.sample()
        if self.resident is None:
            super().hold_handed_over(tensors)

    def hold_inputs(self, *values: Any) -> None:
        """A module's arguments, which the caller keeps."""
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self.hold(value, INPUTS)

    def hold_parameter(self, parameter: nn.Parameter, kind: str = "parameters") -> None:
        """Watch a parameter, and its gradients as they come."""
        if self.resident is None:
            super().hold_parameter(parameter, kind)
            if hasattr(parameter, "ds_tensor"):  # DeepSpeed ZeRO-3: this rank's shard, while the parameter is empty
                self.hold(parameter.ds_tensor, kind)

    def look(self) -> None:
        """Find all storages, and measure them."""
        for parameter in self.model.parameters() if self.model is not None else ():
            self.hold_parameter(parameter)
        if self.resident is None and self.optimizer is not None:
            self._look_at_optimizer(self.optimizer)
        self.sample()

    def sample(self) -> None:
        """Find new gradients, and measure all storages again: some may have been resized."""
        if self.resident is not None:
            self._ask_engine(self.resident())
        else:
            self._look_at_deepspeed()
            for reference in list(self._parameters.values()):
                self._hold_gradient_of(reference())
        self.measure_all(but="optimizer states")

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self.clear()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._look_at_deepspeed()
        self._hold_gradient_of(parameter)

    def _hold_gradient_of(self, parameter: torch.Tensor | None) -> None:
        gradient = parameter.grad if parameter is not None else None
        if gradient is not None and self._gradients.get(id(parameter), _gone)() is not gradient:
            self._gradients[id(parameter)] = weakref.ref(gradient)
            self.hold(gradient, "gradients")

    def _look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                self.hold(tensor, "optimizer states")  # it stays a parameter where the module has it
                self._hold_gradient_of(tensor)
        for state in optimizer.state.values():
            for value in state.values():
                for part in [value] if isinstance(value, torch.Tensor) else tree_leaves(value):
                    if isinstance(part, torch.Tensor):
                        self.hold(part, "optimizer states")

    def _look_at_deepspeed(self) -> None:
        if self._zero is None:
            return
        buckets = [bucket.buffer for bucket in self._zero.ipg_buckets.values()]
        gradients = [self._zero.averaged_gradients, getattr(self._zero, "grad_partitions_flat_buffer", None)]
        for kind, values in (("communication buffers", buckets), ("gradients", gradients)):
            for value in tree_leaves(values):
                if isinstance(value, torch.Tensor):
                    self.hold(value, kind, certain=True)

    def _ask_engine(self, told: Mapping[str, Iterable[torch.Tensor]]) -> None:
        named = [(kind, tensor) for kind in KINDS[:4] for tensor in told.get(kind, ())]
        for kind, tensor in named:
            self.hold(tensor, kind)
        self.keep_only([tensor for _, tensor in named], before=INPUTS)

    def _resized(self, storage: TrackedStorage, change: int) -> None:
        self._count(storage.kind, change)

    def _moved(self, storage: TrackedStorage, before: str) -> None:
        self._count(before, -storage.bytes)
        self._count(storage.kind, storage.bytes)

    def _count(self, kind: str, change: int) -> None:
        if kind != INPUTS:
            self.now[kind] += change
            self.peak[kind] = max(self.peak[kind], self.now[kind])
            self.peak_total = max(self.peak_total, sum(self.now.values()))


def _gone() -> None:
    """A reference to nothing."""


def _wrappers(optimizer: Any) -> list[Any]:
    """An optimizer, and within Accelerate's, DeepSpeed's and torch's wrappers those that they wrap."""
    chain = [] if optimizer is None else [optimizer]
    while chain and (inner := getattr(chain[-1], "optimizer", getattr(chain[-1], "optim", None))) is not None:
        chain.append(inner)
    return chain
