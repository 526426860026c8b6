"""What lesson 11 claims, measured anew, in a network that has nothing but loopback: nothing tries to leave it."""

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from course_lib.cli import main
from course_lib.launching.netns import in_own_network
from course_lib.lessons.tracking import lab
from course_lib.tracking.base import RunInfo
from course_lib.tracking.jsonl import JsonLinesTracker
from tests.forked_process import wandb_imported
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.notebooks.conftest import assert_quoted, execute, says

STEPS, SEEDS, ROWS = 20, 2, 120
PARAMETERS = {"world_size": 2, "steps": STEPS, "seeds": SEEDS, "sweep_steps": 16, "scored_rows": ROWS}


def alone(folder):
    """Recorded values of a run of the lesson, and how many connections and packets had no way to go."""
    os.environ["HOME"] = str(folder)
    before = lab.without_a_route()
    values = execute("11_wandb", folder, **PARAMETERS)
    return values, lab.without_a_route() - before


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with wandb_imported():
        return in_own_network(alone, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def lesson(ran):
    return ran[0]


def attempts_of_launching() -> int:
    """Of ranks that do nothing, launched as often as in the lesson."""
    before = lab.without_a_route()
    program = "from course_lib.launching.launch import launch\nfor _ in range(3): launch(print, device='cpu')"
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=400)
    return lab.without_a_route() - before


def test_the_lesson_tries_to_reach_nothing_but_loopback(ran):
    """The kernel's counter sees a single knock, and none of a tracked run.

    In the whole lesson it sees no more than where ranks are launched that do nothing: torch's store then asks the name
    server for the name of the loopback address, unless /etc/hosts has it as IPv6 too.
    """
    before, after = in_own_network(lambda: (lab.without_a_route(), lab.knock() or lab.without_a_route()))
    assert (before, after) == (0, 1)
    values, attempts = ran
    assert attempts <= in_own_network(attempts_of_launching)
    assert (values["attempts_of_a_knock"], values["attempts_of_a_tracked_run"]) == (1, 0)


def test_three_trackers_keep_the_numbers_that_the_formula_gives(lesson):
    rows = STEPS // 5
    assert lesson["numbers_kept"] == 7 * rows + 5 * 2 * math.ceil(rows / 2) + 21


def test_it_says_what_a_row_and_a_slow_tracker_cost(lesson):
    assert min(lesson[f"{way}_in_the_step"] for way in ("jsonl", "wandb")) > 0
    assert says(
        lesson,
        f"A row cost {lesson['wandb_in_the_step']:.2f} ms with W&B in the step, "
        f"{lesson['wandb_handed_over']:.3f} ms handed over.",
    )
    assert says(lesson, f"cost the last rank {lesson['slow_on_the_last_rank']:.0f} ms per step")


def test_a_rank_that_was_late_once_does_not_make_the_next_step_short():
    times = lab.StepTimes()
    times.ends = [0.2 * step + 0.1 * (step % 6 == 5) for step in range(14)]
    assert min(b - a for a, b in pairwise(times.ends)) == pytest.approx(0.1)
    assert times.least_ms == pytest.approx(175)


def test_the_loop_of_the_page_makes_a_whole_run(lesson):
    assert lesson["table_came_back"] == ROWS
    assert [name.rpartition("/")[2] for name in lesson["files_of_the_run"]] == ["head.pt"]
    assert lesson["groups_of_the_ranks"] == ["all ranks"]
    assert says(lesson, "Offline a resumed run counted from 0 again")
    assert says(lesson, "2 ranks made 2 runs of one group")


def test_models_of_the_sweep_beat_a_constant(lesson):
    assert lesson["runs_of_the_sweep"] == 2 * SEEDS
    assert lesson["differing_options"] == ["learning_rate", "seed"]
    assert max(lesson["macro_f1_of_the_sweep"]) > lesson["majority_macro_f1"] + 0.05
    assert lesson["macro_f1"] > lesson["majority_macro_f1"] + 0.05


def test_two_models_are_paired_row_by_row_and_settings_by_seeds(lesson):
    """Which error is smaller depends on the two models (two that are alike: tests/lessons/tracking/test_tweets.py)."""
    assert 0 < lesson["paired_error"] < 2 * lesson["separate_error"]
    assert lesson["paired_over_separate"] == pytest.approx(lesson["paired_error"] / lesson["separate_error"])
    more = abs(lesson["gap"]) > 2 * lesson["paired_error"]
    low, high = lesson["spreads"]
    assert says(lesson, f"Seeds spread the test loss by {low:.3f} nats at 0.0003, and by {high:.3f} at 0.001")
    assert lesson["spread_ratio"] == pytest.approx(high / low)
    assert says(
        lesson,
        f"{abs(lesson['gap']):.3f} nats apart, {'more' if more else 'less'} than two paired standard "
        f"errors, {2 * lesson['paired_error']:.3f}.",
    )


def test_the_wrong_rows_are_all_there_and_not_all_of_one_answer(lesson):
    assert 0 < lesson["wrong_rows"] < ROWS and len(lesson["answers_given"]) >= 2
    assert lesson["least_loss_of_a_wrong_row"] >= math.log(2) - 1e-3
    assert says(lesson, f"macro-F1 {lesson['macro_f1']:.2f} against {lesson['majority_macro_f1']:.2f}")
    assert lesson["rows_after_resuming"] == 10 and lesson["same_steps_in_both"], "in the curve of the stopped run"


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "--tracker", "wandbb"),
        ("runs", "runs", "--report", "r.md", "--metrics", "train/los"),
        ("runs", "somewhere"),
    ],
    ids=" ".join,
)
def test_what_goes_wrong_says_what_the_lesson_says(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = JsonLinesTracker(RunInfo("id", "name", "project", None, tmp_path / "runs" / "one" / "tracking"))
    tracker.start()
    tracker.log({"train/loss": 1.0}, 1)
    tracker.finish()
    assert main(list(arguments)) == 2
    assert_quoted("11_wandb", f"Error: {capsys.readouterr().err.removeprefix('course: ')}")
