"""The tables of the known schedules, for any legal number of ranks, stages a rank and micro-batches.

Most of them are one rule with other numbers (:func:`alternate`): some forwards to warm up, then one forward and one
backward in turn, then the backwards that are left; where the backward is split, the gradients of the weights lag
behind those of the inputs. The two V-shaped ones are written phase by phase.

Sources: GPipe, arXiv 1811.06965; 1F1B (PipeDream-Flush), arXiv 2006.09503; interleaved, arXiv 2104.04473 section
2.2; breadth-first, arXiv 2211.05953; ZB-H1, ZB-H2 and ZB-V, arXiv 2401.10241 sections 2 and 6; DualPipeV,
deepseek-ai/DualPipe and arXiv 2412.19437 section 3.2.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from course_lib.errors import ConfigError, nearest
from course_lib.parallel.pipeline.actions import Action, B, F, I, Schedule, W, loop, v_shape

Part = tuple[int, int]
"""A stage and a micro-batch."""
Row = tuple[Action, ...]


def alternate(forwards: Sequence[Part], backwards: Sequence[Part], warmup: int, lag: int | None = None) -> Row:
    """One rank's row: ``warmup`` forwards, one forward and one backward in turn, then the other backwards.

    Args:
        forwards: all forwards of the rank, in order.
        backwards: all its backwards, in order; as many.
        warmup: forwards before the first backward's turn comes.
        lag: None: whole backwards. Else each is split, and its gradient of the weights comes when ``lag`` more
            backwards have had theirs of the input.
    """
    row = [Action(stage, F, microbatch) for stage, microbatch in forwards[:warmup]]
    for turn, (forward, (stage, microbatch)) in enumerate(zip_longest(forwards[warmup:], backwards)):
        if forward is not None:
            row.append(Action(forward[0], F, forward[1]))
        row.append(Action(stage, B if lag is None else I, microbatch))
        if lag is not None and turn >= lag:
            stage, microbatch = backwards[turn - lag]
            row.append(Action(stage, W, microbatch))
    row += [Action(stage, W, microbatch) for stage, microbatch in (backwards[-lag:] if lag else ())]
    return tuple(row)


def _gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=microbatches)


def _looped_bfs(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    parts = [(lap * ranks + rank, microbatch) for lap in range(stages_per_rank) for microbatch in range(microbatches)]
    return alternate(parts, parts[::-1], warmup=len(parts))


def _one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=ranks - 1 - rank)


def _zb_h1(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=ranks - 1 - rank, lag=rank)


def _zb_h2(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=2 * (ranks - 1 - rank), lag=2 * rank)


def _laps(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[list[Part], list[Part], int]:
    """Forwards and backwards of a rank by groups of about ``ranks`` micro-batches, and the size of a group.

    A group goes through all the rank's stages before the next one begins, forwards up and backwards down.
    """
    group = microbatches // groups(ranks, microbatches)
    forwards, backwards = [], []
    for first in range(0, microbatches, group):
        for lap in range(stages_per_rank):
            forwards += [(lap * ranks + rank, first + each) for each in range(group)]
            backwards += [((stages_per_rank - 1 - lap) * ranks + rank, first + each) for each in range(group)]
    return forwards, backwards, group


def groups(ranks: int, microbatches: int) -> int:
    """Into how many equal groups an interleaved schedule must be able to cut its micro-batches."""
    return max(1, microbatches // ranks)


def _interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    forwards, backwards, group = _laps(rank, ranks, microbatches, stages_per_rank)
    return alternate(forwards, backwards, warmup=(stages_per_rank - 1) * group + 2 * (ranks - 1 - rank))


def _interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    forwards, backwards, group = _laps(rank, ranks, microbatches, stages_per_rank)
    return alternate(forwards, backwards, warmup=(stages_per_rank - 1) * group + ranks - 1 - rank, lag=rank)


class _RowBuilder:
    """A row under construction: each stage takes its micro-batches in order, forward and backward."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, bool]] = Counter()
        self._owed: list[Action] = []

    def forward(self, stage: int) -> None:
        self._add(stage, F)

    def backward(self, stage: int) -> None:
        self._add(stage, B)

    def input(self, stage: int) -> None:
        """The gradient of the input alone; that of the weights is owed."""
        self._owed.append(Action(stage, W, self._add(stage, I)))

    def weight(self, stage: int | None = None) -> None:
        """The gradient of the weights that has been owed for longest (of one stage, if given), if any is owed."""
        owed = next((action for action in self._owed if stage in (None, action.stage)), None)
        if owed:
            self._owed.remove(owed)
            self.actions.append(owed)

    def _add(self, stage: int, kind: str) -> int:
        microbatch = self._next[stage, kind == F]
        self._next[stage, kind == F] += 1
        self.actions.append(Action(stage, kind, microbatch))
        return microbatch


