"""The simulator against closed formulas, in exact arithmetic; its rules, its memory, and the fitted tables."""

import contextlib
import re
from fractions import Fraction
from itertools import product

import pytest

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import B, F, Schedule
from course_lib.parallel.pipeline.fitted import building_blocks, zero_bubble
from course_lib.parallel.pipeline.formulas import bubble_time
from course_lib.parallel.pipeline.passes import lower
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs, exact, simulate
from course_lib.parallel.pipeline.validation import check, in_flight

LENGTHS = [(1, 1, 1), (3, 2, 1), (2, 3, 1), (10, 10, 7), (5, 6, 4)]
"""Of F, I and W."""
MORE_LENGTHS = [*LENGTHS, (Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)), (0.1, 0.2, 0.1)]


def wait(timeline):
    """How long the rank waits that takes longest, from its own first action to its last."""
    return Fraction(max(row[-1].end - row[0].start for row in timeline.rows)) * timeline.stage_bubble


@pytest.mark.parametrize("name", KINDS)
def test_the_formula_holds_wherever_there_is_one(name):
    compared = 0
    lengths_of_all = [*MORE_LENGTHS, (1, 1, 2), (7, 5, 6), (4, 1, 1)]
    for ranks, microbatches, lengths, stages in product(range(1, 6), range(1, 13), lengths_of_all, (1, 2, 3)):
        costs = Costs(*lengths, pair=sum(map(exact, lengths)))
        with contextlib.suppress(ConfigError):  # a size that the schedule does not take
            table = make(name, ranks, microbatches, stages)
            expected = bubble_time(name, ranks, microbatches, costs)
            if expected is None:
                continue
            timeline = simulate(table, costs)
            if name in ("zb_h2", "zbv"):
                assert wait(timeline) == expected
            elif name == "dualpipev":
                assert timeline.makespan - timeline.busy[-1] == expected
            else:
                assert timeline.makespan * timeline.bubble == expected
            compared += 1
    assert compared >= (30 if name in ("zbv", "dualpipev") else 200)


def test_where_the_formula_does_not_hold_there_is_none():
    assert bubble_time("zb_h1", 4, 3, Costs()) is None and bubble_time("zb_h1", 4, 8, Costs(1, 1, 2)) is None
    assert bubble_time("zbv", 4, 8, Costs(2, 1, 1)) is None and bubble_time("v_half", 4, 8, Costs()) is None
    table = simulate(make("zb_h1", 4, 3))
    assert table.makespan * table.bubble != 3


def test_a_time_line_keeps_every_rule():
    costs = Costs([3, 1, 4, 1], [1, 5, 9, 2], [6, 5, 3, 5], latency=Fraction(1, 2))
    table = make("zb_h2", 4, 9)
    timeline = simulate(table, costs)
    ends = {
        (span.action.stage, F if span.action.kind == F else B, span.action.microbatch): span.end
        for row in timeline.rows
        for span in row
        if span.action.kind != "W"
    }
    for row, actions in zip(timeline.rows, table.rows, strict=True):
        assert tuple(span.action for span in row) == actions
        for before, span in zip((None, *row), row, strict=False):
            source = table.source(span.action)
            ready = ends[(*source, span.action.microbatch)] + costs.latency if source else Fraction(0)
            free = before.end if before else Fraction(0)
            assert span.start == max(ready, free)


def test_sends_and_receives_in_the_table_change_nothing():
    table = make("zbv", 3, 6)
    assert simulate(lower(table), Costs(latency=2)).rows == simulate(table, Costs(latency=2)).rows


def test_memory_is_what_the_table_holds():
    for name in KINDS:
        table = make(name, 4, 8)
        assert simulate(table).peak_activations == in_flight(table)
    assert simulate(make("zb_h1", 4, 8), Costs(activation=1, kept=0)).peak_activations == (4, 3, 2, 1)
    unequal = simulate(make("1f1b", 3, 6), Costs(activation=[10, 1, Fraction(1, 2)]))
    assert unequal.peak_activations == (30, 2, Fraction(1, 2))


def test_overlapped_pairs_take_the_time_of_a_pair():
    table = make("dualpipev", 4, 8)
    apart, together = simulate(table), simulate(table, Costs(pair=2))
    assert together.makespan < apart.makespan
    pairs = [span for row in together.rows for span in row if span.action in table.overlapped]
    assert {span.end - span.start for span in pairs} == {2} and len(pairs) == len(table.overlapped)
    assert sum(together.busy) == sum(apart.busy) - len(pairs)
    assert simulate(make("1f1b", 4, 8), Costs(pair=2)).rows == simulate(make("1f1b", 4, 8)).rows


@pytest.mark.parametrize(
    ("make_costs", "message"),
    [
        (lambda: Costs(-1), "cost `forward` is -1: take a number from 0 on"),
        (lambda: Costs(backward_weight=[1, float("nan")]), "cost `backward_weight` is nan"),
        (lambda: Costs(latency=float("inf")), "cost `latency` is inf"),
        (lambda: Costs(activation=(1, -2)), "cost `activation` is -2"),
        (lambda: simulate(make("1f1b", 4, 4), Costs([1, 2])), "`forward` is given for 2 stages, and the table has 4"),
    ],
)
def test_bad_costs_are_refused(make_costs, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_costs()


def test_a_table_that_waits_for_itself_is_refused():
    table = make("1f1b", 2, 2)
    with pytest.raises(ConfigError, match="1f1b waits for itself: rank 0 in 0B0 for 1B0, rank 1 in 1F0 for 0F0"):
        simulate(Schedule("1f1b", (0, 1), 2, (table.rows[0][2:], table.rows[1])))


def test_fitted_tables_are_proved_for_many_sizes_and_lengths():
    for ranks, microbatches, lengths in product(range(1, 6), (1, 2, 5, 10), LENGTHS):
        costs = Costs(*lengths, latency=1, activation=8, kept=3)
        tables = [zero_bubble.fit(ranks, microbatches, costs, factor * ranks * 8) for factor in (1, 2)]
        tables += [building_blocks.repeat(name, ranks, microbatches, costs) for name in building_blocks.BLOCKS]
        if microbatches >= 2 * ranks:
            tables.append(zero_bubble.fit_v(ranks, microbatches, costs))
        for table in tables:
            check(table)
        assert max(simulate(tables[0], costs).peak_activations) <= ranks * 8


@pytest.mark.parametrize(
    ("fit", "told"),
    [
        (lambda: zero_bubble.fit(4, 8, Costs(), Fraction(1, 2)), "rank 0 cannot hold another activation"),
        (lambda: zero_bubble.fit_v(4, 8, Costs(), 1), "cannot hold another activation"),
        (lambda: zero_bubble.fit_v(4, 7, Costs()), "a fitted ZB-V with 7 micro-batches on 4 ranks: it takes at least"),
    ],
)
def test_what_nothing_fits_is_refused(fit, told):
    with pytest.raises(ConfigError, match=told):
        fit()
