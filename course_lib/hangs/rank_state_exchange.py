"""Exchange of the ranks' states, including those of stopped and dead ranks.

Each rank writes a record: numbers, its last calls, its stacks. On one Linux machine the record is memory that others
map (a file without a name: nothing is left to remove when ranks are killed), written in place. To ranks on other
machines the watchdog's thread posts a copy through the process group's store.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import socket
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from course_lib.hangs.liveness import machine, process_state, start_ticks
from course_lib.hangs.network_bytes import Peers, own_addresses
from course_lib.hangs.rank_state import SIZE, Flags, Life, RankSnapshot, RankState, read_record
from course_lib.torch_names import connected_again

POST_SECONDS = 1.0  # between two posts to ranks on other machines; more where there are more than 16 ranks
SILENT_SECONDS = 3.0  # longer than three posts take, and a rank on another machine counts as gone
NOTICE_SECONDS = 1.0  # after a connection has broken, for the kernel to say that its process is dead
MEET_SECONDS = 10.0  # for ranks that enter one after the other


@dataclass(frozen=True)
class Identity:
    """Identity of a rank: what others need to find its record and to see whether it lives."""

    pid: int
    started: int
    host: str
    machine: str
    descriptor: int
    addresses: tuple[str, ...] = ()
    """That other machines may know this one by."""

    @classmethod
    def own(cls, record: RankState) -> "Identity":
        return cls(
            os.getpid(),
            start_ticks(os.getpid()),
            socket.gethostname(),
            machine(),
            record.descriptor,
            tuple(own_addresses()),
        )

    def map(self) -> mmap.mmap:
        """Its record.

        Raises:
            OSError: the process has gone, or is another user's.
        """
        descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDONLY)
        try:
            return mmap.mmap(descriptor, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)


@dataclass
class _Copy:
    """Latest copy that a rank on another machine has posted."""

    content: bytes
    posted_at: float
    """By the other machine's clock."""
    ahead: float
    """Seconds by which this machine's clock is ahead of the other's."""


