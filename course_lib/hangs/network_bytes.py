"""Bytes that processes exchange with anybody but their ranks' peers: a download or an upload is work.

Linux counts them for each TCP connection (``tcp_info``, asked over netlink's ``sock_diag``, as ``ss -i`` does); other
systems do not tell. What is exchanged with the other ranks' processes and with their store says nothing: a rank that
hangs is sent what the others have for it.
"""

import contextlib
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

BUSY_BYTES = 32 << 10
"""A second, over the last WINDOW seconds, that count as work: more than a tracker's heartbeat, less than any download
that somebody waits for."""
WINDOW, GAP = 10.0, 2.0

# linux/netlink.h, sock_diag.h, inet_diag.h, tcp.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST_ALL, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_HEADER = struct.Struct("=LHHLL")
_REQUEST = struct.Struct("=BBBBL48s")
_MESSAGE = struct.Struct("=BBBB2s2s16s16s12sLLLLL")
_ATTRIBUTE = struct.Struct("=HH")
_COUNTED = struct.Struct("=QQ")
_COUNTED_AT, _INFO, _ALL_STATES = 120, 2, 0xFFF
"""Bytes acknowledged and received, in a tcp_info; the attribute that is one; connections in any state."""

End = tuple[str, int]
"""Address and port; an IPv4 address as such, also where the socket is of IPv6."""


@dataclass(frozen=True)
class Connection:
    """One end of a TCP connection of this machine."""

    inode: int
    own: End
    other: End
    moved: int


@dataclass
class Peers:
    """Processes whose connections do not count.

    Attributes:
        pids: of the other ranks on this machine.
        addresses: of other ranks' machines, as text.
        ports: of the store.
    """

    pids: set[int] = field(default_factory=set)
    addresses: set[str] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)


def connections() -> list[Connection]:
    """All of this network namespace; none where the system does not tell."""
    ends: list[Connection] = []
    if sys.platform != "linux":
        return ends
    for family in (socket.AF_INET, socket.AF_INET6):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as asked,
        ):
            asked.settimeout(1.0)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ALL_STATES, bytes(48))
            asked.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST_ALL, 1, 0) + body)
            while _take(asked.recv(1 << 20), ends):
                pass
    return ends


def _take(answer: bytes, ends: list[Connection]) -> bool:
    """Add what a message tells; whether another one follows."""
    at = 0
    while at + _HEADER.size <= len(answer):
        size, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind in (_DONE, _ERROR) or size < _HEADER.size:
            return False
        ends.append(_connection(answer[at + _HEADER.size : at + size]))
        at += (size + 3) & ~3
    return True


def _connection(content: bytes) -> Connection:
    fields = _MESSAGE.unpack_from(content)
    family, port, other_port, address, other_address, inode = fields[0], *fields[4:8], fields[-1]
    moved, at = 0, _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(content):
        size, kind = _ATTRIBUTE.unpack_from(content, at)
        if kind == _INFO and size >= _ATTRIBUTE.size + _COUNTED_AT + _COUNTED.size:
            moved = sum(_COUNTED.unpack_from(content, at + _ATTRIBUTE.size + _COUNTED_AT))
        at += max(4, (size + 3) & ~3)
    return Connection(
        inode,
        (_text(family, address), int.from_bytes(port, "big")),
        (_text(family, other_address), int.from_bytes(other_port, "big")),
        moved,
    )


def _text(family: int, address: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(family, address[:4])
    text = socket.inet_ntop(family, address)
    return text.removeprefix("::ffff:") if "." in text else text


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that processes hold, as far as they may be looked at."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    kind, _, number = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
                    if kind == "socket":
                        inodes.add(int(number[:-1]))
    return inodes


def own_addresses() -> set[str]:
    """Of this machine, as far as its connections show them; without loopback."""
    return {end.own[0] for end in connections() if not end.own[0].startswith(("127.", "::", "0."))}


class Traffic:
    """Bytes that processes move to others than their peers.

    Args:
        peers: as they are known when it is asked.
    """

    def __init__(self, peers: Callable[[], Peers] = Peers):
        self._peers = peers
        self._before: dict[int, int] = {}
        self._moved: deque[tuple[float, int]] = deque()

    def is_busy(self, pids: Iterable[int], now: float | None = None) -> bool:
        """Whether they have moved more than BUSY_BYTES a second in the last WINDOW seconds.

        Or since it was asked first, or again after it was not asked for GAP seconds.
        """
        now = time.monotonic() if now is None else now
        counted = self._counted(set(pids))
        if self._moved and now - self._moved[-1][0] > GAP:
            self._moved.clear()  # it is not known when in between they were moved
        new = sum(moved - self._before.get(inode, 0) for inode, moved in counted.items()) if self._moved else 0
        self._before = counted
        self._moved.append((now, max(0, new)))
        while now - self._moved[0][0] > WINDOW:
            self._moved.popleft()
        (began, _), *later = self._moved
        return sum(moved for _, moved in later) > BUSY_BYTES * (now - began)

    def _counted(self, pids: set[int]) -> dict[int, int]:
        """Bytes by connection, of those that count."""
        every, peers = connections(), self._peers()
        own, theirs = sockets_of(pids), sockets_of(peers.pids - pids)
        of_peers = {(end.own, end.other) for end in every if end.inode in theirs}
        return {
            end.inode: end.moved
            for end in every
            if end.inode in own
            and (end.other, end.own) not in of_peers
            and not {end.own[1], end.other[1]} & peers.ports
            and end.other[0] not in peers.addresses
        }
