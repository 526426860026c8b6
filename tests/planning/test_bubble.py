"""Bubbles of the cost model: those of the project's own simulator, also where no formula holds."""

import pytest

from course_lib.parallel.pipeline.schedules import illegal, make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.planning.bubble import bubble_seconds
from course_lib.planning.plan import Plan

STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1, "zb_h2": 1, "zbv": 2}
LENGTHS = [(1, 1, 1), (2, 3, 2), (1, 3, 1), (4, 4, 5)]


def waits(schedule, ranks, microbatches, lengths):
    """What the planner says a rank waits, where F, I and W of one micro-batch on a stage take ``lengths``."""
    stages = STAGES[schedule]
    fields = {"schedule": schedule, "virtual": 1 if schedule == "zbv" else stages}
    plan = Plan(128, engine="megatron", pipeline=ranks, accumulation=microbatches, **fields)
    return bubble_seconds(plan, *(stages * length for length in lengths))


@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_is_the_simulators(schedule, lengths):
    """Fewer micro-batches than ranks, between one and two times as many, and many."""
    forward, backward, weight = lengths
    looked = 0
    for ranks in (2, 3, 4, 8):
        for microbatches in (1, 2, 3, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 6 * ranks, 20 * ranks):
            if illegal(schedule, ranks, microbatches, STAGES[schedule]):
                continue
            costs = Costs(forward=forward, backward_input=backward, backward_weight=weight)
            timeline = simulate(make(schedule, ranks, microbatches, STAGES[schedule]), costs)
            if schedule in ("zb_h2", "zbv"):
                right = max(timeline.busy) / (1 - timeline.stage_bubble) - max(timeline.busy)
            else:
                right = timeline.makespan - max(timeline.busy)
            most = 0.03 * ranks * sum(lengths) * STAGES[schedule]
            found = waits(schedule, ranks, microbatches, lengths)
            assert found == pytest.approx(float(right), abs=most), (ranks, microbatches)
            looked += 1
    assert looked >= 12


def test_the_published_formula_is_not_used_where_it_does_not_hold():
    """ZB-H2 with fewer micro-batches than ranks: by (p - 1)(F + I - 2 W) nobody would wait at all."""
    assert waits("zb_h2", 8, 4, (1, 1, 1)) > 5
    assert waits("zbv", 8, 8, (1, 1, 1)) > 0 and waits("zbv", 8, 16, (1, 1, 1)) == 0


def test_one_rank_waits_for_nobody():
    assert bubble_seconds(Plan(128), 1.0, 1.0, 1.0) == 0
