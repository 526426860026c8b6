"""A job's collectives as a file that https://ui.perfetto.dev and chrome://tracing open: all ranks on one clock.

Format: Chrome's Trace Event Format, complete events; times in microseconds. A process of the file is a rank, a thread
an axis; collectives of an axis that overlap get threads of their own, for events of one thread have to nest.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from course_lib.metering.job_report import RankLog


class Timed(Protocol):
    """Has a start and, where it ended, an end, in seconds."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float | None: ...


Collective = TypeVar("Collective", bound=Timed)


def trace(logs: Sequence[RankLog]) -> dict[str, Any]:
    """The content of the file.

    Args:
        logs: as :func:`course_lib.metering.job_report.read` gives them.
    """
    begun = min((call.start for log in logs for call in log.calls), default=0.0)
    events: list[dict[str, Any]] = []
    for log in logs:
        events.append(named("process_name", log.rank, 0, f"rank {log.rank} on {log.host}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": log.rank, "args": {"sort_index": log.rank}})
        lanes: dict[tuple[str, int], int] = {}
        for call, lane in laid_out(log.calls, lambda call: call.group.axis):
            thread = lanes.setdefault((call.group.axis, lane), len(lanes) + 1)
            end = call.start if call.end is None else call.end
            events.append(
                {
                    "ph": "X",
                    "name": call.name,
                    "cat": call.group.axis,
                    "pid": log.rank,
                    "tid": thread,
                    "ts": micros(call.start - begun),
                    "dur": micros(end - call.start),
                    "args": {
                        "bytes": call.bytes,
                        "sent": call.sent,
                        "dtype": call.dtype,
                        "ranks": list(call.group.ranks),
                        "ended": call.end is not None,
                    },
                }
            )
        for (axis, lane), thread in lanes.items():
            events.append(named("thread_name", log.rank, thread, axis + f" ({lane + 1})" * (lane > 0)))
        waiting = len(lanes) + 1
        for begin, end in log.waits:
            events.append(
                {
                    "ph": "X",
                    "name": "waits",
                    "cat": "waits",
                    "pid": log.rank,
                    "tid": waiting,
                    "ts": micros(begin - begun),
                    "dur": micros(end - begin),
                }
            )
        if log.waits:
            events.append(named("thread_name", log.rank, waiting, "Python waits"))
        for number, end in enumerate(log.step_ends, start=1):
            events.append(
                {"ph": "i", "s": "p", "name": f"step {number}", "pid": log.rank, "tid": 0, "ts": micros(end - begun)}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def laid_out(calls: Sequence[Collective], axis_of: Callable[[Collective], str]) -> list[tuple[Collective, int]]:
    """Each call with the first lane of its axis that is free by then."""
    free: dict[str, list[float]] = {}
    laid = []
    for call in calls:
        lanes = free.setdefault(axis_of(call), [])
        lane = next((i for i, until in enumerate(lanes) if until <= call.start), len(lanes))
        if lane == len(lanes):
            lanes.append(0.0)
        lanes[lane] = call.start if call.end is None else call.end
        laid.append((call, lane))
    return laid


def named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    """A name of a process or a thread."""
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def micros(seconds: float) -> float:
    """The unit of the format."""
    return round(seconds * 1e6, 3)
