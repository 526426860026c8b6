"""The place where every collective of this process passes, for those who want to look: the meter, the flight recorder.

torch.distributed's Python functions, DDP's reducer (C++), FSDP2, DTensor and DeepSpeed all end in one place:
the operators ``c10d::allreduce_`` and so on of PyTorch's dispatcher. Every call of an operator passes the
dispatch key BackendSelect on its way to gloo's or NCCL's kernel, on any thread, with or without autograd. There
the tap stands, shows the call to its listeners, and lets it pass on. The key has room for one kernel an operator, so
all listeners share it.

What a call returns is not the same everywhere. A backend for the CPU returns a Work. NCCL's synchronous collectives
run on the current stream and return none (since torch 2.8; distributed_c10d.py, all_reduce: "the backend has sync'ed
at CPP level"), and in a batch, as ``batch_isend_irecv`` makes one, nothing is under way before the batch is closed,
which returns the one Work of them all: so the listeners hear of its calls only then.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from course_lib.metering import graph_captures
from course_lib.replacing import replaced

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

ARGUMENTS = {
    operator: tuple(argument.name for argument in getattr(torch.ops.c10d, operator).default._schema.arguments)
    for operator in OPERATORS
}
"""Operator: the names of its arguments, of which calls leave out trailing ones that are at their defaults."""


def _argument(operator: str, *begins: str) -> str:
    """An operator's first argument whose name begins in one of these ways; empty where it has none."""
    return next((name for name in ARGUMENTS[operator] if name.startswith(begins)), "")


INPUTS = {operator: _argument(operator, "input", "tensors") for operator in OPERATORS} | {"scatter_": "output_tensors"}
"""Operator: the argument that a rank hands in, by whose shape people recognise the call; empty for a barrier."""

PAYLOAD = INPUTS | {operator: _argument(operator, "output") for operator in OPERATORS if "allgather" in operator}
"""Operator: the argument that is its whole payload: what is reduced, scattered or broadcast, or the gathered result.
For gather and scatter it is one rank's share of it."""


class Listener(Protocol):
    """Observer of collectives. Each method may be called on any thread."""

    def issuing(self, operator: str, args: Sequence[Any]) -> Any:
        """Before a collective is passed on; what it returns is handed to `issued`."""

    def issued(self, note: Any, work: dist.Work | None) -> None:
        """After it was passed on, or its batch was closed; None: it is under way on the current stream, or has ended.

        Calls of one batch share a Work.
        """

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> Any:
        """Before a thread waits for a collective, or for a functional collective's tensor."""

    def waited(self, note: Any, waited_for: dist.Work | torch.Tensor) -> None:
        """After it has waited, with what `waiting` returned."""


class _Batch(threading.local):
    """Calls that this thread has issued since it began a batch."""

    number = 0
    """From 1; 0 outside of one."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Listener, Any]]] = []  # of each call, who has seen it, with their notes


_listeners: tuple[Listener, ...] = ()
_batch, _batches = _Batch(), itertools.count(1)
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
        _listeners = tuple(other for other in _listeners if other is not listener)
        if not _listeners:
            while _undo:
                _undo.pop()()


def batch() -> int:
    """The number of the batch that the calling thread is filling, from 1; 0 where it issues calls one by one."""
    return _batch.number


def _open() -> None:
    operators = torch.library.Library("c10d", "IMPL")
    for operator in OPERATORS:
        operators.impl(operator, _passing(operator), "BackendSelect", with_keyset=True)
    waits = torch.library.Library("_c10d_functional", "IMPL")
    waits.impl("wait_tensor", _wait_tensor, "BackendSelect", with_keyset=True)
    _undo.extend((operators._destroy, waits._destroy))
    for owner, name, around in (
        (dist.Work, "wait", _waiting),
        (dist.ProcessGroup, "_start_coalescing", _beginning),
        (dist.ProcessGroup, "_end_coalescing", _closing),
        (torch.cuda.CUDAGraph, "capture_begin", graph_captures.beginning),
        (torch.cuda.CUDAGraph, "capture_end", graph_captures.ending),
    ):
        hook = contextlib.ExitStack()
        hook.enter_context(replaced(owner, name, around(getattr(owner, name))))
        _undo.append(hook.close)


def _passing(operator: str) -> Callable[..., Any]:
    """The function that stands in front of an operator's kernel."""
    redispatch = getattr(torch.ops.c10d, operator).default.redispatch

    def show_and_pass(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        shown = [(listener, listener.issuing(operator, args)) for listener in _listeners]
        result = redispatch(keyset & BELOW, *args)
        if _batch.number:
            # A Work that is returned here would pass for ended: its event is recorded when the batch is closed.
            _batch.calls.append(shown)
            return result
        boxed = result[-1] if isinstance(result, tuple) else result
        work = None if boxed is None else dist.Work.unbox(boxed)  # monitored_barrier_ returns nothing
        for listener, note in shown:
            listener.issued(note, work)
        return result

    return show_and_pass


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ProcessGroup._start_coalescing``: from here on the thread fills a batch."""

    def start(group: dist.ProcessGroup, *args: Any) -> Any:
        result = original(group, *args)
        _batch.number, _batch.calls = next(_batches), []
        return result

    return start


def _closing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ProcessGroup._end_coalescing``, which hands the batch over and returns its Work."""

    def end(group: dist.ProcessGroup, *args: Any) -> Any:
        _batch.number = 0
        work = original(group, *args)
        for shown in _batch.calls:
            for listener, note in shown:
                listener.issued(note, work)
        return work

    return end


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
