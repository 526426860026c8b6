"""Every collective that this process issues, whoever issues it, and what the ring model says that it sends.

torch.distributed's Python functions, DDP's reducer (C++), FSDP2, DTensor and DeepSpeed all end in one place:
the operators ``c10d::allreduce_`` and so on of PyTorch's dispatcher. Every call of an operator passes the
dispatch key BackendSelect on its way to gloo's or NCCL's kernel, on any thread, with or without autograd. There
the meter stands, notes the call, and lets it pass on.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from course_lib.runtime.clock import Clock, Stamp

BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

# Operator: the collective's standard name, and which argument is its whole payload: what is reduced, scattered
# or broadcast, or the gathered result. For gather and scatter it is one rank's share of it.
OPERATORS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("barrier", ""),
}


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank saw it.

    Attributes:
        name: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast``, ``reduce``,
            ``gather``, ``scatter``, ``send``, ``recv`` or ``barrier``.
        bytes: the whole payload: for all_gather and gather what has been gathered, for reduce_scatter and
            scatter what is to be scattered, for all_to_all what this rank hands in.
        dtype: of the payload; for a barrier uint8 of no elements.
        ranks: global ranks that take part, this rank and its peer for send and recv.
        start: seconds on ``time.perf_counter``'s clock, when it was issued.
        end: when the transfer had ended; where the backend doesn't tell (gloo's send, recv and reduce-scatter),
            when this rank had waited for it; NaN where neither was before the end of the measured stretch.
        sent: bytes that this rank sends under the ring model, see `ring_bytes`.
    """

    name: str
    bytes: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    start: float
    end: float
    sent: int


def ring_bytes(name: str, size: int, ranks: int, position: int = 0, root: int = 0) -> int:
    """Bytes that one rank sends when a collective is done over a ring, or straight to the peer.

    all_reduce 2(N-1)/N x size; reduce_scatter, all_gather and all_to_all (N-1)/N x size; broadcast: everyone
    passes it on but the last in the ring; reduce: everyone but the root; gather: everyone but the root sends
    1/N of it; scatter: the root sends (N-1)/N of it; send its size; recv and barrier nothing.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009, section 3.

    Args:
        size: payload in bytes, as in `Collective.bytes`.
        ranks: N.
        position: of this rank in the group, for those with a root.
        root: the root's position in the group.
    """
    others = ranks - 1
    shares = {
        "all_reduce": 2 * others / ranks,
        "reduce_scatter": others / ranks,
        "all_gather": others / ranks,
        "all_to_all": others / ranks,
        "broadcast": (position - root) % ranks != others,
        "reduce": position != root,
        "gather": (position != root) / ranks,
        "scatter": (position == root) * others / ranks,
        "send": 1,
        "recv": 0,
        "barrier": 0,
    }
    return round(shares[name] * size)


@dataclass(eq=False)
class Transfer:
    """A collective under way."""

    name: str
    bytes: int
    dtype: torch.dtype
    ranks: tuple[int, ...]
    sent: int
    blocking: bool
    start: Stamp
    end: Stamp | None = None


