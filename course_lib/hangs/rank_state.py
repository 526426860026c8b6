"""Shared-memory record of one rank: counters, recent collectives and text, in a fixed layout written in place."""

import ctypes
import functools
import json
import mmap
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

ISSUED, WAITED_FOR, ENDED = range(3)
"""State of a call."""
RUNNING, LEFT, FAILED = range(3)
"""State of a rank's training: under way, ended well, ended by an exception."""

ORDERS = 64
CALLS = 128
KEPT = 16
"""Calls that are kept for longer: the oldest that have not ended, while a host is far ahead of its GPU."""
CALL_ROOM = 463
"""Bytes of text that a call's entry holds: with its numbers half a KiB."""
WORDS_ROOM = 10_000
"""Characters that a rank can leave for the others; as JSON a character takes up to 12 bytes."""


class Flags(ctypes.Structure):
    """State of the training, whether a hang is declared, whether the report is written; a record begins with them."""

    _fields_ = [("state", ctypes.c_uint8), ("declared", ctypes.c_bool), ("reported", ctypes.c_bool)]

    @property
    def is_training(self) -> bool:
        return self.state == RUNNING and not self.declared


class _Order(ctypes.Structure):
    """Last sequence of a stream, which is known by its digest."""

    _fields_ = [("stream", ctypes.c_uint64), ("sequence", ctypes.c_uint64)]


