"""Shared-memory record of one rank: counters, recent collectives and text, in a fixed layout written in place."""

import functools
import json
import mmap
import os
import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

ISSUED, WAITED_FOR, ENDED = range(3)
"""State of a call."""
RUNNING, LEFT, FAILED = range(3)
"""State of a rank's training: under way, ended well, ended by an exception."""

# Steps done + 1 (0: no beat yet); when the watchdog's thread looked, found progress, and noted the main thread's place;
# its flags: state, hang declared, report written;
# whether its main thread spins.
_STEP = struct.Struct("=q")
_LOOK = struct.Struct("=ddd")
_FLAGS = struct.Struct("=BBB")
_SPINS = struct.Struct("=B")
_SERIAL = struct.Struct("=Q")
# Serial, sequence, issued at, step, batch, waited at, state, size of the text that follows.
_CALL = struct.Struct("=QQdqQQBH")
_WAITED = struct.Struct("=QB")
_WAITED_AT, _STATE_AT = struct.calcsize("=QQdqQ"), struct.calcsize("=QQdqQQ")
_ORDER = struct.Struct("=8sQ")
_STEP_AT, _LOOK_AT, _FLAGS_AT, _SPINS_AT, _WORDS_AT = 0, 64, 128, 192, 1024
_ORDERS_AT, ORDERS = 1 << 17, 64
_CALLS_AT, CALLS, CALL_SIZE = _ORDERS_AT + ORDERS * _ORDER.size, 128, 512
KEPT = 16
"""Calls that are kept for longer: the oldest that have not ended, while a host is far ahead of its GPU."""
SIZE = _CALLS_AT + (CALLS + KEPT) * CALL_SIZE
CALL_ROOM = CALL_SIZE - _CALL.size
"""Bytes of text that a call's entry holds."""
WORDS_ROOM = 10_000
"""Characters that a rank can leave for the others; as JSON a character takes up to 12 bytes."""

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
    orders: dict[bytes, int] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    declared: bool = False
    reported: bool = False

    def has_issued(self, stream: str, sequence: int) -> bool:
        """Whether it has come to a call; also where its record has no room for so many streams and nobody knows."""
        is_full = len(self.orders) == ORDERS and all(self.orders.values())
        return self.orders.get(digest(stream), sequence if is_full else 0) >= sequence


@functools.lru_cache(maxsize=4096)
def digest(stream: str) -> bytes:
    """A stream's name as the records have it."""
    return blake2b(stream.encode(), digest_size=8).digest()


class RankState:
    """Record of one rank, which that rank alone writes."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("course-exchange") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
        self.memory = mmap.mmap(self.descriptor, SIZE)
        self._slots: dict[str, tuple[bytes, int]] = {}
        self._kept: dict[int, int] = {}  # by serial, where a call is that was kept for longer

    def close(self) -> None:
        """Let nobody map it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def write_step(self, step: int) -> None:
        _STEP.pack_into(self.memory, _STEP_AT, step)

    def write_look(self, now: float, progressed_at: float, placed_at: float) -> None:
        """Note when the watchdog's thread ran, and what it found."""
        _LOOK.pack_into(self.memory, _LOOK_AT, now, progressed_at, placed_at)

    def write_flags(self, state: int, declared: bool, reported: bool) -> None:
        _FLAGS.pack_into(self.memory, _FLAGS_AT, state, declared, reported)

    def write_spins(self, spins: bool) -> None:
        _SPINS.pack_into(self.memory, _SPINS_AT, spins)

    def write_words(self, words: dict[str, Any]) -> None:
        """Leave words for the others; what is too long loses its middle."""
        text = json.dumps({key: _cut(word) if isinstance(word, str) else word for key, word in words.items()}).encode()
        struct.pack_into("=I", self.memory, _WORDS_AT, 0)
        self.memory[_WORDS_AT + 4 : _WORDS_AT + 4 + len(text)] = text
        struct.pack_into("=I", self.memory, _WORDS_AT, len(text))

    def write_call(
        self, serial: int, sequence: int, at: float, step: int, stream: str, text: bytes, batch: int = 0
    ) -> None:
        """Note a call that is about to be issued; ``text`` is JSON with its other fields, at most CALL_ROOM bytes."""
        memory, start = self.memory, _at(serial % CALLS)
        if stream not in self._slots:
            self._slots[stream] = digest(stream), len(self._slots)
        name, slot = self._slots[stream]
        _CALL.pack_into(memory, start, 0, sequence, at, step, batch, 0, ISSUED, len(text))  # serial 0: not yet whole
        memory[start + _CALL.size : start + _CALL.size + len(text)] = text
        _SERIAL.pack_into(memory, start, serial)
        if slot < ORDERS:
            _ORDER.pack_into(memory, _ORDERS_AT + slot * _ORDER.size, name, sequence)

    def keep(self, serial: int) -> None:
        """Keep a call, which another is going to be written over, until it has ended; as long as there is room."""
        start, free = self._start(serial), set(range(CALLS, CALLS + KEPT)) - set(self._kept.values())
        if start is not None and free:
            slot = self._kept[serial] = min(free)
            content = self.memory[start : start + CALL_SIZE]
            self.memory[_at(slot) : _at(slot) + CALL_SIZE] = content

    def mark(self, serial: int, state: int, waited: int = 0) -> None:
        """Set the state of a call that is still kept and, unless it has ended, ``waited``; both as in `Call`."""
        start = self._start(serial)
        if start is None:
            return
        if state == ENDED:
            self.memory[start + _STATE_AT] = state
            if serial in self._kept:
                _SERIAL.pack_into(self.memory, _at(self._kept.pop(serial)), 0)
        else:
            _WAITED.pack_into(self.memory, start + _WAITED_AT, waited, state)

    def _start(self, serial: int) -> int | None:
        """Where a call is; None where it has been written over."""
        start = _at(self._kept.get(serial, serial % CALLS))
        return start if _SERIAL.unpack_from(self.memory, start)[0] == serial else None


