"""Search for a schedule and a number of micro-batches: every legal table is simulated, the fastest that fits wins.

A rank holds the same layers whatever the schedule: with two stages per rank, each stage costs half. So costs are given
for a rank, and :func:`stage_costs` divides them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from course_lib.errors import ConfigError, nearest
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.fitted import building_blocks, zero_bubble
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs, Number, Timeline, exact, simulate

FITTED = {"zb_auto": 1, "zbv_auto": 2, "v_half": 2, "v_min": 2}
"""The tables that depend on the costs, and their stages per rank; the first two also depend on the memory limit."""
NAMES = (*KINDS, *FITTED)


@dataclass(frozen=True)
class ScheduleCandidate:
    """A table that was looked at.

    Attributes:
        name: the schedule.
        microbatches: micro-batches of one step.
        stages_per_rank: stages of each rank.
        timeline: what the simulator says; None where there is no such table.
        problem: why it cannot be taken; empty where it can.
        sample_time: time of a step, from first start to last end, for each micro-batch's worth of samples.
    """

    name: str
    microbatches: int
    stages_per_rank: int
    timeline: Timeline | None
    problem: str = ""
    sample_time: Fraction = Fraction(0)


def stages_for(name: str, wanted: int | None = None) -> int:
    """Stages a rank of a schedule: those it prescribes, or those wanted, or 2.

    Raises:
        ConfigError: no such schedule, or it cannot take the number wanted.
    """
    if name not in NAMES:
        raise ConfigError(f"unknown schedule `{name}`", nearest(name, NAMES))
    if wanted is not None and wanted < 1:
        raise ConfigError(f"{wanted} stages per rank", "take at least 1")
    only = FITTED[name] if name in FITTED else KINDS[name].stages_per_rank
    if only and wanted not in (None, only):
        raise ConfigError(f"{name} with {wanted} stages per rank", f"it takes exactly {only}")
    return only or wanted or 2


def stage_costs(costs: Costs, stages_per_rank: int, size: Number = 1, overhead: Number = 0) -> Costs:
    """The costs of one stage, from those of a rank.

    Args:
        costs: of one micro-batch in all stages of a rank, uniform.
        stages_per_rank: into how many stages the rank's layers are cut.
        size: of a micro-batch, where the costs are those of size 1.
        overhead: what each action takes besides, however small it is.
    """
    part = exact(size) / stages_per_rank
    forward, backward, weight, activation, kept = (
        costs.of(cost, 1)[0] * part for cost in ("forward", "backward_input", "backward_weight", "activation", "kept")
    )
    more = exact(overhead)
    return Costs(
        forward + more,
        backward + more,
        weight + more,
        exact(costs.latency) * exact(size),
        activation,
        kept,
        None if costs.pair is None else exact(costs.pair) * part + more,
    )


def build(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs, limit: Number | None = None
) -> Schedule:
    """A table by name.

    Args:
        name: one of :data:`NAMES`.
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        stages_per_rank: stages of each rank, see :func:`stages_for`.
        costs: of one micro-batch in one stage; they shape a fitted table.
        limit: bytes that a rank may hold, for a fitted table; None: 2p activations of a rank for zb_auto, p for the V.

    Raises:
        ConfigError: no such schedule, or these numbers do not allow it.
    """
    stages_for(name, stages_per_rank)
    if name in KINDS:
        return make(name, ranks, microbatches, stages_per_rank)
    if min(ranks, microbatches) < 1:
        raise ConfigError(f"{ranks} ranks and {microbatches} micro-batches", "take at least 1 of each")
    if name == "zb_auto":
        plenty = 2 * ranks * costs.of("activation", 1)[0]
        return zero_bubble.fit(ranks, microbatches, costs, plenty if limit is None else limit)
    if name == "zbv_auto":
        return zero_bubble.fit_v(ranks, microbatches, costs, limit)
    return building_blocks.repeat(name, ranks, microbatches, costs)


def uniform(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """A table by name for F, I and W of equal length, drawn or fitted: what a trainer runs before it has measured.

    Raises:
        ConfigError: no such schedule, or these numbers do not allow it.
    """
    stages = stages_for(name, stages_per_rank)
    return build(name, ranks, microbatches, stages, stage_costs(Costs(), stages))


def search(
    ranks: int,
    microbatches: Sequence[int],
    costs: Costs,
    limit: Number | None = None,
    stages_per_rank: Sequence[int] = (2,),
    names: Sequence[str] = NAMES,
    measured_at: int | None = None,
    overhead: Number = 0,
) -> list[ScheduleCandidate]:
    """Simulate every table, and rank them: those that fit, the fastest first (of equals the one that
    holds least), then those that do not, and why.

    Args:
        ranks: ranks of the pipeline.
        microbatches: the numbers of micro-batches to try.
        costs: of one micro-batch in all stages of a rank, uniform.
        limit: bytes that a rank may hold; None: no limit.
        stages_per_rank: numbers to try where a schedule takes any.
        names: the schedules to try.
        measured_at: None: a micro-batch stays as it is, and more of them are a larger global batch. Else the global
            batch stays as it is, and the costs are those of a micro-batch when it is cut into this many.
        overhead: what each action takes besides, however small the micro-batch: without it, more are always better.

    Raises:
        ConfigError: an unknown schedule, or less than 1 of anything.
    """
    for what, least in (("ranks", ranks), ("micro-batches", min(microbatches)), ("micro-batches", measured_at or 1)):
        if least < 1:
            raise ConfigError(f"{least} {what}", "take at least 1")
    candidates = []
    for count in microbatches:
        # --- a micro-batch's size, as a share of the measured one: the same batch in twice as many is half as large ---
        size = Fraction(measured_at, count) if measured_at else Fraction(1)
        for name in names:
            free = stages_per_rank if name in KINDS and KINDS[name].stages_per_rank is None else (None,)
            for stages in (stages_for(name, wanted) for wanted in free):
                stage = stage_costs(costs, stages, size, overhead)
                candidates.append(_examine(name, ranks, count, stages, stage, limit, size))
    # --- those that fit, the fastest first; those that hold too much; those that there are not ---
    return sorted(
        candidates,
        key=lambda candidate: (
            bool(candidate.problem),
            candidate.timeline is None,
            candidate.sample_time,
            max(candidate.timeline.peak_activations) if candidate.timeline else 0,
        ),
    )


def _examine(
    name: str, ranks: int, microbatches: int, stages_per_rank: int, costs: Costs, limit: Number | None, size: Fraction
) -> ScheduleCandidate:
    try:
        timeline = simulate(build(name, ranks, microbatches, stages_per_rank, costs, limit), costs)
    except ConfigError as error:
        return ScheduleCandidate(name, microbatches, stages_per_rank, None, str(error))
    peak = max(timeline.peak_activations)
    problem = ""
    if limit is not None and peak > exact(limit):
        rank = timeline.peak_activations.index(peak)
        problem = f"rank {rank} holds {float(peak):g} > {float(limit):g}"
    return ScheduleCandidate(
        name, microbatches, stages_per_rank, timeline, problem, timeline.makespan / (microbatches * size)
    )
