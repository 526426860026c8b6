"""Wait of a pipeline rank in a step: by the schedule's formula where it holds, else by the simulator."""

from fractions import Fraction
from functools import lru_cache

from course_lib.parallel.pipeline.formulas import bubble_time
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.planning.plan import Plan

PARTS = 120
"""Into so many equal parts a micro-batch's time on a stage is cut, for exact and cheap arithmetic."""
ROUNDS = 4
"""Of as many micro-batches as there are stages: what is simulated. A step with more waits no longer."""


def bubble_seconds(plan: Plan, forward: float, backward: float, weight: float) -> float:
    """Seconds that a rank waits in a step.

    Args:
        plan: schedule, ranks, micro-batches and stages per rank.
        forward: seconds of one micro-batch's forward on one rank, all its stages.
        backward: of its backward except for what can be put off, what is recomputed included.
        weight: of the weight gradients, which zero-bubble schedules put off.
    """
    total = forward + backward + weight
    if plan.pipeline == 1 or not total:
        return 0.0
    stages = 2 if plan.schedule == "zbv" else plan.virtual
    shares = [round(PARTS * part / total) for part in (forward, weight)]
    waits = _waits(plan.schedule, plan.pipeline, plan.accumulation, stages, *shares)
    return float(waits) * total / stages / PARTS


@lru_cache(maxsize=4096)
def _waits(name: str, ranks: int, microbatches: int, stages: int, forward: int, weight: int) -> Fraction:
    """The wait in parts, of which a micro-batch takes PARTS on each stage.

    Raises:
        ConfigError: a schedule that is not made for so many micro-batches.
    """
    costs = Costs(forward=forward, backward_input=PARTS - forward - weight, backward_weight=weight)
    if (formula := bubble_time(name, ranks, microbatches, costs)) is not None:
        return formula
    # More rounds of micro-batches lengthen what all ranks do at the same pace, not how it begins and ends.
    few = min(microbatches, ROUNDS * stages * ranks + microbatches % ranks)
    timeline = simulate(make(name, ranks, few, stages), costs)
    if name in ("zb_h2", "zbv"):  # whose ranks end as late as they began
        share = timeline.stage_bubble
        busy = max(timeline.busy)
        return busy * share / (1 - share)
    return timeline.makespan * timeline.bubble