def _zbv(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """No bubble where F, I and W take equally long, and no more activations than 1F1B."""
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank
    full = max(microbatches, 2 * ranks - 1)  # a pipeline full of micro-batches; the surplus is struck out at the end
    tape = _RowBuilder()
    # warm-up: the first micro-batches go down the V and come up again
    for _ in range(2 * behind - 1):
        tape.forward(down)
    for _ in range(rank):
        tape.forward(up)
        tape.forward(down)
    for _ in range(behind):
        tape.forward(up)
        tape.input(up)
        tape.weight(up)
    # steady state: the rank's two stages in turn
    for turn in range(full - ranks):
        if turn < full - ranks - behind + 1:
            tape.forward(down)
        tape.input(down)
        tape.weight(down)
        tape.forward(up)
        tape.input(up)
        tape.weight(up)
    # cool-down: the gradients that others wait for first, the weights when nothing else is left
    for _ in range(rank):
        tape.input(down)
        tape.input(up)
    for _ in range(behind):
        tape.input(down)
        tape.weight(down)
    for stage in (up, down):
        for _ in range(rank):
            tape.weight(stage)
    return tuple(action for action in tape.actions if action.microbatch < microbatches)


def _dualpipev(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """A forward and a backward of the rank's two stages side by side, which a runtime may overlap."""
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - 1 - rank
    tape = _RowBuilder()
    # warm-up: down the V, then both ways
    for _ in range(2 * behind):
        tape.forward(down)
    for _ in range(rank + 1):
        tape.forward(down)
        tape.forward(up)
    # the first backwards, split so that the stage before gets its gradient early
    for _ in range(behind):
        tape.input(up)
        tape.weight()
        tape.forward(up)
    # steady state: pairs of a forward and a backward of different micro-batches
    for _ in range(microbatches - 2 * ranks + rank + 1):
        tape.forward(down)
        tape.backward(up)
        tape.forward(up)
        tape.backward(down)
    for _ in range(behind):
        tape.backward(up)
        tape.forward(up)
        tape.backward(down)
    # cool-down: the second half of the backwards is split
    for turn in range(2 * (rank + 1)):
        backward = tape.input if turn > rank else tape.backward
        backward(down if turn % 2 else up)
    for _ in range(behind):
        tape.weight()
        tape.input(down)
    for _ in range(rank + 1):
        tape.weight()
    return tuple(tape.actions)


@dataclass(frozen=True)
class ScheduleSpec:
    """How one kind of schedule is made, and what is legal for it.

    Attributes:
        row: writes one rank's row from (rank, ranks, micro-batches, stages a rank).
        place: where the stages live, from (ranks, stages a rank).
        stages_per_rank: the only legal number, or None for any.
        equal_groups: micro-batches must divide into :func:`groups` equal groups.
        paired: forwards may overlap with backwards, and there must be as many micro-batches as stages.
    """

    row: Callable[[int, int, int, int], Row]
    place: Callable[[int, int], tuple[int, ...]] = loop
    stages_per_rank: int | None = 1
    equal_groups: bool = False
    paired: bool = False


KINDS = {
    "gpipe": ScheduleSpec(_gpipe),
    "1f1b": ScheduleSpec(_one_f_one_b),
    "interleaved": ScheduleSpec(_interleaved, stages_per_rank=None, equal_groups=True),
    "looped_bfs": ScheduleSpec(_looped_bfs, stages_per_rank=None),
    "zb_h1": ScheduleSpec(_zb_h1),
    "zb_h2": ScheduleSpec(_zb_h2),
    "interleaved_zero_bubble": ScheduleSpec(_interleaved_zero_bubble, stages_per_rank=None, equal_groups=True),
    "zbv": ScheduleSpec(_zbv, v_shape, stages_per_rank=2),
    "dualpipev": ScheduleSpec(_dualpipev, v_shape, stages_per_rank=2, paired=True),
}


def make(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The table of a schedule, with computations only.

    Args:
        name: a key of :data:`KINDS`.
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        stages_per_rank: None: the number that the schedule prescribes, or 2 where it takes any.

    Raises:
        ConfigError: no such schedule, or numbers that it cannot take; the message says the rule.
    """
    if name not in KINDS:
        raise ConfigError(f"unknown schedule `{name}`", nearest(name, KINDS))
    kind = KINDS[name]
    if stages_per_rank is None:
        stages_per_rank = kind.stages_per_rank or 2
    for what, value in (("ranks", ranks), ("micro-batches", microbatches), ("stages a rank", stages_per_rank)):
        if value < 1:
            raise ConfigError(f"{value} {what}", "take at least 1")
    if problem := illegal(name, ranks, microbatches, stages_per_rank):
        raise ConfigError(*problem)
    rows = tuple(kind.row(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks))
    overlapped = _pairs(rows) if kind.paired else frozenset()
    return Schedule(name, kind.place(ranks, stages_per_rank), microbatches, rows, overlapped)


def _pairs(rows: tuple[Row, ...]) -> frozenset[Action]:
    """The forwards right before a whole backward; the last rank's first one stays alone, which shortens the bubble."""
    pairs = [[first for first, second in pairwise(row) if (first.kind, second.kind) == (F, B)] for row in rows]
    return frozenset(forward for row in (*pairs[:-1], pairs[-1][1:]) for forward in row)


def illegal(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[str, str] | None:
    """What a schedule cannot take and the rule that says so, or None where these numbers are legal."""
    kind = KINDS[name]
    if kind.stages_per_rank not in (None, stages_per_rank):
        return (f"{name} with {stages_per_rank} stages a rank", f"it takes exactly {kind.stages_per_rank}")
    if kind.equal_groups and microbatches % groups(ranks, microbatches):
        return (f"{name} with {microbatches} micro-batches on {ranks} ranks",
                f"they must divide into {groups(ranks, microbatches)} equal groups (micro-batches // ranks); "
                f"take a multiple of {ranks}")
    if kind.paired and microbatches < 2 * ranks:
        return (f"{name} with {microbatches} micro-batches on {ranks} ranks",
                f"it takes at least as many as stages, {2 * ranks}")
    return None
