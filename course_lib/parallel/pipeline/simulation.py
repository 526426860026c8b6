"""Simulation of a table: when each action runs, how long ranks wait, and how many bytes they hold.

A rank runs its row in order; an action starts as soon as the rank is free and its input is there. A message takes
its time between two ranks and keeps neither busy. Times and bytes are exact: with ints and Fractions nothing is
ever rounded, so that a bubble can be compared with its formula by ``==``. A float is taken for the number that it
prints as: 0.1 is one tenth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import lcm
from typing import NamedTuple

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import COMPUTE, Action, B, F, I, Schedule, W
from course_lib.parallel.pipeline.passes import waiting

Number = int | float | Fraction


def exact(value: Number) -> Fraction:
    """The number that a value prints as."""
    return Fraction(str(value)) if isinstance(value, float) else Fraction(value)


@dataclass(frozen=True)
class Costs:
    """Cost of one micro-batch in one stage: one number for all stages, or one for each.

    Attributes:
        forward: time of F.
        backward_input: time of I, the gradient of the input (T_B in the zero-bubble paper).
        backward_weight: time of W, the gradient of the weights. B, the whole backward, takes the sum of the two.
        latency: time from the end of an action on one rank until its output can be used on another.
        activation: bytes held from the start of F to the end of I or B.
        kept: of these, the bytes that W needs too, held until its end where the backward is split; None: all.
        pair: time of a forward and a whole backward that overlap (DualPipeV); None: one runs after the other.
    """

    forward: Number | Sequence[Number] = 1
    backward_input: Number | Sequence[Number] = 1
    backward_weight: Number | Sequence[Number] = 1
    latency: Number = 0
    activation: Number | Sequence[Number] = 1
    kept: Number | Sequence[Number] | None = None
    pair: Number | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            for cost in value if isinstance(value, Sequence) else (value,):
                if not (isinstance(cost, Number) and 0 <= cost < float("inf")):
                    raise ConfigError(f"cost `{field.name}` is {cost}", "take a number from 0 on")
        if isinstance(self.kept, Number) and isinstance(self.activation, Number) and self.kept > self.activation:
            raise ConfigError(f"cost `kept` is {self.kept}", f"it is a part of `activation`, {self.activation}")

    def of(self, name: str, stages: int) -> list[Fraction]:
        """A cost by stage, exactly.

        Raises:
            ConfigError: it is given for another number of stages.
        """
        value = getattr(self, name)
        if name == "kept" and value is None:
            value = self.activation
        if not isinstance(value, Sequence):
            return [exact(value)] * stages
        if len(value) != stages:
            raise ConfigError(
                f"cost `{name}` is given for {len(value)} stages, and the table has {stages}",
                "give one number, or one for each stage",
            )
        return [exact(cost) for cost in value]


class Span(NamedTuple):
    """An action and when it ran: exact where simulated, seconds or the like as floats where measured."""

    action: Action
    start: Fraction | float
    end: Fraction | float


@dataclass(frozen=True)
class Timeline:
    """Time line of a table: when each action runs, and what each rank holds; time 0 is the start of the first action.

    Attributes:
        schedule: the table.
        rows: for each rank its actions with their times, in order.
        busy: for each rank the time in which it computes.
        peak_activations: for each rank the most held at once, in the unit of the cost ``activation``: micro-batches
            where that is 1.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]
    busy: tuple[Fraction, ...]
    peak_activations: tuple[Fraction, ...]

    @cached_property
    def makespan(self) -> Fraction:
        """From the first action's start to the last one's end."""
        return Fraction(max(row[-1].end for row in self.rows))

    @property
    def bubble(self) -> Fraction:
        """The share of all ranks' time, from first start to last end, in which they do not compute."""
        return 1 - sum(self.busy) / (self.makespan * len(self.rows)) if self.makespan else Fraction(0)

    @property
    def stage_bubble(self) -> Fraction:
        """The zero-bubble paper's bubble rate: the idle share of the rank whose own first-to-last time is longest.

        It differs from :attr:`bubble` where ranks that began late may end late, as in ZB-H2: the next step then
        begins as late, and nothing is lost.
        """
        rank, longest = max(enumerate(row[-1].end - row[0].start for row in self.rows), key=lambda pair: pair[1])
        return 1 - self.busy[rank] / Fraction(longest) if longest else Fraction(0)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a table on paper.

    Args:
        schedule: the table; its sends and receives, if it has any, are those that the stages imply.
        costs: None: F, I and W take 1 each, B takes 2, messages take no time, an activation 1 byte.

    Raises:
        ConfigError: the table waits for itself, or costs are given for another number of stages.
    """
    costs = costs or Costs()
    # --- phase 1: run the table in whole ticks: comparing Fractions would take most of the time ---
    scale, length, latency = ticks(costs, schedule.stages)
    rows = _run(schedule, length, latency, None if costs.pair is None else int(exact(costs.pair) * scale))
    # --- phase 2: ticks back to times, each made once ---
    moments = {tick: Fraction(tick, scale) for tick in {tick for row in rows for span in row for tick in span[1:]}}
    timed = tuple(tuple(Span(action, moments[start], moments[end]) for action, start, end in row) for row in rows)
    # --- phase 3: what is read off: how long each rank computes, and how much it holds ---
    busy = tuple(Fraction(_covered(row), scale) for row in rows)
    return Timeline(schedule, timed, busy, _peak_activations(schedule, costs))


def ticks(costs: Costs, stages: int) -> tuple[int, dict[tuple[int, str], int], int]:
    """All times as whole numbers of one small unit: units per 1, length by (stage, kind), length of a message."""
    forward, backward, weight = (costs.of(name, stages) for name in ("forward", "backward_input", "backward_weight"))
    latency = exact(costs.latency)
    # The least unit in which all of them are whole: for 1, 1/2 and 0.1 it is a tenth of 1.
    scale = lcm(*(time.denominator for time in (*forward, *backward, *weight, latency, exact(costs.pair or 0))))
    length: dict[tuple[int, str], int] = {}
    for stage in range(stages):
        # F and B as the field counts them: B is both parts, 2 if all three take 1.
        times = {F: forward[stage], B: backward[stage] + weight[stage], I: backward[stage], W: weight[stage]}
        length |= {(stage, kind): int(time * scale) for kind, time in times.items()}
    return scale, length, int(latency * scale)


def _run(
    schedule: Schedule,
    length: dict[tuple[int, str], int],
    latency: int,
    pair: int | None,
) -> list[list[tuple[Action, int, int]]]:
    """Start and end of each computation, by rank.

    A rank goes on until it misses an input; who makes that input wakes it. So each action is looked at once or twice,
    however many ranks there are.
    """
    rows = [_steps(schedule, row, pair is not None) for row in schedule.rows]
    timed: list[list[tuple[Action, int, int]]] = [[] for _ in rows]
    clock, position = [0] * len(rows), [0] * len(rows)  # when each rank is free, and where it is in its row
    made: dict[tuple[int, str, int], int] = {}  # when an output came into being, by (stage, F or B, micro-batch)
    asleep: dict[tuple[int, str, int], int] = {}  # the rank that waits for such an output
    awake = list(range(len(rows)))
    while awake:
        rank = awake.pop()
        while position[rank] < len(rows[rank]):
            step = rows[rank][position[rank]]
            # --- start: when the rank is free and the inputs are there; those from another rank come with a latency ---
            start = clock[rank]
            missing = None
            for action in step:
                source = schedule.source(action)
                if source is not None:
                    arrival = made.get((*source, action.microbatch))
                    if arrival is None:
                        missing = (*source, action.microbatch)
                        break
                    start = max(start, arrival + latency * (schedule.stage_ranks[source[0]] != rank))
            if missing:  # one rank at most waits for an output: its stage's next one
                asleep[missing] = rank
                break
            # --- end: an output that somebody waits for wakes that rank. A pair ends both at once ---
            end = start + (length[step[0].stage, step[0].kind] if len(step) == 1 or pair is None else pair)
            clock[rank] = end
            position[rank] += 1
            for action in step:
                timed[rank].append((action, start, end))
                if action.kind != W:  # whose output nobody waits for
                    key = (action.stage, F if action.kind == F else B, action.microbatch)
                    made[key] = end
                    if key in asleep:
                        awake.append(asleep.pop(key))
    if asleep:
        heads = {rank: rows[rank][position[rank]][0] for rank in sorted(asleep.values())}
        raise ConfigError(
            f"{schedule.name} waits for itself: {waiting(schedule, heads)}", "put what is waited for earlier"
        )
    return timed


def _steps(schedule: Schedule, row: tuple[Action, ...], overlap: bool) -> list[tuple[Action, ...]]:
    """The computations of a row, pairs that overlap together."""
    steps: list[tuple[Action, ...]] = []
    for action in row:
        if overlap and steps and steps[-1][-1] in schedule.overlapped and action.kind == B:
            steps[-1] += (action,)
        elif action.kind in COMPUTE:
            steps.append((action,))
    return steps


def _covered(row: list[tuple[Action, int, int]]) -> int:
    """Ticks in which a rank computes; while two actions overlap, time passes once."""
    covered = clock = 0
    for _, start, end in row:
        covered += end - max(start, clock)
        clock = end
    return covered


def _peak_activations(schedule: Schedule, costs: Costs) -> tuple[Fraction, ...]:
    """The most that each rank holds: F takes them, B gives them back, I a part and W the rest."""
    activation, kept = (costs.of(cost, schedule.stages) for cost in ("activation", "kept"))
    unit = lcm(*(size.denominator for size in (*activation, *kept)))
    change = {
        (stage, kind): int(unit * size)
        for stage in range(schedule.stages)
        for kind, size in (
            (F, activation[stage]),
            (B, -activation[stage]),
            (I, kept[stage] - activation[stage]),
            (W, -kept[stage]),
        )
    }
    # In the order of the row: no time is needed, a rank does one thing after the other.
    changes_by_rank = ((change[stage, kind] for stage, kind, _ in row if kind in COMPUTE) for row in schedule.rows)
    return tuple(Fraction(max(accumulate(changes)), unit) for changes in changes_by_rank)
