"""Every storage that a stretch of code allocates, on real or fake tensors: when, how large, and what for.

Where :mod:`course_lib.metering.resident_memory` looks at a running training now and then, the log sees each
allocation and each release, and decides at the end what each storage was for: one that a gradient was computed in
counts as a gradient from its first byte. It costs some microseconds an operator.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.metering.collective_log import CollectiveLog, Transfer, ring_bytes
from course_lib.metering.storages import TrackedStorage, TrainingStorages, resizes
from course_lib.parallel.clock import Clock
from course_lib.replacing import replaced

KINDS = (
    "parameters",
    "parameter copies",
    "gradients",
    "optimizer states",
    "communication buffers",
    "inputs",
    "logits",
    "activations",
    "temporaries",
)
"""A storage that serves as several of these counts as the first.

Parameter copies are gathered from other ranks, or cast to 16 bits. Logits are all storages with a row for each token
and a column for each word, the loss's own too. Activations are what autograd saves for the backward pass; what
checkpointing computes again within it is temporary, as is all the rest.
"""
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Collectives that DTensor issues; on fake tensors they never reach a process group."""


@dataclass(frozen=True)
class CollectiveRecord:
    """A collective as this rank issued it.

    Attributes:
        name: as :class:`course_lib.metering.collective_log.Collective` has it.
        bytes: the whole payload, as there.
        dtype: of the payload.
        ranks: that take part.
        sent: bytes that this rank sends under the ring model.
        phase: in which it was issued.
        module: that was computing.
    """

    name: str
    bytes: int
    dtype: str
    ranks: int
    sent: int
    phase: str
    module: str


class Change(NamedTuple):
    """A storage came, went or was resized."""

    phase: str
    kind: str
    module: str
    bytes: int
    counted: bool
    """It was between start and stop."""


