"""The place where every collective of this process passes, for those who want to look: the meter, the flight recorder.

torch.distributed's Python functions, DDP's reducer (C++), FSDP2, DTensor and DeepSpeed all end in one place:
the operators ``c10d::allreduce_`` and so on of PyTorch's dispatcher. Every call of an operator passes the
dispatch key BackendSelect on its way to gloo's or NCCL's kernel, on any thread, with or without autograd. There
the tap stands, shows the call to its listeners, and lets it pass on. The key has room for one kernel an operator, so
all listeners share it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
"""Operator: the collective's standard name."""

ARGUMENTS = {operator: tuple(argument.name for argument in getattr(torch.ops.c10d, operator).default._schema.arguments)
             for operator in OPERATORS}
"""Operator: the names of its arguments, of which calls leave out trailing ones that are at their defaults."""

INPUTS = {
    "allreduce_": "tensors",
    "allreduce_coalesced_": "tensors",
    "_allgather_base_": "input_tensor",
    "allgather_": "input_tensors",
    "allgather_coalesced_": "input_list",
    "allgather_into_tensor_coalesced_": "inputs",
    "_reduce_scatter_base_": "input_tensor",
    "reduce_scatter_": "input_tensors",
    "reduce_scatter_tensor_coalesced_": "inputs",
    "alltoall_": "input_tensors",
    "alltoall_base_": "input",
    "broadcast_": "tensors",
    "reduce_": "tensors",
    "gather_": "input_tensors",
    "scatter_": "output_tensors",
    "send": "tensors",
    "recv_": "tensors",
    "recv_any_source_": "tensors",
}
"""Operator: the argument that a rank hands in, by whose shape people recognise the call."""


class Listener(Protocol):
    """Who looks. Each method may be called on any thread."""

    def issuing(self, operator: str, args: Sequence[Any]) -> Any:
        """Before a collective is passed on; what it returns is handed to `issued`."""

    def issued(self, note: Any, result: Any) -> None:
        """After it was passed on, with what the kernel returned."""

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> Any:
        """Before a thread waits for a collective, or for a functional collective's tensor."""

    def waited(self, note: Any, waited_for: dist.Work | torch.Tensor) -> None:
        """After it has waited, with what `waiting` returned."""


_listeners: tuple[Listener, ...] = ()
_undo: list[Callable[[], None]] = []
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Show it every collective from now on."""
    global _listeners
    with _lock:
        if not _listeners:
            _open()
        _listeners = (*_listeners, listener)


def leave(listener: Listener) -> None:
    """Show it no more."""
    global _listeners
    with _lock:
        _listeners = tuple(each for each in _listeners if each is not listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def _open() -> None:
    operators = torch.library.Library("c10d", "IMPL")
    for operator in OPERATORS:
        operators.impl(operator, _passing(operator), "BackendSelect", with_keyset=True)
    waits = torch.library.Library("_c10d_functional", "IMPL")
    waits.impl("wait_tensor", _wait_tensor, "BackendSelect", with_keyset=True)
    patch = mock.patch.object(dist.Work, "wait", _waiting(dist.Work.wait))
    patch.start()
    _undo.extend((operators._destroy, waits._destroy, patch.stop))


def _passing(operator: str) -> Callable[..., Any]:
    """The function that stands in front of an operator's kernel."""
    redispatch = getattr(torch.ops.c10d, operator).default.redispatch

    def show_and_pass(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        shown = [(listener, listener.issuing(operator, args)) for listener in _listeners]
        result = redispatch(keyset & BELOW, *args)
        for listener, note in shown:
            listener.issued(note, result)
        return result

    return show_and_pass


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Work.wait``, shown."""

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        shown = [(listener, listener.waiting(work)) for listener in _listeners]
        result = original(work, *args, **kwargs)
        for listener, note in shown:
            listener.waited(note, work)
        return result

    return wait


def _wait_tensor(keyset: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
    """The same for the functional collectives, which DTensor uses."""
    shown = [(listener, listener.waiting(tensor)) for listener in _listeners]
    result = torch.ops._c10d_functional.wait_tensor.default.redispatch(keyset & BELOW, tensor)
    for listener, note in shown:
        listener.waited(note, tensor)
    return result
