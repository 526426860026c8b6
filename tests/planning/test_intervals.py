"""How sure the planner is: errors that may be used, intervals that hold on those that may not, chances to fit."""

import json

import pytest

from benchmarks import planner
from course_lib.planning import hardware, intervals, models, strategy
from course_lib.planning.intervals import RESERVED, SHARE, around, chance_that_it_fits
from course_lib.planning.memory import RUNTIME


@pytest.fixture(scope="module")
def compared():
    return planner.compare()[0]


def test_the_errors_are_those_of_the_used_sources(compared):
    assert json.loads(planner.ERRORS.read_text(encoding="utf-8")) == planner.used_errors(compared)
    assert sum(map(len, planner.used_errors(compared)["GiB"].values())) == sum(
        row.quantity == "GiB" and not row.held_out for row in compared)


@pytest.mark.parametrize(("quantity", "rows"), [("tokens/s/GPU", 58), ("GiB", 8)])
def test_the_intervals_hold_as_often_as_they_say_in_sources_that_were_held_out(compared, quantity, rows):
    out = [row for row in compared if row.quantity == quantity and row.held_out]
    spans = [intervals.interval(quantity, row.predicted, row.regime) for row in out]
    held = sum(span.low <= row.measured <= span.high for row, span in zip(out, spans, strict=True))
    assert len(out) == rows and 0.75 <= held / rows <= 0.90


def test_an_interval_is_between_known_errors():
    known = sorted(i / 10 for i in range(-4, 5))  # nine: one in ten is below the first, one above the last
    span = around(100.0, known)
    assert (span.low, span.high) == (pytest.approx(100 / 1.4), pytest.approx(100 / 0.6)) and SHARE == 0.8
    assert around(100.0, [0.0]).low == around(100.0, [0.0]).high == 100.0


def test_the_chance_falls_with_what_is_planned_and_is_never_certain():
    capacity = 80 * 2**30
    chances = [chance_that_it_fits(share * (capacity - RUNTIME), capacity, "other")
               for share in (0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.5)]
    assert chances == sorted(chances, reverse=True) and 0 < chances[-1] < 0.05 < 0.95 < chances[0] < 1
    known = intervals.errors("GiB", "other")
    right = sum(0.8 / (1 + error) * reserved <= 1 for error in known for reserved in RESERVED)
    assert chances[3] == pytest.approx((right + 0.5) / (len(known) * len(RESERVED) + 1))


def test_a_plan_that_is_as_fast_and_likelier_to_fit_is_proposed():
    """By the planner's own count FSDP with eight sequences fits, with 69 of 80 GiB; with four it takes 41."""
    found = strategy.search(models.load("facebook/opt-6.7b"), hardware.cluster("A100-80", 8), 2048)
    full = next(candidate for candidate in found.candidates
                if candidate.plan.strategy == "FSDP" and candidate.plan.micro_batch == 8)
    assert full.chance < 0.25 and found.best.chance > 0.9 and full.memory.total > 68 * 2**30
    assert found.best.cost.tokens_per_second == pytest.approx(full.cost.tokens_per_second, rel=1e-3)
    assert "with a chance of" in strategy.explain(found)[0]
