"""Bytes that stay on a rank, by kind, and their peaks: distinct storages, each counted once and while it lives."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

KINDS = ("parameters", "gradients", "optimizer states", "communication buffers", "activations")
"""A storage that serves as several of these counts as the first."""

INPUTS = "inputs"  # batches and module buffers: known, so that they are not taken for activations
ORDER = {kind: place for place, kind in enumerate((*KINDS[:4], INPUTS, *KINDS[4:]))}

Resident = Callable[[], Mapping[str, Iterable[torch.Tensor]]]


@dataclass(eq=False)
class _Storage:
    """A storage that is being watched; ``certain`` when its kind is no guess that another use may overrule."""

    alive: weakref.ref
    kind: str
    bytes: int = 0
    certain: bool = False


class Residency:
    """The storages of a model, its gradients, its optimizer and its communication, and what autograd saved.

    Parameters and gradients are those of the module and of the optimizer; a tensor that the optimizer updates
    and that is no parameter of the module (a piece, an fp32 master) counts under optimizer states, as do all
    tensors of its state, step counters too. A tensor handed to a collective that is nothing else is a
    communication buffer. An engine that knows better hands in ``resident``, which decides on these four kinds.
    Activations are what autograd saved for backward, but for parameters, module buffers and inputs, until their
    storage is freed; what activation checkpointing computes again within backward is not seen.
    Of DeepSpeed's ZeRO the averaged gradients of this rank's piece count as gradients, and the buckets in which
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
        self.module, self.resident = module, resident
        wrappers = _wrappers(optimizer) or _wrappers(getattr(module, "optimizer", None))
        self.optimizer: torch.optim.Optimizer | None = wrappers[-1] if wrappers else None
        self._zero = next((each for each in wrappers if hasattr(each, "ipg_buckets")), None)
        self.now = dict.fromkeys(KINDS, 0)
        self.peak = dict.fromkeys(KINDS, 0)
        self.peak_total = 0
        self._storages: dict[int, _Storage] = {}
        self._parameters: dict[int, weakref.ref] = {}
        self._gradients: dict[int, Callable[[], Any]] = {}  # by parameter, those already watched
        self._hooks: list[Any] = []
        self._lock = threading.RLock()  # a storage may be freed on any thread, and within our own calls

    def hold(self, tensor: torch.Tensor, kind: str, certain: bool = False) -> None:
        """Watch a tensor's storage as ``kind``, or as what it is already if that comes first."""
        for part in _plain(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            with self._lock:
                known = self._storages.get(key)
                if known is None:
                    freed = functools.partial(self._forget, key)
                    known = self._storages[key] = _Storage(weakref.ref(storage, freed), kind)
                elif not known.certain and (certain or ORDER[kind] < ORDER[known.kind]):
                    self._resize(known, 0)
                    known.kind = kind
                known.certain |= certain
                self._resize(known, storage.nbytes())

    def hold_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd's pack hook: saves the tensor, an output without its graph, which would keep itself alive."""
        self.hold(tensor, "activations")
        return tensor if tensor.is_leaf else tensor.detach()

    def hold_handed_over(self, tensors: list[torch.Tensor]) -> None:
        """What a collective is given."""
        self.sample()
        if self.resident is None:
            for tensor in tensors:
                self.hold(tensor, "communication buffers")

    def hold_inputs(self, *values: Any) -> None:
        """A module's arguments, which the caller keeps."""
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                self.hold(value, INPUTS)

    def hold_parameters(self, module: nn.Module) -> None:
        """Watch the parameters that a module itself has just now; FSDP2 puts the gathered ones in their place."""
        if self.resident is None:
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._hold_parameter(parameter)

    def look(self) -> None:
        """Find all storages, and measure them."""
        if self.resident is None:
            if self.module is not None:
                for parameter in self.module.parameters():
                    self._hold_parameter(parameter)
            if self.optimizer is not None:
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
        with self._lock:
            for known in list(self._storages.values()):
                storage = known.alive() if known.kind != "optimizer states" else None
                if storage is not None:
                    self._resize(known, storage.nbytes())

    def close(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._storages.clear()

    def _hold_parameter(self, parameter: nn.Parameter) -> None:
        self.hold(parameter, "parameters")
        if hasattr(parameter, "ds_tensor"):  # DeepSpeed ZeRO-3: this rank's piece, while the parameter is empty
            self.hold(parameter.ds_tensor, "parameters")
        key = id(parameter)
        if key not in self._parameters:
            self._parameters[key] = weakref.ref(parameter, lambda _: self._parameters.pop(key, None))
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_arrived))

    def _gradient_arrived(self, parameter: torch.Tensor) -> None:
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
        named: set[int] = set()
        for kind in KINDS[:4]:
            for tensor in told.get(kind, ()):
                self.hold(tensor, kind)
                named |= {part.untyped_storage()._cdata for part in _plain(tensor)}
        with self._lock:
            for key in [key for key, known in self._storages.items() if ORDER[known.kind] < ORDER[INPUTS]]:
                if key not in named:
                    self._forget(key)

    def _resize(self, known: _Storage, size: int) -> None:
        change, known.bytes = size - known.bytes, size
        if change and known.kind != INPUTS:
            self.now[known.kind] += change
            self.peak[known.kind] = max(self.peak[known.kind], self.now[known.kind])
            self.peak_total = max(self.peak_total, sum(self.now.values()))

    def _forget(self, key: int, _: Any = None) -> None:
        with self._lock:
            if key in self._storages:
                self._resize(self._storages.pop(key), 0)


def _gone() -> None:
    """A reference to nothing."""


def _wrappers(optimizer: Any) -> list[Any]:
    """An optimizer, and within Accelerate's, DeepSpeed's and torch's wrappers those that they wrap."""
    chain = [] if optimizer is None else [optimizer]
    while chain and (inner := getattr(chain[-1], "optimizer", getattr(chain[-1], "optim", None))) is not None:
        chain.append(inner)
    return chain


def _plain(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's elements on this rank: of a DTensor its local one, of a sparse one two."""
    if tensor.is_sparse:
        return tensor._indices(), tensor._values()
    if type(tensor) in (torch.Tensor, nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        return (tensor,)
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return tuple(inner for part in parts if isinstance(part, torch.Tensor) for inner in _plain(part))
