"""Measured bubbles: four ranks whose stages sleep wait as long as the simulator says, in every schedule.

In virtual time, which real messages carry from rank to rank: lesson 07 measures the same in real time.
"""

import os
from itertools import count

import pytest

from course_lib.figures.pipeline import idle_share
from course_lib.lessons import pipeline_lab
from course_lib.lessons.pipeline_lab import Measured, least_disturbed, measure
from course_lib.parallel.pipeline.passes import split_backward
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs, Span, simulate
from course_lib.parallel.pipeline.validation import in_flight
from tests.virtual_time import VirtualTime

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

RANKS, MICROBATCHES = 4, 8
COSTS = Costs(forward=36, backward_input=36, backward_weight=36)  # ms
HURRIED = "zb_h1 in the order of 1f1b"


@pytest.fixture(scope="module")
def virtual():
    """Ranks' sleep takes time on the rank's own clock alone, messages carry it, and the launcher sleeps as ever."""
    with pytest.MonkeyPatch.context() as patch:
        virtual = VirtualTime()
        virtual.of_stamps(patch)
        virtual.in_messages(patch)
        patch.setattr(pipeline_lab, "time", virtual.module())
        patch.setattr(pipeline_lab, "dist", virtual.distributed())
        yield virtual


@pytest.fixture(scope="module")
def measured(virtual):
    tables = {name: make(name, RANKS, MICROBATCHES) for name in KINDS}
    return measure(tables | {HURRIED: split_backward(tables["1f1b"])}, COSTS, tries=1)


@pytest.mark.parametrize("name", KINDS)
def test_measured_bubble_is_the_simulators(measured, name):
    assert len(KINDS) == 9
    run = measured[name]
    assert run.predicted == simulate(make(name, RANKS, MICROBATCHES), COSTS)
    assert run.bubble == pytest.approx(float(run.predicted.bubble), abs=1e-9)
    assert run.bubble == pytest.approx(idle_share(run.rows), abs=1e-9), "the figure says the same"


def test_another_order_of_the_same_actions_measures_another_bubble(measured):
    hurried, delayed = measured[HURRIED], measured["zb_h1"]
    some, others = hurried.predicted.schedule.rows, delayed.predicted.schedule.rows
    assert some != others and list(map(sorted, some)) == list(map(sorted, others))
    assert (hurried.bubble, delayed.bubble) == pytest.approx((1 / 5, 1 / 9))


def test_ranks_ran_their_rows_in_order_and_held_what_the_table_says(measured):
    assert len(measured) == 10
    for name, run in measured.items():
        assert [[span.action for span in row] for row in run.rows] == list(map(list, run.predicted.schedule.rows)), name
        assert run.peaks == in_flight(run.predicted.schedule)
        assert min(row[0].start for row in run.rows) == 0
        assert all(before.end <= after.start for row in run.rows for before, after in zip(row, row[1:], strict=False))


def test_a_disturbed_try_is_repeated(virtual, monkeypatch):
    sleeps = count()

    def disturbed(seconds):
        """Each rank's machine is busy in the first pass that is measured: its third sleep takes eight times as long."""
        virtual.sleep(8 * seconds if seconds and next(sleeps) == 2 else seconds)

    monkeypatch.setattr(pipeline_lab, "time", virtual.module(sleep=disturbed))
    table, costs = {"1f1b": make("1f1b", 2, 4)}, Costs(forward=24, backward_input=24, backward_weight=24)
    foreseen = float(simulate(table["1f1b"], costs).bubble)
    assert measure(table, costs, tries=1)["1f1b"].bubble > foreseen + 0.1
    assert measure(table, costs, tries=8)["1f1b"].bubble == pytest.approx(foreseen, abs=1e-9)


def test_a_late_start_is_noticed(virtual, monkeypatch):
    """The last rank of four begins 36 ms late: 3 of 36 forwards and backwards more for all to wait."""
    started = []

    def late(seconds):
        if seconds and not started and os.environ["RANK"] == "3":
            started.append(virtual.sleep(0.036))
        virtual.sleep(seconds)

    monkeypatch.setattr(pipeline_lab, "time", virtual.module(sleep=late))
    run = measure({"1f1b": make("1f1b", RANKS, MICROBATCHES)}, COSTS, tries=1)["1f1b"]
    assert run.makespan == pytest.approx(float(run.predicted.makespan) + 36)


def test_the_try_that_is_kept_is_the_shortest_with_the_bubble_foreseen():
    foreseen = simulate(make("1f1b", 2, 4), Costs(forward=24, backward_input=24, backward_weight=24))
    middle = foreseen.makespan / 2

    def run(longer: float, gap: float) -> Measured:
        """Each pass takes so many times its time; then, half-way, all wait for this share of the step."""
        def moved(at):
            return float(longer * (at + (gap * foreseen.makespan if at >= middle else 0)))
        return Measured(foreseen, tuple(tuple(Span(action, moved(start), moved(end)) if start >= middle or end < middle
                                              else Span(action, moved(end) - float(longer * (end - start)), moved(end))
                                              for action, start, end in row) for row in foreseen.rows), (2, 1))

    slowed, halted, halted_for_long = run(1.1, 0), run(1, 0.08), run(1, 0.2)
    assert slowed.bubble == pytest.approx(float(foreseen.bubble)) and slowed.makespan > halted.makespan
    assert halted.bubble > float(foreseen.bubble) + 0.05
    assert least_disturbed([halted, slowed, run(1.2, 0)]) is slowed
    assert least_disturbed([halted_for_long, halted]) is halted, "none is undisturbed"
