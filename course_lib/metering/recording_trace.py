"""A recording as a file for https://ui.perfetto.dev: a process a rank, its lines, its calls, arrows between them.

Format: Chrome's Trace Event Format, as :mod:`course_lib.metering.job_trace` has it. An arrow is a pair of flow events,
``s`` and ``f`` of one id, each within the slice that it is bound to: from a message's send to its receive; of a
collective from the call of the last rank to come, for which the others waited, to theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from course_lib.metering.job_trace import laid_out, named

LINES, CALLS = 1, 10
"""Numbers of the first thread of each kind."""


@dataclass(frozen=True)
class Call:
    """A call of a rank, in microseconds."""

    place: int
    name: str
    start: float
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
        events += [named("process_name", rank, 0, f"rank {rank}{said}"),
                   {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
                   named("thread_name", rank, LINES, "lines")]
        events += [_slice(rank, LINES, name, start, until, "line") for name, start, until in _lines(recording, rank)]
        laid = laid_out(_calls(lane), lambda call: "calls")
        events += [named("thread_name", rank, CALLS + thread, "calls" + f" ({thread + 1})" * (thread > 0))
                   for thread in sorted({thread for _, thread in laid})]
        for call, thread in laid:
            slices[rank, call.place] = _slice(rank, CALLS + thread, call.name, call.start, call.end, "call") | {
                "args": call.facts}
            events.append(slices[rank, call.place])
        events += [{"ph": "C", "name": "held by tensors", "pid": rank, "ts": at, "args": {"bytes": held}}
                   for at, held in lane["held"]]
    arrows = [arrow for link in recording["links"]
              for arrow in _arrows([slices[rank, place] for rank, place in link["of"]])]
    for number, (begin, end) in enumerate(arrows, start=1):
        events += _flow(begin, end, number)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lines(recording: Mapping[str, Any], rank: int) -> Iterator[tuple[str, int, int]]:
    """Each stretch that a rank spends in a line: the line, its begin and its end."""
    lane = recording["ranks"][rank]
    ends = [line[0] for line in lane["lines"][1:]] + [lane["end"]["at"]]
    for (start, place, number), end in zip(lane["lines"], ends, strict=True):
        if place >= 0:
            code = recording["code"][place]
            yield f"{code['name']}:{number} {code['lines'][number - code['first']].strip()}", start, end


def _calls(lane: Mapping[str, Any]) -> list[Call]:
    """A rank's calls; one that has not ended goes on until the rank does."""
    return [Call(place, name, start, max(start + 1, lane["end"]["at"] if end is None else end),
                 {"bytes": size, "dtype": dtype, "ranks": ranks, "sent": sent, "ended": end is not None})
            for place, (start, end, name, size, dtype, ranks, sent) in enumerate(lane["calls"])]


def _slice(rank: int, thread: int, name: str, start: float, end: float, kind: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": start, "dur": end - start}


Slice = dict[str, Any]


def _arrows(members: list[Slice]) -> Iterator[tuple[Slice, Slice]]:
    """From which slice to which: a message's is the first of a link; a collective's begin at the last to come."""
    first = members[0] if members[0]["name"] == "send" else max(members, key=lambda member: member["ts"])
    for other in members:
        if other is not first:
            # a broadcast's root may have ended before the others have come
            early = first["name"] != "send" and other["ts"] + other["dur"] < first["ts"]
            yield (other, first) if early else (first, other)


def _flow(begin: Slice, end: Slice, number: int) -> list[dict[str, Any]]:
    """The two ends of an arrow: within their slices, not where one slice ends and the next begins."""
    leaves = _within(begin, begin["ts"])
    arrives = _within(end, max(leaves + 0.25, end["ts"]))  # never at the same time: which comes first would be open
    common = {"name": begin["name"], "cat": "flow", "id": number}
    return [common | {"ph": "s", "pid": begin["pid"], "tid": begin["tid"], "ts": leaves},
            common | {"ph": "f", "bp": "e", "pid": end["pid"], "tid": end["tid"], "ts": arrives}]


def _within(event: Slice, time: float) -> float:
    """The time nearest to another at which a slice runs; all slices last a microsecond or more."""
    return min(max(time, event["ts"] + 0.25), event["ts"] + event["dur"] - 0.25)