class Traffic:
    """Notes every collective between `start` and `stop`.

    Args:
        clock: stamps the beginnings and ends.
        issued: called with a collective's tensors before it is passed on.
        waited: called with the stamps between which a thread stood still for a collective.
    """

    def __init__(self, clock: Clock, issued: Callable[[list[torch.Tensor]], None],
                 waited: Callable[[Stamp, Stamp], None]):
        self.clock, self.issued, self.waited = clock, issued, waited
        self.transfers: list[Transfer] = []
        self._pending: dict[int, tuple[Transfer, dist.Work, set[int]]] = {}  # and the storages of its tensors
        self._lock = threading.Lock()

    def start(self) -> None:
        self._library = torch.library.Library("c10d", "IMPL")
        for operator in OPERATORS:
            self._library.impl(operator, self._passing(operator), "BackendSelect", with_keyset=True)
        self._waits = torch.library.Library("_c10d_functional", "IMPL")
        self._waits.impl("wait_tensor", self._wait_tensor, "BackendSelect", with_keyset=True)
        self._patch = mock.patch.object(dist.Work, "wait", self._waiting(dist.Work.wait))
        self._patch.start()

    def stop(self) -> None:
        self._patch.stop()
        self._waits._destroy()
        self._library._destroy()

    def collectives(self) -> list[Collective]:
        """Those noted, in the order of issue."""
        seconds = self.clock.seconds
        return [Collective(t.name, t.bytes, t.dtype, t.ranks, seconds(t.start),
                           math.nan if t.end is None else seconds(t.end), t.sent) for t in self.transfers]

    def _passing(self, operator: str) -> Callable[..., Any]:
        """The function that stands in front of an operator's kernel."""
        overload = getattr(torch.ops.c10d, operator).default
        names = [argument.name for argument in overload._schema.arguments]

        def note_and_pass(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
            named = dict(zip(names, args, strict=False))  # trailing arguments at their defaults are left out
            self.issued(list(_tensors(args)) if OPERATORS[operator][1] else [])  # a barrier's is a dummy
            transfer = self._describe(operator, named)
            self.transfers.append(transfer)
            result = overload.redispatch(keyset & BELOW, *args)
            self._follow(transfer, result, named)
            return result

        return note_and_pass

    def _describe(self, operator: str, named: dict[str, Any]) -> Transfer:
        name, payload = OPERATORS[operator]
        group = dist.ProcessGroup.unbox(named["process_group"])
        members = dist.get_process_group_ranks(group)
        position = group.rank()
        tensors = list(_tensors(named[payload])) if payload else []
        size = sum(_size(tensor) for tensor in tensors) * (len(members) if name in ("gather", "scatter") else 1)
        sent = ring_bytes(name, size, len(members), position, named.get("root_rank", 0))
        if name == "all_to_all":
            sent = size - _own_part(operator, named, tensors, position, len(members))
        ranks = tuple(members)
        if name in ("send", "recv"):
            ends = [position, *(named[key] for key in ("dst", "src") if key in named)]
            ranks = tuple(members[end] for end in ends)
        dtype = tensors[0].dtype if tensors else torch.uint8
        blocking = named.get("async_op", True) is False
        return Transfer(name, size, dtype, ranks, sent, blocking, self.clock.stamp(_device(named)))

    def _follow(self, transfer: Transfer, result: Any, named: dict[str, Any]) -> None:
        """Learn when a collective has ended."""
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is None:  # monitored_barrier_ has been waited for
            self._end(transfer, _device(named))
            return
        work = dist.Work.unbox(boxed)
        key, device = id(work), _device(named)
        self._pending[key] = transfer, work, {_storage(tensor) for tensor in _tensors(list(named.values()))}
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's sends, receives and reduce-scatters have none: they end when waited for
            return

        def ended(_: Any) -> None:
            self._end(transfer, device)
            if not transfer.blocking:  # a blocking one is waited for at once
                self._pending.pop(key, None)  # its work holds the tensors, which are to be freed

        future.add_done_callback(ended)

    def _end(self, transfer: Transfer, device: torch.device | None = None) -> None:
        with self._lock:  # the backend's thread and the one that waits both come here: the first is right
            if transfer.end is None:
                transfer.end = self.clock.stamp(device)

    def _waiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``Work.wait``, noting how long the caller stood still."""
        traffic = self

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            transfer, *_ = traffic._pending.get(id(work), (None,))
            begin = transfer.start if transfer and transfer.blocking else traffic.clock.stamp()
            result = original(work, *args, **kwargs)
            if transfer:
                traffic._end(transfer)
                traffic._pending.pop(id(work), None)
            traffic.waited(begin, traffic.clock.stamp())
            return result

        return wait

    def _wait_tensor(self, keyset: torch._C.DispatchKeySet, tensor: torch.Tensor) -> torch.Tensor:
        """The same for the functional collectives, which DTensor uses."""
        begin = self.clock.stamp()
        result = torch.ops._c10d_functional.wait_tensor.default.redispatch(keyset & BELOW, tensor)
        for key, (transfer, _, storages) in list(self._pending.items()):
            if _storage(tensor) in storages:
                self._end(transfer)
                self._pending.pop(key, None)
        self.waited(begin, self.clock.stamp())
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)


def _device(named: dict[str, Any]) -> torch.device:
    return next(_tensors(list(named.values()))).device


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_part(operator: str, named: dict[str, Any], tensors: list[torch.Tensor], position: int, ranks: int) -> int:
    """Bytes of an all_to_all that stay on this rank."""
    if operator == "alltoall_":
        return _size(tensors[position])
    splits = named.get("input_split_sizes")
    rows = tensors[0].shape[0]
    return _size(tensors[0]) * splits[position] // rows if splits and rows else _size(tensors[0]) // ranks
