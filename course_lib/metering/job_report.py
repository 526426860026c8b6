"""Report over all ranks of a job (:mod:`~course_lib.metering.job_log`), on one clock: bytes, waits, memory."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from course_lib.metering.collective import Collective
from course_lib.metering.intervals import length, united

TOGETHER = ("all_reduce", "all_gather", "barrier")
"""Collectives that end on all ranks at about the same time, once the last has come."""
POINT_TO_POINT = ("send", "recv")


@dataclass
class RankLog:
    """One rank.

    Attributes:
        ended: whether it came to its end, or was killed.
        error: the name of the exception that ended it.
        steps: of its optimizer.
        held: the most bytes by kind, of the steps that were looked at.
    """

    rank: int
    world: int
    machine: str
    host: str
    attempt: int
    began: float
    calls: list[Collective] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    error: str | None = None

    @property
    def sent(self) -> int:
        return sum(call.sent for call in self.calls)


@dataclass(frozen=True)
class Wait:
    """Time that a rank was in a collective before the last of its ranks came.

    Attributes:
        rank: who came earlier.
        last: who came last.
        seconds: between the two; of an asynchronous collective the rank may have computed meanwhile.
    """

    rank: int
    last: int
    seconds: float


def read(folder: Path) -> list[RankLog]:
    """The ranks of a job's last attempt, by rank, all on the clock of the first."""
    logs = [_read(path) for path in sorted(folder.glob("rank*.jsonl"))]
    last = max((log.attempt for log in logs), default=0)
    by_rank: dict[int, RankLog] = {}
    for log in sorted((log for log in logs if log.attempt == last), key=lambda log: log.began):
        by_rank[log.rank] = log  # of several processes of a rank the one that began last
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    for log in ranks[1:]:
        if log.machine != ranks[0].machine:
            _shift(log, clock_offset(ranks[0], log))
    return ranks


def _read(path: Path) -> RankLog:
    log, groups = RankLog(0, 0, "", "", 0, 0.0), dict[int, dict[str, Any]]()
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            kind, *values = json.loads(text)
        except ValueError:  # the last line of a rank that was killed while it wrote
            break
        if kind == "begin":
            known = values[0]
            log = RankLog(
                known["rank"], known["world"], known["machine"], known["host"], known["attempt"], known["began"]
            )
        elif kind == "group":
            number, name, axis, ranks = values
            groups[number] = {"group": name, "axis": axis or _form(ranks), "ranks": tuple(ranks)}
        elif kind == "call":
            name, number, size, dtype, start, end, sent = values
            times = {"start": start, "end": math.nan if end is None else end}
            log.calls.append(Collective(name, size, dtype, sent=sent, **times, **groups[number]))
        elif kind == "wait":
            log.waits.append((values[0], values[1]))
        elif kind == "step":
            log.step_ends.append(values[1])
            log.held = {held: max(log.held.get(held, 0), values[2].get(held, 0)) for held in log.held | values[2]}
        elif kind == "end":
            log.ended, log.error = True, values[1]
    log.calls.sort(key=lambda call: call.start)
    return log


def _form(ranks: Sequence[int]) -> str:
    """A group that has no name by what it looks like: the same for all groups of an axis."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    regular = list(ranks) == list(range(ranks[0], ranks[0] + stride * len(ranks), stride or 1))
    if regular and stride > 0:
        return f"{len(ranks)} ranks" + (f", each {stride}th" if stride > 1 else " in a row")
    return "ranks " + ", ".join(map(str, ranks))


def clock_offset(reference: RankLog, other: RankLog) -> float:
    """Seconds by which the reference's clock is ahead of another machine's.

    Both see the ends of the collectives that end for all at once; the median difference leaves the stragglers out.
    0 where they had none in common.
    """
    theirs = dict(_numbered(other))
    apart = [
        call.end - theirs[key].end
        for key, call in _numbered(reference)
        if call.name in TOGETHER and call.ended and key in theirs and theirs[key].ended
    ]
    return statistics.median(apart) if apart else 0.0


def _shift(log: RankLog, seconds: float) -> None:
    log.calls = [replace(call, start=call.start + seconds, end=call.end + seconds) for call in log.calls]
    log.waits = [(begin + seconds, end + seconds) for begin, end in log.waits]
    log.step_ends = [end + seconds for end in log.step_ends]


def _numbered(log: RankLog) -> Iterator[tuple[Any, Collective]]:
    """A rank's calls, each with what it has in common with the other ranks' of the same collective."""
    counted: dict[Any, int] = defaultdict(int)
    for call in log.calls:
        ends = call.ranks
        if call.name in POINT_TO_POINT:  # a rank that receives from any has no peer
            if len(ends) < 2:
                continue
            stream: Any = call.group, *(ends if call.name == "send" else ends[::-1])
        else:
            stream = call.group
        counted[stream] += 1
        yield (stream, counted[stream]), call


def waits(logs: Sequence[RankLog]) -> list[Wait]:
    """Waits of those who came to a collective before the last did, and to a receive before the sender."""
    meetings: dict[Any, list[tuple[int, Collective]]] = defaultdict(list)
    for log in logs:
        for key, call in _numbered(log):
            meetings[key].append((log.rank, call))
    early: list[Wait] = []
    for met in meetings.values():
        if len(met) == len(met[0][1].ranks) and len({call.name for _, call in met}) <= 2:
            last, latest = max(met, key=lambda arrival: arrival[1].start)
            early += [
                Wait(rank, last, latest.start - call.start)
                for rank, call in met
                if rank != last and call.name != "send"
            ]
    return early


def table(logs: Sequence[RankLog]) -> list[dict[str, Any]]:
    """A row for each kind of collective: axis, collective, dtype, groups, calls, bytes and sent per rank, seconds.

    ``calls``, ``bytes`` and ``sent`` are the most of any rank; ``seconds``, during which at least one was under way,
    the mean of the ranks that had any; ``groups`` the ranks of each, a send's and its receive's the pairs.
    """
    rows: dict[tuple[str, str, str], dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for log in logs:
        for call in log.calls:
            rows[call.axis, call.name, call.dtype_name][log.rank].append(call)
    by_kind = []
    for (axis, name, dtype), by_rank in rows.items():
        groups = sorted({call.ranks for calls in by_rank.values() for call in calls})
        by_kind.append(
            {
                "axis": axis,
                "collective": name,
                "dtype": dtype,
                "groups": groups,
                "ranks": len(by_rank),
                "calls": max(len(calls) for calls in by_rank.values()),
                "bytes": max(sum(call.bytes for call in calls) for calls in by_rank.values()),
                "sent": max(sum(call.sent for call in calls) for calls in by_rank.values()),
                "seconds": statistics.mean(under_way(calls) for calls in by_rank.values()),
            }
        )
    return sorted(by_kind, key=lambda row: (-row["sent"], row["axis"], row["collective"]))


def under_way(calls: Sequence[Collective]) -> float:
    """Seconds during which at least one of them was."""
    return length(united([(call.start, call.end) for call in calls if call.ended]))
