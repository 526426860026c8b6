"""Files that https://ui.perfetto.dev and chrome://tracing open, all ranks on one clock: of a job, of profiled steps.

Format: Chrome's Trace Event Format; times in microseconds. A process of the file is a rank. Each axis of its
collectives is a thread; those of an axis that overlap get threads of their own, for events of one thread have to nest.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from course_lib.metering.collective import Collective
from course_lib.metering.job_report import RankLog
from course_lib.metering.rank_clocks import Offset
from course_lib.metering.step_spans import RankEvents

MOST = 200_000
"""Events of one rank's profile that are kept, the longest: some 4 MB of the file, and what Perfetto opens at once."""
PHASES, HOSTS, STREAMS, AXES = 1, 10, 1000, 2000
"""Numbers of the first thread of each kind."""


class _Process:
    """The events of one rank.

    Args:
        rank: its number.
        name: of the process.
        begun: seconds on the rank's clock at which the file begins.
    """

    def __init__(self, rank: int, name: str, begun: float):
        self.rank, self.begun, self.events = rank, begun, list[dict[str, Any]]()
        self._label("process", 0, name, rank)

    def thread(self, number: int, name: str) -> None:
        """Name a thread; from above they stand by their numbers."""
        self._label("thread", number, name, number)

    def span(self, thread: int, name: str, kind: str, start: float, end: float, **facts: Any) -> None:
        """A stretch of time, in seconds on the rank's clock."""
        times = {"ts": _micros(start - self.begun), "dur": _micros(end - start)}
        event = {"ph": "X", "name": name, "cat": kind, "pid": self.rank, "tid": thread, **times}
        self.events.append(event | ({"args": facts} if facts else {}))

    def moment(self, name: str, at: float) -> None:
        """A point in time of the whole rank."""
        times = {"ts": _micros(at - self.begun)}
        self.events.append({"ph": "i", "s": "p", "name": name, "pid": self.rank, "tid": 0, **times})

    def collectives(self, calls: Sequence[Collective]) -> None:
        """Calls, each in the first thread of its axis that is free by then."""
        threads: dict[tuple[str, int], int] = {}
        free: dict[str, list[float]] = {}
        for call in calls:
            end = call.end if call.ended else call.start
            lanes = free.setdefault(call.axis, [])
            lane = next((i for i, until in enumerate(lanes) if until <= call.start), len(lanes))
            lanes[lane : lane + 1] = [end]
            facts = {"bytes": call.bytes, "sent": call.sent, "ranks": list(call.ranks), "ended": call.ended}
            thread = threads.setdefault((call.axis, lane), AXES + len(threads))
            self.span(thread, call.name, "collective", call.start, end, dtype=call.dtype_name, **facts)
        for (axis, lane), thread in threads.items():
            self.thread(thread, f"collectives: {axis or 'some ranks'}" + f" ({lane + 1})" * (lane > 0))

    def _label(self, kind: str, thread: int, name: str, place: int) -> None:
        for what, told in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
            self.events.append({"ph": "M", "name": f"{kind}_{what}", "pid": self.rank, "tid": thread, "args": told})


def of_job(logs: Sequence[RankLog]) -> dict[str, Any]:
    """The content of the file of a job: its collectives, waits and steps.

    Args:
        logs: as :func:`course_lib.metering.job_report.read` gives them.
    """
    begun = min((call.start for log in logs for call in log.calls), default=0.0)
    processes = []
    for log in logs:
        process = _Process(log.rank, f"rank {log.rank} on {log.host}", begun)
        process.collectives(log.calls)
        for begin, end in log.waits:
            process.span(PHASES, "waits", "waits", begin, end)
        if log.waits:
            process.thread(PHASES, "Python waits")
        for number, end in enumerate(log.step_ends, start=1):
            process.moment(f"step {number}", end)
        processes.append(process)
    return _file(processes)


def of_steps(ranks: Sequence[tuple[RankEvents, Sequence[Collective], Offset]]) -> dict[str, Any]:
    """The content of the file of profiled steps: phases, the host's threads, a GPU's streams, collectives.

    Args:
        ranks: events, collectives of the same steps, and the offset of the clock of both.
    """
    begun = min(events.window[0] - offset.seconds for events, _, offset in ranks)
    processes = []
    for events, collectives, offset in ranks:
        error = f", clock right to {offset.error * 1e6:.0f} us" if len(ranks) > 1 else ""
        process = _Process(events.rank, f"rank {events.rank} on {events.host}{error}", begun + offset.seconds)
        hosts = sorted({event.thread for event in events.host_events}, key=lambda thread: thread != events.thread)
        streams = sorted({event.stream for event in events.device_events})
        shown = sorted(_shown(events, hosts, streams), key=lambda event: event[4] - event[3])[-MOST:]
        for event in sorted(shown, key=lambda event: (event[0], event[3])):
            process.span(*event)
        process.thread(PHASES, "phases")
        for place, thread in enumerate(hosts):
            process.thread(HOSTS + place, "host, training" if thread == events.thread else f"host, thread {thread}")
        for place, stream in enumerate(streams):
            process.thread(STREAMS + place, f"GPU, stream {stream}")
        process.collectives(collectives)
        processes.append(process)
    return _file(processes)


def _shown(
    events: RankEvents, hosts: Sequence[int], streams: Sequence[int]
) -> Iterator[tuple[int, str, str, float, float]]:
    """Thread, name, kind, start and end of all that a profile has."""
    for kind, named in (("step", events.steps), ("phase", events.phases)):
        for name, start, end in named:
            yield PHASES, name, kind, start, end
    numbers = {thread: HOSTS + place for place, thread in enumerate(hosts)}
    for host in events.host_events:
        yield numbers[host.thread], host.name, "host", host.start, host.end
    for kernel in events.device_events:
        yield STREAMS + streams.index(kernel.stream), kernel.name, "device", kernel.start, kernel.end


def _file(processes: Sequence[_Process]) -> dict[str, Any]:
    return {"traceEvents": [event for process in processes for event in process.events], "displayTimeUnit": "ms"}


def _micros(seconds: float) -> float:
    """The unit of the format."""
    return round(seconds * 1e6, 3)
