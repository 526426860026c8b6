"""Profiled steps of all ranks as one file for https://ui.perfetto.dev: a process a rank, all on rank 0's clock.

Threads of a rank, from above: the trainer's phases, the host's threads, a GPU's streams, the axes of its collectives.
Format: as :mod:`course_lib.metering.job_trace` has it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from course_lib.metering.collective_log import Collective
from course_lib.metering.job_trace import laid_out, micros, named
from course_lib.metering.rank_clocks import Offset
from course_lib.metering.step_spans import RankEvents

MOST = 200_000
"""Events of one rank that are kept, the longest: some 4 MB of the file, and what Perfetto opens at once."""
PHASES, HOSTS, STREAMS, AXES = 1, 10, 1000, 2000
"""Numbers of the first thread of each kind."""


def trace(ranks: Sequence[tuple[RankEvents, Sequence[Collective], Offset]]) -> dict[str, Any]:
    """The content of the file.

    Args:
        ranks: events, collectives of the same steps, and the offset of the clock of both.
    """
    begun = min(events.window[0] - offset.seconds for events, _, offset in ranks)
    written: list[dict[str, Any]] = []
    for events, collectives, offset in ranks:
        zero = begun + offset.seconds
        error = f", clock right to {offset.error * 1e6:.0f} us" if len(ranks) > 1 else ""
        written += [
            named("process_name", events.rank, 0, f"rank {events.rank} on {events.host}{error}"),
            {"ph": "M", "name": "process_sort_index", "pid": events.rank, "args": {"sort_index": events.rank}},
        ]
        shown = sorted([*_of_program(events), *_of_device(events)], key=lambda event: event[3] - event[2])[-MOST:]
        for kind, thread, start, end, name in sorted(shown, key=lambda event: event[1:3]):
            written.append(_event(events.rank, thread, name, kind, start - zero, end - start))
        written += [named("thread_name", events.rank, thread, name) for thread, name in _threads(events).items()]
        lanes: dict[tuple[str, int], int] = {}
        for call, lane in laid_out(collectives, lambda call: call.axis):
            thread = lanes.setdefault((call.axis, lane), AXES + len(lanes))
            end = call.start if math.isnan(call.end) else call.end
            written.append(
                _event(events.rank, thread, call.name, "collective", call.start - zero, end - call.start)
                | {
                    "args": {
                        "bytes": call.bytes,
                        "sent": call.sent,
                        "ranks": list(call.ranks),
                        "dtype": str(call.dtype).removeprefix("torch."),
                        "ended": not math.isnan(call.end),
                    }
                }
            )
        for (axis, lane), thread in lanes.items():
            written.append(
                named(
                    "thread_name",
                    events.rank,
                    thread,
                    f"collectives: {axis or 'some ranks'}" + f" ({lane + 1})" * (lane > 0),
                )
            )
        written += [
            {"ph": "M", "name": "thread_sort_index", "pid": events.rank, "tid": thread, "args": {"sort_index": thread}}
            for thread in [*_threads(events), *lanes.values()]
        ]
    return {"traceEvents": written, "displayTimeUnit": "ms"}


Shown = tuple[str, int, float, float, str]


def _threads(events: RankEvents) -> dict[int, str]:
    hosts = sorted({event.thread for event in events.host_events}, key=lambda thread: thread != events.thread)
    streams = sorted({event.stream for event in events.device_events})
    return (
        {PHASES: "phases"}
        | {
            HOSTS + place: "host, training" if thread == events.thread else f"host, thread {thread}"
            for place, thread in enumerate(hosts)
        }
        | {STREAMS + place: f"GPU, stream {stream}" for place, stream in enumerate(streams)}
    )


def _of_program(events: RankEvents) -> Iterator[Shown]:
    hosts = sorted({event.thread for event in events.host_events}, key=lambda thread: thread != events.thread)
    numbers = {thread: HOSTS + place for place, thread in enumerate(hosts)}
    for name, start, end in events.steps:
        yield "step", PHASES, start, end, name
    for name, start, end in events.phases:
        yield "phase", PHASES, start, end, name
    for event in events.host_events:
        yield "host", numbers[event.thread], event.start, event.end, event.name


def _of_device(events: RankEvents) -> Iterator[Shown]:
    streams = sorted({event.stream for event in events.device_events})
    for event in events.device_events:
        yield "device", STREAMS + streams.index(event.stream), event.start, event.end, event.name


def _event(rank: int, thread: int, name: str, kind: str, start: float, seconds: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": rank,
        "tid": thread,
        "ts": micros(start),
        "dur": micros(seconds),
    }