class _Entry(ctypes.Structure):
    """A call, as :class:`Call` has it; serial 0: none, or one that is not yet whole. The text is JSON."""

    _fields_ = [
        ("serial", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
        ("at", ctypes.c_double),
        ("step", ctypes.c_int64),
        ("batch", ctypes.c_uint64),
        ("waited", ctypes.c_uint64),
        ("state", ctypes.c_uint8),
        ("text", ctypes.c_char * CALL_ROOM),
    ]


class _Fields(ctypes.Structure):
    """All that a rank says of itself."""

    _fields_ = [
        ("flags", Flags),
        ("spins", ctypes.c_bool),  # the main thread
        ("steps", ctypes.c_int64),  # done + 1; 0: no beat yet
        ("looked_at", ctypes.c_double),  # by the watchdog's thread
        ("progressed_at", ctypes.c_double),
        ("placed_at", ctypes.c_double),  # when it noted the main thread's place
        ("has_words", ctypes.c_bool),
        ("words", ctypes.c_char * (1 << 17)),
        ("orders", _Order * ORDERS),
        ("calls", _Entry * (CALLS + KEPT)),
    ]


SIZE = ctypes.sizeof(_Fields)

Life = Literal["running", "stopped", "dead", "late", "silent", "left", "failed", "unseen"]


@dataclass(frozen=True)
class Call:
    """One collective, send or receive, as its rank noted it.

    Attributes:
        stream: the order that it is part of: a process group, or one direction between two ranks of it.
        sequence: its number in that order, from 1.
        shape: of the first tensor handed in; of ``tensors`` alike.
        ranks: global ranks of the group.
        peer: global rank at the other end of a send or receive.
        root: global rank, for a collective with one.
        at: seconds on the rank's ``time.monotonic``, when it was issued.
        state: ISSUED, WAITED_FOR or ENDED.
        on_gpu: it stands in a GPU's queue: whoever waits for it need not wait on the host, and it ends later than a
            wait that returned.
        batch: number of the batch that it was issued in, from 1; 0 outside of one.
        waited: serial of the last call that the rank had issued when it waited for this one; 0 where it has not.
        axis: ``world`` for the default group, an axis of a mesh by its name, else ``group`` and torch's name of it.
    """

    serial: int
    stream: str
    sequence: int
    name: str
    shape: tuple[int, ...]
    dtype: str | None
    tensors: int
    ranks: tuple[int, ...]
    peer: int | None
    root: int | None
    file: str | None
    line: int | None
    step: int
    at: float
    state: int
    on_gpu: bool = False
    batch: int = 0
    waited: int = 0
    axis: str = "world"

    @property
    def ended(self) -> bool:
        return self.state == ENDED


@dataclass(frozen=True)
class RankSnapshot:
    """State of one rank at one moment, as far as it is known.

    Attributes:
        life: ``left``: its training ended well; ``failed``: by an exception; ``unseen``: it has not entered yet;
            ``late`` and ``silent``: it is on another machine, and has not posted for a short or a long time.
        step: of its last beat; -1 before.
        stalled: seconds without progress.
        silent: seconds since its watchdog's thread last ran.
        placed_at: when its main thread's place was noted in ``words``, by its own clock.
        spins: its main thread keeps a core busy in one and the same call, as one does that waits for its GPU.
        calls: its last ones, oldest first.
        orders: the last sequence of each stream, by the stream's digest.
        words: what it wrote for the others: ``file`` and ``line`` of the user's code that its main thread is in,
            ``stacks`` once a hang is declared, ``error`` where its training ended by one.
    """

    rank: int
    life: Life = "unseen"
    pid: int = 0
    host: str = ""
    step: int = -1
    stalled: float = 0.0
    silent: float = 0.0
    placed_at: float = 0.0
    spins: bool = False
    calls: tuple[Call, ...] = ()
    orders: dict[int, int] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    declared: bool = False
    reported: bool = False

    def has_issued(self, stream: str, sequence: int) -> bool:
        """Whether it has come to a call; also where its record has no room for so many streams and nobody knows."""
        is_full = len(self.orders) == ORDERS and all(self.orders.values())
        return self.orders.get(digest(stream), sequence if is_full else 0) >= sequence


@functools.lru_cache(maxsize=4096)
def digest(stream: str) -> int:
    """A stream's name as the records have it."""
    return int.from_bytes(blake2b(stream.encode(), digest_size=8).digest())


class RankState:
    """Record of one rank, which that rank alone writes.

    Attributes:
        fields: its numbers, to be read and set.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("course-exchange") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
        self.memory = mmap.mmap(self.descriptor, SIZE)
        self.fields = _Fields.from_buffer(self.memory)
        self._calls, self._orders = list(self.fields.calls), list(self.fields.orders)  # views of the same memory
        self._slots: dict[str, int] = {}
        self._kept: dict[int, int] = {}  # by serial, where a call is that was kept for longer

    def close(self) -> None:
        """Let nobody map it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def write_words(self, words: dict[str, Any]) -> None:
        """Leave words for the others; what is too long loses its middle."""
        text = json.dumps({key: _cut(word) if isinstance(word, str) else word for key, word in words.items()}).encode()
        self.fields.has_words = False
        self.fields.words = text
        self.fields.has_words = True

    def write_call(
        self, serial: int, sequence: int, at: float, step: int, stream: str, text: bytes, batch: int = 0
    ) -> None:
        """Note a call that is about to be issued; ``text`` is JSON with its other fields, at most CALL_ROOM bytes."""
        entry, slot = self._calls[serial % CALLS], self._slots.setdefault(stream, len(self._slots))
        entry.serial = 0
        entry.sequence, entry.at, entry.step, entry.batch = sequence, at, step, batch
        entry.waited, entry.state, entry.text = 0, ISSUED, text
        entry.serial = serial
        if slot < ORDERS:
            order = self._orders[slot]
            order.stream, order.sequence = digest(stream), sequence

    def keep(self, serial: int) -> None:
        """Keep a call, which another is going to be written over, until it has ended; as long as there is room."""
        entry, free = self._entry(serial), set(range(CALLS, CALLS + KEPT)) - set(self._kept.values())
        if entry is not None and free:
            slot = self._kept[serial] = min(free)
            self.fields.calls[slot] = entry

    def mark(self, serial: int, state: int, waited: int = 0) -> None:
        """Set the state of a call that is still kept and, unless it has ended, ``waited``; both as in `Call`."""
        entry = self._entry(serial)
        if entry is None:
            return
        if state != ENDED:
            entry.waited = waited
        entry.state = state
        if state == ENDED and self._kept.pop(serial, None) is not None:
            entry.serial = 0

    def _entry(self, serial: int) -> _Entry | None:
        """A call's entry; None where it has been written over."""
        entry = self._calls[self._kept.get(serial, serial % CALLS)]
        return entry if entry.serial == serial else None


def read_record(content: bytes | mmap.mmap, rank: int, pid: int, host: str, life: Life, now: float) -> RankSnapshot:
    """Snapshot of a rank, from its record.

    Args:
        content: SIZE bytes.
        rank: that wrote it.
        pid: of its process.
        host: of its machine.
        life: what the kernel says of the process, where it can be asked.
        now: by the clock of the record's writer.
    """
    fields = _Fields.from_buffer_copy(content)
    calls = sorted(filter(None, map(_call, fields.calls)), key=lambda call: call.serial)
    words = _json(fields.words) if fields.has_words else None
    if fields.flags.state == LEFT or (fields.flags.state == FAILED and life != "dead"):
        life = "left" if fields.flags.state == LEFT else "failed"
    elif fields.flags.declared and life == "dead":  # its watchdog has ended it, and the record says how it was before
        life = "running"
    progressed_at = max([fields.progressed_at, *(call.at for call in calls[-1:])])
    return RankSnapshot(
        rank,
        life,
        pid,
        host,
        fields.steps - 1,
        now - progressed_at,
        now - fields.looked_at,
        fields.placed_at,
        fields.spins,
        tuple(calls),
        {order.stream: order.sequence for order in fields.orders},
        words or {},
        fields.flags.declared,
        fields.flags.reported,
    )


def _call(entry: _Entry) -> Call | None:
    """The call of an entry; None where there is none, or one that is being written."""
    text = _json(entry.text) if entry.serial else None
    if text is None:
        return None
    numbers = {name: getattr(entry, name) for name, *_ in _Entry._fields_ if name != "text"}
    return Call(**numbers, **text | {"shape": tuple(text["shape"]), "ranks": _ranks(text["ranks"])})


def _json(text: bytes) -> dict[str, Any] | None:
    """What was written; None where its writer was at it while the record was copied."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def spans(ranks: tuple[int, ...]) -> list[int]:
    """Ranks, a regular row of them as -1, start, stop and step."""
    if len(ranks) > 3:
        row = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
        if tuple(row) == ranks:
            return [-1, row.start, row.stop, row.step]
    return list(ranks)


def _ranks(numbers: list[int]) -> tuple[int, ...]:
    """The ranks that `spans` shortened."""
    return tuple(range(*numbers[1:])) if numbers[:1] == [-1] else tuple(numbers)


def _cut(text: str) -> str:
    half = WORDS_ROOM // 2
    return text if len(text) <= WORDS_ROOM else f"{text[:half]}\n...\n{text[-half:]}"
