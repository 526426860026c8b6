"""How ranks see each other's state, also that of a rank that is stopped or dead.

Each rank writes a page: numbers, its last calls, its stacks. On one Linux machine the page is memory that the others
map (a file without a name: nothing is left to remove when ranks are killed), written in place. To ranks on other
machines the watchdog's thread posts a copy through the process group's store.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from course_lib.runtime.liveness import process_state, start_ticks

ISSUED, WAITED_FOR, ENDED = range(3)
"""State of a call."""
RUNNING, LEFT, FAILED = range(3)
"""State of a rank's training: under way, ended well, ended by an exception."""

POST_SECONDS = 1.0  # between two posts to ranks on other machines; more where there are more than 16 ranks
SILENT_SECONDS = 3.0  # longer than three posts take, and a rank on another machine counts as gone
NOTICE_SECONDS = 1.0  # after a connection has broken, for the kernel to say that its process is dead
MEET_SECONDS = 10.0  # for ranks that enter one after the other

# Steps done + 1 (0: no beat yet); when the watchdog's thread looked, found progress, and noted the main thread's place;
# its flags: state, hang declared, report written.
_STEP = struct.Struct("=q")
_LOOK = struct.Struct("=ddd")
_FLAGS = struct.Struct("=BBB")
_SERIAL = struct.Struct("=Q")
_NOW = struct.Struct("=d")
_CALL = struct.Struct("=QQdqBH")  # serial, sequence, issued at, step, state, size of the text that follows
_STATE_AT = struct.calcsize("=QQdq")
_ORDER = struct.Struct("=8sQ")
_STEP_AT, _LOOK_AT, _FLAGS_AT, _WORDS_AT = 0, 64, 128, 1024
_ORDERS_AT, ORDERS = 1 << 17, 64
_CALLS_AT, CALLS, CALL_SIZE = _ORDERS_AT + ORDERS * _ORDER.size, 128, 512
SIZE = _CALLS_AT + CALLS * CALL_SIZE
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

    @property
    def ended(self) -> bool:
        return self.state == ENDED


@dataclass(frozen=True)
class Sighting:
    """What is known of one rank at one moment.

    Attributes:
        life: ``left``: its training ended well; ``failed``: by an exception; ``unseen``: it has not entered yet;
            ``late`` and ``silent``: it is on another machine, and has not posted for a short or a long time.
        step: of its last beat; -1 before.
        stalled: seconds without progress.
        silent: seconds since its watchdog's thread last ran.
        placed_at: when its main thread's place was noted in ``words``, by its own clock.
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
    calls: tuple[Call, ...] = ()
    orders: dict[bytes, int] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    declared: bool = False
    reported: bool = False

    def has_issued(self, stream: str, sequence: int) -> bool:
        """Whether it has come to a call; also where its page has no room for so many streams and nobody knows."""
        is_full = len(self.orders) == ORDERS and all(self.orders.values())
        return self.orders.get(digest(stream), sequence if is_full else 0) >= sequence


def digest(stream: str) -> bytes:
    """A stream's name as the pages have it."""
    return blake2b(stream.encode(), digest_size=8).digest()


class Page:
    """One rank's page, which that rank alone writes."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("course-board") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, SIZE)
        self.memory = mmap.mmap(self.descriptor, SIZE)
        self._slots: dict[str, tuple[bytes, int]] = {}

    def write_step(self, step: int) -> None:
        _STEP.pack_into(self.memory, _STEP_AT, step)

    def write_look(self, now: float, progressed_at: float, placed_at: float) -> None:
        """When the watchdog's thread ran, and what it found."""
        _LOOK.pack_into(self.memory, _LOOK_AT, now, progressed_at, placed_at)

    def write_flags(self, state: int, declared: bool, reported: bool) -> None:
        _FLAGS.pack_into(self.memory, _FLAGS_AT, state, declared, reported)

    def write_words(self, words: dict[str, Any]) -> None:
        """Leave words for the others; what is too long loses its middle."""
        text = json.dumps({key: _cut(each) if isinstance(each, str) else each for key, each in words.items()}).encode()
        struct.pack_into("=I", self.memory, _WORDS_AT, 0)
        self.memory[_WORDS_AT + 4 : _WORDS_AT + 4 + len(text)] = text
        struct.pack_into("=I", self.memory, _WORDS_AT, len(text))

    def write_call(self, serial: int, sequence: int, at: float, step: int, stream: str, text: bytes) -> None:
        """Note a call that is about to be issued; ``text`` is JSON with its other fields, at most CALL_ROOM bytes."""
        memory, start = self.memory, _CALLS_AT + serial % CALLS * CALL_SIZE
        if stream not in self._slots:
            self._slots[stream] = digest(stream), len(self._slots)
        name, slot = self._slots[stream]
        _CALL.pack_into(memory, start, 0, sequence, at, step, ISSUED, len(text))  # no call while it is half written
        memory[start + _CALL.size : start + _CALL.size + len(text)] = text
        _SERIAL.pack_into(memory, start, serial)
        if slot < ORDERS:
            _ORDER.pack_into(memory, _ORDERS_AT + slot * _ORDER.size, name, sequence)

    def mark(self, serial: int, state: int) -> None:
        """Set the state of a call that is still kept."""
        start = _CALLS_AT + serial % CALLS * CALL_SIZE
        if _SERIAL.unpack_from(self.memory, start)[0] == serial:
            self.memory[start + _STATE_AT] = state


