"""Queues of the GPUs: work ahead of a call, which on a GPU is issued before it begins.

A host goes on after it has issued a call on its GPU, and can be many calls ahead of it. A rank has *come* to such a
call when its GPU has: when nothing that has not ended stands before it. Two things stand before a call: what was
issued earlier on the same communicator, which does one thing after the other, and what the stream waited for before
the call was issued.
"""

from collections.abc import Iterator

from course_lib.hangs.rank_state import WAITED_FOR, Call, RankSnapshot

POINT_TO_POINT = {"send": "recv", "recv": "send"}


class Queue:
    """The calls of one rank, as its GPU meets them; of those on the CPU none stands before another.

    Calls of one batch run side by side. Of a rank that uses several streams more may seem to stand in a row than do.
    """

    def __init__(self, snapshot: RankSnapshot):
        self._open = [call for call in snapshot.calls if not call.ended]
        self._before = {call.serial: self._blocker(call) for call in self._open if call.on_gpu}
        self._blockers = {blocker.serial for blocker in self._before.values() if blocker}
        self._known = {(call.stream, call.sequence): call for call in self._open}

    def waiting(self) -> Iterator[Call]:
        """The calls that the rank waits in, or that one which it waits for stands behind."""
        for call in self._open:
            # A send or receive may be posted long before it is needed: only one that is waited for holds a rank up.
            holds_up = call.name not in POINT_TO_POINT or call.state == WAITED_FOR or call.serial in self._blockers
            if holds_up and not self._before.get(call.serial):
                yield call

    def has_come(self, stream: str, sequence: int) -> bool:
        """Whether the rank has come to a call that it has issued."""
        call = self._known.get((stream, sequence))
        return call is None or not self._before.get(call.serial)

    def _blocker(self, call: Call) -> Call | None:
        """The earliest call that stands before another."""
        for earlier in self._open:
            if earlier.serial >= call.serial:
                break
            is_in_a_row = _communicator(earlier) == _communicator(call) or 0 < earlier.waited < call.serial
            if earlier.on_gpu and is_in_a_row and not (call.batch and earlier.batch == call.batch):
                return earlier
        return None


def _communicator(call: Call) -> tuple:
    """The group's, or, of a single send or receive, that of two ranks (ProcessGroupNCCL.cpp, getKeySendRecv)."""
    if call.name not in POINT_TO_POINT:
        return (call.stream,)
    group, pair, _ = call.stream.rsplit(":", 2)
    return (group,) if call.batch else (group, *sorted(pair.split(">")))
