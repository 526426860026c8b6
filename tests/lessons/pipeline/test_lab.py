"""Measured bubbles: four ranks whose stages sleep wait as long as the simulator says, in every schedule.

In virtual time, which real messages carry from rank to rank: lesson 07 measures the same in real time.
"""

import dataclasses
import os
from itertools import count

import pytest

from course_lib.errors import ConfigError
from course_lib.lessons.pipeline import lab as pipeline_lab
from course_lib.lessons.pipeline.figures import idle_share
from course_lib.lessons.pipeline.lab import measure
from course_lib.parallel.pipeline.fitted.search import search
from course_lib.parallel.pipeline.passes import split_backward
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import in_flight
from tests.virtual_time import VirtualTime

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


def test_every_try_is_kept_and_none_is_chosen_by_the_prediction(virtual, monkeypatch):
    """In turns: a machine that is busy in the first try of one table leaves the other tries as they are."""
    sleeps = count()

    def disturbed(seconds):
        """Each rank's machine is busy in the first pass that is measured: its third sleep takes eight times as long."""
        virtual.sleep(8 * seconds if seconds and next(sleeps) == 2 else seconds)

    monkeypatch.setattr(pipeline_lab, "time", virtual.module(sleep=disturbed))
    tables, costs = {name: make(name, 2, 4) for name in ("1f1b", "gpipe")}, Costs(24, 24, 24)
    runs = measure(tables, costs, tries=3)
    assert [len(run.tries) for run in runs.values()] == [3, 3], "also of the table whose first try is as foreseen"
    (busy, *quiet), foreseen = runs["1f1b"].bubbles, float(simulate(tables["1f1b"], costs).bubble)
    assert busy > foreseen + 0.1 and quiet == pytest.approx([foreseen] * 2, abs=1e-9)
    assert runs["gpipe"].bubbles == pytest.approx([foreseen] * 3, abs=1e-9)
    run = runs["1f1b"]
    assert run.bubble == sorted(run.bubbles)[1] == pytest.approx(idle_share(run.rows), abs=1e-9)
    other = dataclasses.replace(run, predicted=simulate(tables["1f1b"], Costs(1, 20, 1)))
    assert (other.bubble, other.rows, other.makespan) == (run.bubble, run.rows, run.makespan)


@pytest.mark.parametrize("tries", (0, 4))
def test_a_number_of_tries_without_a_middle_is_refused(tries):
    with pytest.raises(ConfigError, match=f"tries={tries}: an odd number"):
        measure({"1f1b": make("1f1b", 2, 4)}, COSTS, tries=tries)


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


def test_what_lesson_07_asks_to_try_comes_out_as_it_says():
    """W twice as long as I: ZB-H1's lead grows, a fitted table finds nothing better, ZB-V loses."""

    def bubbles(costs):
        found = search(RANKS, [MICROBATCHES], costs, names=["1f1b", "zb_h1", "zb_auto", "zbv"])
        return {candidate.name: candidate.timeline.bubble for candidate in found}

    even, heavy = bubbles(Costs(1, 1, 1)), bubbles(Costs(1, 1, 2))
    assert even["1f1b"] - even["zb_h1"] < heavy["1f1b"] - heavy["zb_h1"]
    assert even["1f1b"] == heavy["1f1b"] and heavy["zb_auto"] == heavy["zb_h1"]
    assert even["zbv"] < heavy["zbv"] < heavy["zb_h1"]
