"""Every collective that this process issues, whoever issues it."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course_lib.metering import collective_hooks
from course_lib.metering.collective import Collective, ring_bytes
from course_lib.metering.collective_hooks import ARGUMENTS, OPERATORS, PAYLOAD
from course_lib.parallel.clock import Clock, Stamp


def axis_of(group: dist.ProcessGroup) -> str:
    """``world`` for a group of all ranks; a dimension of a DeviceMesh by its name; else the group's description.

    Empty for a group of some ranks that nobody has named.
    """
    described = group.group_desc
    if group.size() == dist.get_world_size():
        return "world"
    return "" if described == "undefined" else described.removeprefix("mesh_")


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
    axis: str = "world"
    group: str = ""


class CollectiveLog:
    """Notes every collective between `start` and `stop`.

    Args:
        clock: stamps the beginnings and ends.
        issued: called with a collective's tensors before it is passed on.
        waited: called with the stamps between which a thread stood still for a collective.
        ended: called with each transfer, once, when its end is known; on any thread.
    """

    def __init__(
        self,
        clock: Clock,
        issued: Callable[[list[torch.Tensor]], None] = lambda tensors: None,
        waited: Callable[[Stamp, Stamp], None] = lambda begin, end: None,
        ended: Callable[[Transfer], None] = lambda transfer: None,
    ):
        self.clock, self._handed_over, self._stood_still, self._has_ended = clock, issued, waited, ended
        self.transfers: list[Transfer] = []
        self._pending: dict[int, tuple[list[Transfer], dist.Work, set[int]]] = {}  # and the storages of their tensors
        self._lock = threading.Lock()

    def start(self) -> None:
        collective_hooks.listen(self)

    def stop(self) -> None:
        collective_hooks.leave(self)

    def collectives(self) -> list[Collective]:
        """Those noted, in the order of issue."""
        return [self._seen(transfer) for transfer in self.transfers]

    def take_ended(self) -> list[Collective]:
        """Those noted that have ended, up to the first that has not, and forget them; on a GPU nobody waits for it."""
        transfers, ended = self.transfers, 0
        while ended < len(transfers) and _is_reached(transfers[ended].end):
            ended += 1
        taken = [self._seen(transfer) for transfer in transfers[:ended]]
        del transfers[:ended]
        return taken

    def _seen(self, t: Transfer) -> Collective:
        end = math.nan if t.end is None else self.clock.seconds(t.end)
        return Collective(t.name, t.bytes, t.dtype, t.ranks, self.clock.seconds(t.start), end, t.sent, t.axis, t.group)

    def issuing(self, operator: str, args: Sequence[Any]) -> tuple[Transfer, dict[str, Any]]:
        named = dict(zip(ARGUMENTS[operator], args, strict=False))
        self._handed_over(list(_tensors(args)) if PAYLOAD[operator] else [])  # a barrier's is a dummy
        transfer = self._describe(operator, named)
        self.transfers.append(transfer)
        return transfer, named

    def issued(self, note: tuple[Transfer, dict[str, Any]], work: dist.Work | None) -> None:
        self._follow(*note, work)

    def _describe(self, operator: str, named: dict[str, Any]) -> Transfer:
        name, payload = OPERATORS[operator], PAYLOAD[operator]
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
        return Transfer(
            name,
            size,
            dtype,
            ranks,
            sent,
            blocking,
            self.clock.stamp(_device(named)),
            axis=axis_of(group),
            group=group.group_name,
        )

    def _follow(self, transfer: Transfer, named: dict[str, Any], work: dist.Work | None) -> None:
        """Learn when a collective has ended."""
        device = _device(named)
        if work is None:  # it is in the current stream, which waits for it; or, as monitored_barrier_, has ended
            self._end(transfer, device)
            if transfer.end is not None and device.type == "cuda":
                self._stood_still(transfer.start, transfer.end)
            return
        key, storages = id(work), {_storage(tensor) for tensor in _tensors(list(named.values()))}
        if known := self._pending.get(key):  # the others of a batch
            known[0].append(transfer)
            known[2].update(storages)
            return
        self._pending[key] = transfers, *_ = [transfer], work, storages
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's sends, receives and reduce-scatters have none: they end when waited for
            return

        def ended(_: Any) -> None:
            for transfer in list(transfers):
                self._end(transfer, device)
            if not transfer.blocking:  # a blocking one is waited for at once
                self._pending.pop(key, None)  # its work holds the tensors, which are to be freed

        future.add_done_callback(ended)

    def _end(self, transfer: Transfer, device: torch.device | None = None) -> None:
        with self._lock:  # the backend's thread and the one that waits both come here: the first is right
            if transfer.end is None:
                transfer.end = self.clock.stamp(device)
                self._has_ended(transfer)

    def waiting(self, waited_for: dist.Work | torch.Tensor) -> Stamp:
        (transfer, *_), *_ = self._pending.get(id(waited_for), ([None],))
        return transfer.start if transfer and transfer.blocking else self.clock.stamp()

    def waited(self, note: Stamp, waited_for: dist.Work | torch.Tensor) -> None:
        if isinstance(waited_for, torch.Tensor):
            storage = _storage(waited_for)
            ended = [key for key, (_, _, storages) in list(self._pending.items()) if storage in storages]
        else:
            ended = [id(waited_for)]
        for key in ended:
            if pending := self._pending.pop(key, None):
                for transfer in pending[0]:
                    self._end(transfer)
        self._stood_still(note, self.clock.stamp())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for element in value:
            yield from _tensors(element)


def device_of(values: Sequence[Any]) -> torch.device:
    """Device of the first tensor of a call."""
    return next(_tensors(list(values))).device


def _device(named: dict[str, Any]) -> torch.device:
    return next(_tensors(list(named.values()))).device


def _is_reached(stamp: Stamp | None) -> bool:
    return isinstance(stamp, float) or (stamp is not None and stamp.query())


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