@dataclass(frozen=True)
class Identity:
    """What the others need to know to find a rank's page and to see whether it lives."""

    pid: int
    started: int
    host: str
    machine: str
    descriptor: int

    @classmethod
    def own(cls, page: Page) -> "Identity":
        boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
        machine = boot.read_text().strip() + os.readlink(namespace) if boot.exists() and namespace.is_symlink() else ""
        return cls(os.getpid(), start_ticks(os.getpid()), socket.gethostname(), machine, page.descriptor)

    def map(self) -> mmap.mmap:
        """Its page.

        Raises:
            OSError: the process has gone, or is another user's.
        """
        found = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDONLY)
        try:
            return mmap.mmap(found, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(found)


@dataclass
class _Copy:
    """What a rank on another machine has posted last."""

    content: bytes
    posted_at: float
    """By the other machine's clock."""
    ahead: float
    """Seconds by which this machine's clock is ahead of the other's."""


class Board:
    """All ranks' pages, as one rank sees them.

    The store is used by a thread of its own, which may have to wait for it: rank 0 keeps it, and may be stopped.

    Args:
        rank: this rank.
        world_size: ranks.
        store: where they meet.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store):
        self.rank, self.world_size, self.page = rank, world_size, Page()
        self._identity = Identity.own(self.page)
        self._identities: dict[int, Identity] = {rank: self._identity}
        self._maps: dict[int, mmap.mmap] = {}
        self._copies: dict[int, _Copy] = {}
        self._store, self._closed = store, threading.Event()
        self._met, self._lost_peer = threading.Event(), False
        self.thread = threading.Thread(target=self._meet, name="watchdog-board", daemon=True)
        self._post_seconds = max(POST_SECONDS, world_size / 16)

    def open(self) -> None:
        """Wait for the others, for MEET_SECONDS at most: the page of a rank that dies can't be found any more."""
        if self.world_size > 1:
            self.thread.start()
            self._met.wait(MEET_SECONDS)

    def close(self) -> None:
        """Stop; the page stays where others have mapped it."""
        self._closed.set()
        if self.thread.is_alive():
            self.thread.join(2 * POST_SECONDS)

    def is_local(self, rank: int) -> bool:
        """Whether a rank's page is mapped here."""
        return rank == self.rank or rank in self._maps

    def process(self, rank: int) -> Identity:
        """Who a rank is."""
        return self._identities[rank]

    def notice_seconds(self) -> float:
        """Called when a connection to a rank has broken: seconds until all know whose."""
        self._lost_peer = True
        return NOTICE_SECONDS + (4 * self._post_seconds if self._elsewhere() else 0)

    def is_alarming(self) -> bool:
        """Whether a rank of this machine died during its training, or any rank has declared a hang. Cheap."""
        pages: list[mmap.mmap | bytes] = [*self._maps.values(), *(copy.content for copy in self._copies.values())]
        return bool(self.dead()) or any(_FLAGS.unpack_from(page, _FLAGS_AT)[1] for page in pages)

    def sightings(self) -> list[Sighting]:
        """All ranks', by rank."""
        found = [self._sighting(rank) for rank in range(self.world_size)]
        dead = {rank for each in found for rank in each.words.get("dead", ())}  # as those on their machines know
        return [dataclasses.replace(each, life="dead") if each.rank in dead else each for each in found]

    def dead(self) -> list[int]:
        """Ranks of this machine that died during their training."""
        # The kernel is asked before the flags: a rank says that it leaves, and then ends.
        return [rank for rank, page in list(self._maps.items())
                if self._life(rank) == "dead" and _FLAGS.unpack_from(page, _FLAGS_AT)[0] == RUNNING]

    def _life(self, rank: int) -> Life:
        """What the kernel says, where it can be asked."""
        if rank not in self._maps:
            return "running"
        return process_state(self._identities[rank].pid, self._identities[rank].started)

    def _meet(self) -> None:
        """Find the others' pages, and exchange copies with those on other machines, until closed."""
        try:
            store: Any = self._store.clone()  # type: ignore[attr-defined]
            store.set(f"identity/{self.rank}", json.dumps(dataclasses.asdict(self._identity)))
            pause = self.world_size / 500
            while len(self._identities) < self.world_size and not self._closed.wait(pause):
                self._find(store)
            store.add("found all", 1)
            while store.add("found all", 0) < self.world_size and not self._closed.wait(pause):
                pass
            self._met.set()
            while others := self._elsewhere():
                self._exchange(store, others)
                if self._closed.wait(self._post_seconds):
                    return
        except (RuntimeError, OSError):  # the store has gone, with the rank or machine that kept it: copies grow old
            self._met.set()

    def _elsewhere(self) -> list[int]:
        """Ranks on other machines."""
        return [rank for rank in range(self.world_size) if not self.is_local(rank)]

    def _find(self, store: Any) -> None:
        for rank in set(range(self.world_size)) - set(self._identities):
            if store.check([f"identity/{rank}"]):
                found = Identity(**json.loads(store.get(f"identity/{rank}")))
                if found.machine and found.machine == self._identity.machine:
                    with contextlib.suppress(OSError):
                        self._maps[rank] = found.map()
                self._identities[rank] = found

    def _exchange(self, store: Any, others: list[int]) -> None:
        store.set(f"page/{self.rank}", _NOW.pack(time.monotonic()) + zlib.compress(self.page.memory[:], 1))
        for rank in others:
            if store.check([f"page/{rank}"]):
                posted = store.get(f"page/{rank}")
                at = _NOW.unpack_from(posted)[0]
                if rank not in self._copies or self._copies[rank].posted_at != at:
                    content = zlib.decompress(posted[_NOW.size :])
                    self._copies[rank] = _Copy(content, at, time.monotonic() - at)

    def _sighting(self, rank: int) -> Sighting:
        identity = self._identities.get(rank)
        if identity is None:
            return Sighting(rank)
        life = self._life(rank)
        if self.is_local(rank):
            return read_page(self._maps.get(rank, self.page.memory)[:], rank, identity, life, time.monotonic())
        if copy := self._copies.get(rank):
            seen = read_page(copy.content, rank, identity, life, time.monotonic() - copy.ahead)
            if seen.life == "running" and seen.silent > 3 * self._post_seconds:
                is_silent = self._lost_peer or seen.silent > SILENT_SECONDS + 3 * self._post_seconds
                return dataclasses.replace(seen, life="silent" if is_silent else "late")
            return seen
        return Sighting(rank, "unseen", identity.pid, identity.host)


def read_page(content: bytes, rank: int, identity: Identity, life: Life, now: float) -> Sighting:
    """What a page says.

    Args:
        life: what the kernel says of the process, where it can be asked.
        now: by the clock of the page's writer.
    """
    looked_at, progressed_at, placed_at = _LOOK.unpack_from(content, _LOOK_AT)
    state, declared, reported = _FLAGS.unpack_from(content, _FLAGS_AT)
    calls = sorted(filter(None, (_call(content, slot) for slot in range(CALLS))), key=lambda call: call.serial)
    orders = dict(_ORDER.unpack_from(content, _ORDERS_AT + slot * _ORDER.size) for slot in range(ORDERS))
    size = struct.unpack_from("=I", content, _WORDS_AT)[0]
    words = json.loads(content[_WORDS_AT + 4 : _WORDS_AT + 4 + size]) if size else {}
    if state == LEFT or (state == FAILED and life != "dead"):
        life = "left" if state == LEFT else "failed"
    progressed_at = max([progressed_at, *(call.at for call in calls[-1:])])
    return Sighting(rank, life, identity.pid, identity.host, _STEP.unpack_from(content, _STEP_AT)[0] - 1,
                    now - progressed_at, now - looked_at, placed_at, tuple(calls), orders, words,
                    bool(declared), bool(reported))


def _call(content: bytes, slot: int) -> Call | None:
    """The call in a slot; None where there is none, or one that is being written."""
    start = _CALLS_AT + slot * CALL_SIZE
    serial, sequence, at, step, state, size = _CALL.unpack_from(content, start)
    if not serial:
        return None
    try:
        text = json.loads(content[start + _CALL.size : start + _CALL.size + size])
    except ValueError:
        return None
    return Call(serial=serial, sequence=sequence, step=step, at=at, state=state, **{
        **text, "shape": tuple(text["shape"]), "ranks": _ranks(text["ranks"])})


def spans(ranks: tuple[int, ...]) -> list[int]:
    """Ranks, a regular row of them as -1, start, stop and step."""
    if len(ranks) > 3:
        row = range(ranks[0], ranks[-1] + 1, max(1, ranks[1] - ranks[0]))
        if tuple(row) == ranks:
            return [-1, row.start, row.stop, row.step]
    return list(ranks)


def _ranks(found: list[int]) -> tuple[int, ...]:
    """The ranks that `spans` shortened."""
    return tuple(range(*found[1:])) if found[:1] == [-1] else tuple(found)


def _cut(text: str) -> str:
    half = WORDS_ROOM // 2
    return text if len(text) <= WORDS_ROOM else f"{text[:half]}\n...\n{text[-half:]}"