class AllocationLog(TrainingStorages, TorchDispatchMode):
    """Notes storages and collectives while it is entered; entered above a ``FakeTensorMode`` it sees that one's.

    Args:
        vocabulary: width of the logits; None counts them as what else they are.
    Attributes:
        phase: name of what runs now, to be set by the caller.
        module: name of what computes now; :meth:`watch` sets it.
    """

    def __init__(self, vocabulary: int | None = None):
        TrainingStorages.__init__(self, KINDS)
        TorchDispatchMode.__init__(self)
        self.vocabulary = vocabulary
        self.phase, self.module = "set-up", ""
        self._events: list[tuple[TrackedStorage, int, str]] = []
        self._outer: list[str] = []
        self._looking = True
        self._issued: list[CollectiveRecord | tuple[str, str]] = []  # of those that CollectiveLog notes only the place

    def __enter__(self) -> "AllocationLog":
        self._traffic = CollectiveLog(Clock(torch.device("cpu")), self.hold_handed_over)
        with contextlib.ExitStack() as stack:
            self._traffic.start()
            stack.callback(self._traffic.stop)
            derive = ShardingPropagator._propagate_tensor_meta_non_cached

            def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
                """DTensor works out shapes on fake tensors of global size."""
                self._looking = False
                try:
                    return derive(propagator, schema)
                finally:
                    self._looking = True

            stack.enter_context(resizes(self.measure_again))
            stack.enter_context(replaced(ShardingPropagator, derive.__name__, unseen))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.hold_saved, lambda tensor: tensor))
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes itself apart first
        result = func(*args, **(kwargs or {}))
        namespace = func.namespace
        if namespace in ("prim", "profiler") or not self._looking:
            return result
        if namespace == "_c10d_functional" and isinstance(result, FakeTensor):
            self._functional(func, args, result)
        kind = "temporaries"
        if func is torch.ops.aten._to_copy.default and self._kind(args[0]) == "parameters":
            kind = "parameter copies"
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                logits = tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary
                self.hold(tensor, "logits" if logits else kind)
        return result

    def watch(self, model: nn.Module, names: Mapping[nn.Module, str]) -> None:
        """Follow which of some modules computes, forward and backward, and find gathered parameters and gradients."""
        self._parts = set(names.values())
        self.find_all(model)
        for module in model.modules():
            if module in names:
                module.register_forward_pre_hook(functools.partial(self._enter, names[module]), prepend=True)
                module.register_forward_hook(functools.partial(self._leave, names[module]), always_call=True)
            if module._parameters:
                module.register_forward_pre_hook(self._uses)

    def find_all(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Look through parameters, their gradients and the optimizer's states."""
        for name, parameter in model.named_parameters():
            self.hold(parameter, "parameters", self._part(name))
            if parameter.grad is not None:
                self.hold(parameter.grad, "gradients", self._part(name))
            for tensor in tree_leaves(optimizer.state.get(parameter, {}) if optimizer else {}):
                if isinstance(tensor, torch.Tensor):
                    self.hold(tensor, "optimizer states", self._part(name))
        for name, buffer in model.named_buffers():
            self.hold(buffer, "inputs", self._part(name))

    def _part(self, name: str) -> str:
        """The watched part of the model that a tensor of this name belongs to."""
        owner = name.rpartition(".")[0]
        while owner and owner not in self._parts:
            owner = owner.rpartition(".")[0]
        return owner

    def start(self) -> None:
        """From here on peaks and collectives are counted."""
        self._from = len(self._events), len(self._issued)

    def stop(self) -> None:
        """Note nothing that comes later."""
        self._to = len(self._events), len(self._issued)

    def exchanges(self) -> list[CollectiveRecord]:
        """The collectives between start and stop, in the order of issue."""
        noted = iter(self._traffic.transfers)
        every = [call if isinstance(call, CollectiveRecord) else _exchange(next(noted), *call) for call in self._issued]
        return every[self._from[1] : self._to[1]]

    def changes(self) -> Iterator[Change]:
        """Every change of a storage up to stop, in order."""
        for place, (storage, size, phase) in enumerate(self._events[: self._to[0]]):
            yield Change(phase, storage.kind, storage.module, size, place >= self._from[0])

    def _kind(self, tensor: Any) -> str:
        known = self.find(tensor) if isinstance(tensor, torch.Tensor) else None
        return known.kind if known else ""

    def _resized(self, storage: TrackedStorage, change: int) -> None:
        self._events.append((storage, change, self.phase))

    def hold_handed_over(self, tensors: list[torch.Tensor]) -> None:
        """Watch what a collective of a process group is given, and note its place."""
        super().hold_handed_over(tensors)
        self._issued.append((self.phase, self.module))

    def _functional(self, func: Any, args: Any, result: torch.Tensor) -> None:
        """Note a collective of DTensor's."""
        name = FUNCTIONAL.get(func._schema.name.partition("::")[2])
        if name is None:  # it waits for one
            return
        group = _resolve_process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))  # type: ignore[arg-type]
        payload = result if name == "all_gather" else args[0]
        super().hold_handed_over([args[0], result])
        size, ranks = payload.numel() * payload.element_size(), dist.get_world_size(group)
        self._issued.append(
            CollectiveRecord(
                name,
                size,
                str(payload.dtype).removeprefix("torch."),
                ranks,
                ring_bytes(name, size, ranks, group.rank()),
                self.phase,
                self.module,
            )
        )

    def _uses(self, module: nn.Module, _: Any) -> None:
        self.hold_parameters(module, "parameter copies")

    def _enter(self, name: str, module: nn.Module, _: Any) -> None:
        self._outer.append(self.module)
        self.module = name

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.module = self._outer.pop()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._backward, name))

    def _backward(self, name: str, gradient: torch.Tensor) -> None:
        self.module = name


def _exchange(transfer: Transfer, phase: str, module: str) -> CollectiveRecord:
    dtype = str(transfer.dtype).removeprefix("torch.")
    return CollectiveRecord(transfer.name, transfer.bytes, dtype, len(transfer.ranks), transfer.sent, phase, module)
