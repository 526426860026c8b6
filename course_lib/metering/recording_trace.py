"""A recording as a file for https://ui.perfetto.dev: a process a rank, its lines, its calls, arrows between them.

Format: Chrome's Trace Event Format, as :mod:`course_lib.metering.job_trace` has it. A call is two slices: it waits
until the last of its ranks has come, then it is under way. An arrow is a pair of flow events, ``s`` and ``f`` of one
id, each within the slice that it is bound to: from a message's send to its receive; of a collective from the last rank
to come to the others. Perfetto draws an arrow from the slice that begins first, so that none may lead to a wait.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.metering.job_trace import laid_out, named

LINES, CALLS = 1, 10
"""Numbers of the first thread of each kind."""


@dataclass(frozen=True)
class Call:
    """A call of a rank, in microseconds.

    Attributes:
        place: in the rank's ``calls``.
        came: when the last of its ranks had come; its end where one never came, or where they do not fit together.
    """

    place: int
    name: str
    start: float
    came: float
    end: float
    facts: dict[str, Any]


def trace(recording: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the file.

    Args:
        recording: as :mod:`course_lib.metering.recording` describes it.
    """
    events: list[dict[str, Any]] = []
    slices: dict[tuple[int, int], dict[str, Any]] = {}  # by rank and place of the call
    for rank, lane in enumerate(recording["ranks"]):
        end = lane["end"]
        said = "" if end["how"] == "returned" else f": {end['how']}"
        events += [
            named("process_name", rank, 0, f"rank {rank}{said}"),
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            named("thread_name", rank, LINES, "lines"),
        ]
        events += [_slice(rank, LINES, name, start, until, "line") for name, start, until in _lines(recording, rank)]
        laid = laid_out(_calls(recording, rank), lambda call: "calls")
        events += [
            named("thread_name", rank, CALLS + thread, "calls" + f" ({thread + 1})" * (thread > 0))
            for thread in sorted({thread for _, thread in laid})
        ]
        for call, thread in laid:
            if call.came > call.start:
                events.append(
                    _slice(rank, CALLS + thread, f"{call.name} waits", call.start, call.came, "wait")
                    | {"args": call.facts}
                )
            if call.end > call.came:
                slices[rank, call.place] = _slice(rank, CALLS + thread, call.name, call.came, call.end, "call") | {
                    "args": call.facts
                }
                events.append(slices[rank, call.place])
        events += [
            {"ph": "C", "name": "held by tensors", "pid": rank, "ts": at, "args": {"bytes": held}}
            for at, held in lane["held"]
        ]
    arrows = [arrow for link in recording["links"] for arrow in _arrows(recording, link)]
    for number, (begin, end) in enumerate(arrows, start=1):
        events += _flow(slices[begin], slices[end], number)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lines(recording: Mapping[str, Any], rank: int) -> Iterator[tuple[str, int, int]]:
    """Each stretch that a rank spends in a line: the line, its start and its end."""
    lane = recording["ranks"][rank]
    ends = [line[0] for line in lane["lines"][1:]] + [lane["end"]["at"]]
    for (start, place, number), end in zip(lane["lines"], ends, strict=True):
        if place >= 0:
            code = recording["code"][place]
            yield f"{code['name']}:{number} {code['lines'][number - code['first']].strip()}", start, end


def _calls(recording: Mapping[str, Any], rank: int) -> list[Call]:
    """A rank's calls; one that has not ended goes on until the rank does."""
    lane = recording["ranks"][rank]
    came = {(member, place): _came(recording, link) for link in recording["links"] for member, place in link["of"]}
    calls = []
    for place, (start, ended, name, size, dtype, ranks, sent) in enumerate(lane["calls"]):
        end = max(start + 1, lane["end"]["at"] if ended is None else ended)
        there = came.get((rank, place))
        # One that has ended by itself, as a broadcast at its root, was under way for a microsecond at least.
        last = end if there is None else max(start, min(there, end - 1))
        calls.append(
            Call(
                place,
                name,
                start,
                last,
                end,
                {"bytes": size, "dtype": dtype, "ranks": ranks, "sent": sent, "ended": ended is not None},
            )
        )
    return calls


def _came(recording: Mapping[str, Any], link: Mapping[str, Any]) -> float | None:
    """When the last rank had come to a message or collective; None where one never did, or they do not fit."""
    calls = [recording["ranks"][rank]["calls"][place] for rank, place in link["of"]]
    return max(call[0] for call in calls) if link["fits"] and len(calls) == len(calls[0][5]) else None


def _slice(rank: int, thread: int, name: str, start: float, end: float, kind: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": start, "dur": end - start}


Place = tuple[int, int]


def _arrows(recording: Mapping[str, Any], link: Mapping[str, Any]) -> Iterator[tuple[Place, Place]]:
    """From which call to which, each by its rank and its place."""
    if _came(recording, link) is None:
        return
    calls: dict[Place, Any] = {(rank, place): recording["ranks"][rank]["calls"][place] for rank, place in link["of"]}
    sender = next(iter(calls))
    first = sender if calls[sender][2] == "send" else max(calls, key=lambda place: calls[place][0])
    for other, call in calls.items():
        if other != first:
            # a broadcast's root may have ended before the others have come
            early = calls[first][2] != "send" and call[1] is not None and call[1] < calls[first][0]
            yield (other, first) if early else (first, other)


Slice = dict[str, Any]


def _flow(begin: Slice, end: Slice, number: int) -> list[dict[str, Any]]:
    """The two ends of an arrow: within their slices, not where one slice ends and the next begins."""
    leaves = _within(begin, begin["ts"])
    arrives = _within(end, max(leaves + 0.25, end["ts"]))  # never at the same time: which comes first would be open
    common = {"name": begin["name"], "cat": "flow", "id": number}
    return [
        common | {"ph": "s", "pid": begin["pid"], "tid": begin["tid"], "ts": leaves},
        common | {"ph": "f", "bp": "e", "pid": end["pid"], "tid": end["tid"], "ts": arrives},
    ]


def _within(event: Slice, time: float) -> float:
    """The time nearest to another at which a slice runs; all slices last a microsecond or more."""
    return min(max(time, event["ts"] + 0.25), event["ts"] + event["dur"] - 0.25)
