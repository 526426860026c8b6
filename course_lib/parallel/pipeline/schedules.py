"""The tables of the known schedules, for any legal number of ranks, stages per rank and micro-batches.

Most of them are one rule with other numbers (:func:`alternate`): some forwards to warm up, then one forward and one
backward in turn, then the backwards that are left; where the backward is split, the gradients of the weights lag
behind those of the inputs. The two V-shaped ones are written phase by phase in
:mod:`course_lib.parallel.pipeline.v_schedules`.

Sources: GPipe, arXiv 1811.06965; 1F1B (PipeDream-Flush), arXiv 2006.09503; interleaved, arXiv 2104.04473 section
2.2; breadth-first, arXiv 2211.05953; ZB-H1 and ZB-H2, arXiv 2401.10241 section 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from course_lib.errors import ConfigError, nearest
from course_lib.parallel.pipeline.actions import Action, B, F, I, Row, Schedule, W, loop, v_shape
from course_lib.parallel.pipeline.v_schedules import dualpipev, zbv

Part = tuple[int, int]
"""A stage and a micro-batch."""


def alternate(forwards: Sequence[Part], backwards: Sequence[Part], warmup: int, lag: int | None = None) -> Row:
    """One rank's row: ``warmup`` forwards, one forward and one backward in turn, then the other backwards.

    Args:
        forwards: all forwards of the rank, in order.
        backwards: all its backwards, in order; as many.
        warmup: forwards before the first backward's turn comes.
        lag: None: whole backwards. Else each is split, and its gradient of the weights comes when ``lag`` more
            backwards have had theirs of the input.
    """
    # --- warm-up: forwards, until the first gradient can be on its way back ---
    row = [Action(stage, F, microbatch) for stage, microbatch in forwards[:warmup]]
    # --- steady state: one forward, one backward; then, as the forwards are used up, cool-down: backwards alone ---
    for turn, (forward, (stage, microbatch)) in enumerate(zip_longest(forwards[warmup:], backwards)):
        if forward is not None:
            row.append(Action(forward[0], F, forward[1]))
        row.append(Action(stage, B if lag is None else I, microbatch))
        # The gradient of weights of ``lag`` backwards ago, for which nobody waits. So ``lag`` of them are left over, to
        # fill the wait at the end.
        if lag is not None and turn >= lag:
            stage, microbatch = backwards[turn - lag]
            row.append(Action(stage, W, microbatch))
    # --- what is owed: W of the last ``lag`` backwards ---
    row += [Action(stage, W, microbatch) for stage, microbatch in (backwards[-lag:] if lag else ())]
    return tuple(row)


def _gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """All forwards, then all backwards (Huang et al. 2018, section 2.3): warm-up is everything."""
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=microbatches)


def _looped_bfs(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """GPipe with several stages per rank, one after the other for all micro-batches (Lamy-Poirier 2022, section 4)."""
    parts = [(lap * ranks + rank, microbatch) for lap in range(stages_per_rank) for microbatch in range(microbatches)]
    return alternate(parts, parts[::-1], warmup=len(parts))


def _one_f_one_b(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """As many forwards ahead as there are ranks below (PipeDream-flush: Narayanan et al. 2020, arXiv 2006.09503).

    By the time of the last one, micro-batch 0 is on the last rank; then each backward lets one forward in, so that rank
    r of p never holds more than p - r.
    """
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=ranks - 1 - rank)


def _zb_h1(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """1F1B whose gradients of weights lag (Qi et al. 2023, section 2, ZB-H1): a third of the bubble, the same memory.

    Rank r delays r of them: what it holds for these is what its shorter warm-up, p - 1 - r, leaves free.
    """
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=ranks - 1 - rank, lag=rank)


def _zb_h2(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """Twice the warm-up and twice the lag (Qi et al. 2023, section 2, ZB-H2): no bubble, twice the memory."""
    parts = [(rank, microbatch) for microbatch in range(microbatches)]
    return alternate(parts, parts, warmup=2 * (ranks - 1 - rank), lag=2 * rank)


def _laps(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[list[Part], list[Part], int]:
    """Forwards and backwards of a rank by groups of about ``ranks`` micro-batches, and the size of a group.

    A group goes through all the rank's stages before the next one begins, forwards up and backwards down.
    """
    # Rank 0 of 2, 2 stages each, 4 micro-batches: 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3. With ``ranks`` in a group, its first
    # comes back for the second lap just when its last has done the first lap here.
    group = microbatches // groups(ranks, microbatches)
    forwards, backwards = [], []
    for first in range(0, microbatches, group):
        for lap in range(stages_per_rank):
            forwards += [(lap * ranks + rank, first + i) for i in range(group)]
            backwards += [((stages_per_rank - 1 - lap) * ranks + rank, first + i) for i in range(group)]
    return forwards, backwards, group


def groups(ranks: int, microbatches: int) -> int:
    """Into how many equal groups an interleaved schedule must be able to cut its micro-batches."""
    return max(1, microbatches // ranks)


def _interleaved(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """1F1B over v stages per rank: 1/v of the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Ahead are all laps of a group but the last, and as in Megatron-LM two forwards for each rank below: one for the way
    down, one for the way back.
    """
    forwards, backwards, group = _laps(rank, ranks, microbatches, stages_per_rank)
    return alternate(forwards, backwards, warmup=(stages_per_rank - 1) * group + 2 * (ranks - 1 - rank))


def _interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """Interleaved, with the lag and the short warm-up of ZB-H1, as in torch.distributed.pipelining."""
    forwards, backwards, group = _laps(rank, ranks, microbatches, stages_per_rank)
    return alternate(forwards, backwards, warmup=(stages_per_rank - 1) * group + ranks - 1 - rank, lag=rank)


@dataclass(frozen=True)
class ScheduleSpec:
    """Rule that makes one kind of schedule, and what is legal for it.

    Attributes:
        row: writes one rank's row from (rank, ranks, micro-batches, stages per rank).
        place: where the stages live, from (ranks, stages per rank).
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
    "zbv": ScheduleSpec(zbv, v_shape, stages_per_rank=2),
    "dualpipev": ScheduleSpec(dualpipev, v_shape, stages_per_rank=2, paired=True),
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
    # --- phase 1: refuse what has no table ---
    if name not in KINDS:
        raise ConfigError(f"unknown schedule `{name}`", nearest(name, KINDS))
    kind = KINDS[name]
    if stages_per_rank is None:
        stages_per_rank = kind.stages_per_rank or 2
    for what, value in (("ranks", ranks), ("micro-batches", microbatches), ("stages per rank", stages_per_rank)):
        if value < 1:
            raise ConfigError(f"{value} {what}", "take at least 1")
    if problem := illegal(name, ranks, microbatches, stages_per_rank):
        raise ConfigError(*problem)
    # --- phase 2: each rank's row by itself: no generator looks at another rank's ---
    rows = tuple(kind.row(rank, ranks, microbatches, stages_per_rank) for rank in range(ranks))
    overlapped = _pairs(rows) if kind.paired else frozenset()
    return Schedule(name, kind.place(ranks, stages_per_rank), microbatches, rows, overlapped)


def _pairs(rows: tuple[Row, ...]) -> frozenset[Action]:
    """The forwards right before a whole backward; the last rank's first one stays alone, which shortens the bubble."""
    pairs = [[first for first, second in pairwise(row) if (first.kind, second.kind) == (F, B)] for row in rows]
    return frozenset(forward for row in (*pairs[:-1], pairs[-1][1:]) for forward in row)


def illegal(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> tuple[str, str] | None:
    """Numbers that a schedule cannot take, and the rule that says so; None where these are legal."""
    kind = KINDS[name]
    if kind.stages_per_rank not in (None, stages_per_rank):
        return (f"{name} with {stages_per_rank} stages per rank", f"it takes exactly {kind.stages_per_rank}")
    if kind.equal_groups and microbatches % groups(ranks, microbatches):
        return (
            f"{name} with {microbatches} micro-batches on {ranks} ranks",
            f"they must divide into {groups(ranks, microbatches)} equal groups (micro-batches // ranks); "
            f"take a multiple of {ranks}",
        )
    if kind.paired and microbatches < 2 * ranks:
        return (
            f"{name} with {microbatches} micro-batches on {ranks} ranks",
            f"it takes at least as many as stages, {2 * ranks}",
        )
    return None
