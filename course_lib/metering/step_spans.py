"""From a profiler's events to one line of time: at each moment of a step, which operator of which phase it was.

Every moment is given to one thing, so that the parts add up to the wall clock. On a CPU it is the outermost operator
that runs on the training thread; what that calls inside is its own. On a GPU it is the kernel that runs, named after
the operator that started it. Where neither runs, the rank waits for a collective that is under way, or for its host.
"""

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.metering.intervals import Interval, common, length, united, without

BETWEEN = "between"
"""Phase of what lies in none: logging, counting of targets, callbacks."""
HOST, EXPOSED = "not in operators", "communication, exposed"


class HostEvent(NamedTuple):
    """Code that ran on a thread of the host."""

    name: str
    thread: int
    start: float
    end: float
    number: int
    """The profiler's, by which a kernel names what started it."""


class DeviceEvent(NamedTuple):
    """A kernel or a copy on a GPU."""

    name: str
    stream: int
    start: float
    end: float
    started_by: int
    """Number of the host's event; 0 where nothing is known."""


class OperatorSpan(NamedTuple):
    """A stretch in which one operator had the rank's device."""

    start: float
    end: float
    phase: str
    operator: str
    """As PyTorch names it, without ``aten::``."""


@dataclass(frozen=True)
class RankEvents:
    """Events of a profiler on one rank, in seconds of its own clock.

    Attributes:
        rank: its number.
        host: the machine's name.
        window: the recorded steps, from the first's begin to the last's end.
        steps: name, begin and end of each.
        phases: name, begin and end of each, in order.
        thread: that trains.
        host_events: in any order.
        device_events: likewise; none on a CPU.
        flights: collectives under way.
    """

    rank: int
    host: str
    window: Interval
    steps: Sequence[tuple[str, float, float]]
    phases: Sequence[tuple[str, float, float]]
    thread: int
    host_events: Sequence[HostEvent]
    device_events: Sequence[DeviceEvent]
    flights: Sequence[Interval]


@dataclass(frozen=True)
class Parts:
    """A rank's window in parts.

    Attributes:
        seconds: by phase and operator; the operator is :data:`EXPOSED` where the rank waited for a collective, and
            :data:`HOST` where nothing ran. They add up to the window.
        hidden: seconds of collectives during which an operator ran.
        under_way: seconds during which there was a collective.
    """

    seconds: Mapping[tuple[str, str], float]
    hidden: float
    under_way: float


def parts(events: RankEvents, operators: AbstractSet[str]) -> Parts:
    """Divide the window.

    Args:
        events: of a rank.
        operators: names that are told apart; another counts where it is outermost and calls none of these.
    """
    lane, flights = lane_of(events, operators)
    (begin, end), seconds, busy = events.window, defaultdict[tuple[str, str], float](float), list[Interval]()
    reached = begin
    for span in sorted(lane):  # kernels of several streams overlap: who came first has the time
        start, stop = max(span.start, reached), min(span.end, end)
        if start < stop:
            seconds[span.phase, span.operator] += stop - start
            busy.append((start, stop))
            reached = stop
    under_way = common(united(flights), [events.window])
    gaps = without([events.window], busy)
    phases = segments(events)
    for label, idle in ((EXPOSED, common(gaps, under_way)), (HOST, without(gaps, under_way))):
        for phase, start, stop in phases:
            seconds[phase, label] += length(common(idle, [(start, stop)]))
    return Parts(
        {key: value for key, value in seconds.items() if value}, length(common(busy, under_way)), length(under_way)
    )


def lane_of(events: RankEvents, operators: AbstractSet[str]) -> tuple[list[OperatorSpan], list[Interval]]:
    """The spans of operators on the device, and collectives under way, those that a GPU's kernels are too."""
    phases = segments(events)
    owned: dict[int, OperatorSpan] = {}  # by the number of any event inside
    roots: list[OperatorSpan] = []
    for thread in {event.thread for event in events.host_events}:
        own = sorted(
            (event for event in events.host_events if event.thread == thread),
            key=lambda event: (event.start, -event.end),
        )
        parents = _parents(own)
        known = [event.name.removeprefix("aten::") in operators for event in own]
        inside = list(known)  # or a descendant is known
        for place in range(len(own) - 1, -1, -1):
            if inside[place] and parents[place] is not None:
                inside[parents[place]] = True  # type: ignore[index]
        spans: list[OperatorSpan | None] = []
        for place, event in enumerate(own):
            parent = parents[place]
            span = spans[parent] if parent is not None else None
            own_span = OperatorSpan(event.start, event.end, phase_at(phases, event.start), "")
            if span is None and event.name.startswith("aten::") and (known[place] or not inside[place]):
                span = own_span._replace(operator=event.name.removeprefix("aten::"))
                if thread == events.thread:
                    roots.append(span)
            spans.append(span)
            owned[event.number] = span or own_span
    if not events.device_events:
        return roots, list(events.flights)
    lane, flights = [], list(events.flights)
    for kernel in events.device_events:
        if "nccl" in kernel.name.lower():
            flights.append((kernel.start, kernel.end))
            continue
        owner = owned.get(kernel.started_by)
        phase = owner.phase if owner else phase_at(phases, kernel.start)
        lane.append(OperatorSpan(kernel.start, kernel.end, phase, (owner and owner.operator) or kernel.name[:40]))
    return lane, flights


def _parents(events: Sequence[HostEvent]) -> list[int | None]:
    """For each event of a thread, in order of begin, the place of the one around it."""
    parents: list[int | None] = []
    around: list[int] = []
    for place, event in enumerate(events):
        while around and events[around[-1]].end < event.end:
            around.pop()
        while around and events[around[-1]].end <= event.start:
            around.pop()
        parents.append(around[-1] if around else None)
        around.append(place)
    return parents


def segments(events: RankEvents) -> list[tuple[str, float, float]]:
    """The window cut into phases and what lies between them, in order and without gaps."""
    cut, (reached, end) = [], events.window
    for name, start, stop in events.phases:
        start, stop = max(start, reached), min(stop, end)
        if start >= stop:
            continue
        if reached < start:
            cut.append((BETWEEN, reached, start))
        cut.append((name, start, stop))
        reached = stop
    return cut + [(BETWEEN, reached, end)] * (reached < end)


def phase_at(phases: Sequence[tuple[str, float, float]], moment: float) -> str:
    """The phase of a moment, of :func:`segments`."""
    place = bisect.bisect_right(phases, moment, key=lambda phase: phase[1]) - 1
    return phases[place][0] if place >= 0 and moment < phases[place][2] else BETWEEN