def _ports_of(store: dist.Store) -> set[int]:
    """Where a store listens; none for one that is no server's, and before torch 2.8 where it is another's."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return {store.port} if isinstance(store, dist.TCPStore) else set()


class RankStateExchange:
    """All ranks' records, as one rank sees them.

    The store is used by a thread of its own, which may have to wait for it: rank 0 keeps it, and may be stopped.

    Args:
        rank: this rank.
        world_size: ranks.
        store: where they meet.
        prefix: of their keys there.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, prefix: str):
        self.rank, self.world_size, self.record = rank, world_size, RankState()
        self._identity = Identity.own(self.record)
        self._identities: dict[int, Identity] = {rank: self._identity}
        self._maps: dict[int, mmap.mmap] = {}
        self._copies: dict[int, _Copy] = {}
        self._store, self._prefix, self._closed = store, prefix, threading.Event()
        self._ports = _ports_of(store)
        self._met, self._lost_peer = threading.Event(), False
        self.thread = threading.Thread(target=self._meet, name="watchdog-exchange", daemon=True)
        self._post_seconds = max(POST_SECONDS, world_size / 16)

    def open(self) -> None:
        """Wait for the others, for MEET_SECONDS at most: the record of a rank that dies can't be found any more."""
        if self.world_size > 1:
            self.thread.start()
            self._met.wait(MEET_SECONDS)

    def close(self) -> None:
        """Stop; the record stays where others have mapped it."""
        self._closed.set()
        if self.thread.is_alive():
            self.thread.join(2 * POST_SECONDS)
        self.record.close()

    def peers(self) -> Peers:
        """Processes of the other ranks on this machine, addresses of those on others, and the store's port."""
        others = {rank: known for rank, known in list(self._identities.items()) if rank != self.rank}
        return Peers(
            {known.pid for rank, known in others.items() if self.is_local(rank)},
            {address for rank, known in others.items() if not self.is_local(rank) for address in known.addresses},
            self._ports,
        )

    def is_local(self, rank: int) -> bool:
        """Whether a rank's record is mapped here."""
        return rank == self.rank or rank in self._maps

    def notice_seconds(self) -> float:
        """Called when a connection to a rank has broken: seconds until all know whose."""
        self._lost_peer = True
        return NOTICE_SECONDS + (4 * self._post_seconds if self._elsewhere() else 0)

    def is_alarming(self) -> bool:
        """Whether a rank of this machine died during its training, or any rank has declared a hang. Cheap."""
        copies = [copy.content for copy in list(self._copies.values())]  # the exchange's thread adds to them
        records: list[mmap.mmap | bytes] = [*self._maps.values(), *copies]
        return bool(self.dead()) or any(Flags.from_buffer_copy(record).declared for record in records)

    def snapshots(self) -> list[RankSnapshot]:
        """All ranks', by rank."""
        snapshots = [self._snapshot(rank) for rank in range(self.world_size)]
        dead = {rank for peer in snapshots for rank in peer.words.get("dead", ())}  # as those on their machines know
        return [dataclasses.replace(peer, life="dead") if peer.rank in dead else peer for peer in snapshots]

    def dead(self) -> list[int]:
        """Ranks of this machine that died during their training, and not because their watchdog ended them."""
        # The kernel is asked before the flags: a rank says that it leaves, and then ends.
        return [
            rank
            for rank, record in list(self._maps.items())
            if self._life(rank) == "dead" and Flags.from_buffer_copy(record).is_training
        ]

    def _life(self, rank: int) -> Life:
        """What the kernel says, where it can be asked."""
        if rank not in self._maps:
            return "running"
        return process_state(self._identities[rank].pid, self._identities[rank].started)

    def _meet(self) -> None:
        """Find the others' records, and exchange copies with those on other machines, until closed."""
        try:
            store: Any = connected_again(self._store, self._prefix)
            store.set(f"identity/{self.rank}", json.dumps(dataclasses.asdict(self._identity)))
            pause = self.world_size / 500
            while len(self._identities) < self.world_size and not self._closed.wait(pause):
                self._find(store)
            store.add("found all", 1)
            while store.add("found all", 0) < self.world_size and not self._closed.wait(pause):
                pass
            self._met.set()
            is_last = False
            while others := self._elsewhere():
                self._exchange(store, others)
                if is_last:
                    return
                is_last = self._closed.wait(self._post_seconds)  # once more then: the others see how this rank left
        except (RuntimeError, OSError):  # the store has gone, with the rank or machine that kept it: copies grow old
            self._met.set()

    def _elsewhere(self) -> list[int]:
        """Ranks on other machines."""
        return [rank for rank in range(self.world_size) if not self.is_local(rank)]

    def _find(self, store: Any) -> None:
        for rank in set(range(self.world_size)) - set(self._identities):
            if store.check([f"identity/{rank}"]):
                identity = Identity(**json.loads(store.get(f"identity/{rank}")))
                self._identities[rank] = identity  # before its record, by which the watchdog's thread comes here
                if identity.machine and identity.machine == self._identity.machine:
                    with contextlib.suppress(OSError):  # it has gone already, or is another user's: by its copy, then
                        self._maps[rank] = identity.map()

    def _exchange(self, store: Any, others: list[int]) -> None:
        store.set(f"record/{self.rank}", f"{time.monotonic()} ".encode() + zlib.compress(self.record.memory[:], 1))
        for rank in others:
            if store.check([f"record/{rank}"]):
                posted_at, _, content = store.get(f"record/{rank}").partition(b" ")
                at = float(posted_at)
                if rank not in self._copies or self._copies[rank].posted_at != at:
                    self._copies[rank] = _Copy(zlib.decompress(content), at, time.monotonic() - at)

    def _snapshot(self, rank: int) -> RankSnapshot:
        identity = self._identities.get(rank)
        if identity is None:
            return RankSnapshot(rank)
        known, life = (rank, identity.pid, identity.host), self._life(rank)
        if self.is_local(rank):
            return read_record(self._maps.get(rank, self.record.memory), *known, life, time.monotonic())
        if copy := self._copies.get(rank):
            seen = read_record(copy.content, *known, life, time.monotonic() - copy.ahead)
            if seen.life == "running" and seen.silent > 3 * self._post_seconds:
                is_silent = self._lost_peer or seen.silent > SILENT_SECONDS + 3 * self._post_seconds
                return dataclasses.replace(seen, life="silent" if is_silent else "late")
            return seen
        return RankSnapshot(rank, "unseen", identity.pid, identity.host)