def read_record(content: bytes, rank: int, pid: int, host: str, life: Life, now: float) -> RankSnapshot:
    """Snapshot of a rank, from its record.

    Args:
        content: SIZE bytes.
        rank: that wrote it.
        pid: of its process.
        host: of its machine.
        life: what the kernel says of the process, where it can be asked.
        now: by the clock of the record's writer.
    """
    looked_at, progressed_at, placed_at = _LOOK.unpack_from(content, _LOOK_AT)
    state, declared, reported = read_flags(content)
    calls = sorted(filter(None, (_call(content, slot) for slot in range(CALLS + KEPT))), key=lambda call: call.serial)
    orders = dict(_ORDER.unpack_from(content, _ORDERS_AT + slot * _ORDER.size) for slot in range(ORDERS))
    size = struct.unpack_from("=I", content, _WORDS_AT)[0]
    words = _json(content[_WORDS_AT + 4 : _WORDS_AT + 4 + size]) if size else None
    if state == LEFT or (state == FAILED and life != "dead"):
        life = "left" if state == LEFT else "failed"
    elif declared and life == "dead":  # its watchdog has ended it, and the record says how it was before
        life = "running"
    progressed_at = max([progressed_at, *(call.at for call in calls[-1:])])
    return RankSnapshot(
        rank,
        life,
        pid,
        host,
        _STEP.unpack_from(content, _STEP_AT)[0] - 1,
        now - progressed_at,
        now - looked_at,
        placed_at,
        bool(_SPINS.unpack_from(content, _SPINS_AT)[0]),
        tuple(calls),
        orders,
        words or {},
        bool(declared),
        bool(reported),
    )


def read_flags(content: bytes | mmap.mmap) -> tuple[int, int, int]:
    """State of the training, whether a hang is declared, whether the report is written."""
    return _FLAGS.unpack_from(content, _FLAGS_AT)


def _at(slot: int) -> int:
    """Where a slot for a call begins."""
    return _CALLS_AT + slot * CALL_SIZE


def _call(content: bytes, slot: int) -> Call | None:
    """The call in a slot; None where there is none, or one that is being written."""
    start = _at(slot)
    serial, sequence, at, step, batch, waited, state, size = _CALL.unpack_from(content, start)
    if not serial:
        return None
    text = _json(content[start + _CALL.size : start + _CALL.size + size])
    return (
        None
        if text is None
        else Call(
            serial=serial,
            sequence=sequence,
            step=step,
            at=at,
            state=state,
            batch=batch,
            waited=waited,
            **{**text, "shape": tuple(text["shape"]), "ranks": _ranks(text["ranks"])},
        )
    )


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
