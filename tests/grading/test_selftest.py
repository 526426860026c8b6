"""The checks are checked: stubs earn nothing, solutions all, and every planted wrong answer loses what it should."""

import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from course_lib.commands import grade
from course_lib.errors import ConfigError
from course_lib.grading import check as checking
from course_lib.grading import selftest
from course_lib.grading.check import check
from course_lib.grading.hidden import hidden_cases
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.tasks import TASKS
from course_lib.launching import openmp

PLANTED = selftest.planted
NEED_HIDDEN = ("zero.partition",)
"""Exercises of which a planted answer is rejected by the hidden cases alone."""


ACCEPTED_ONCE = (
    ("ddp.overlap", "the pending list is never cleared"),
    ("ddp.overlap", "a hook on a frozen parameter"),
    ("ddp.average", "stumbles over a parameter without a gradient"),
    ("evaluation.macro_f1", "divides by zero where a class is absent"),
    ("loop.token_weighted", "returns the loss with its graph"),
    ("ddp.ring", "chunk for tensor_split"),
    ("tracking.groups", "all losses in one collective"),
    ("cloud.job", "no process without a GPU"),
    ("start.broadcast", "clears infinities alone"),
    ("start.one_model", "Python's own hash"),
    ("loop.token_weighted", "each micro-batch's mean times its share"),
    ("accelerate.rows", "starts again from row 0 once"),
    ("accelerate.main_first", "sleeps for a second where it should wait"),
    ("evaluation.gather", "pads with float64, in which they fit"),
    ("evaluation.metric", "divides by no rows"),
    ("faults.agreement", "Python's own hash"),
    ("plan.memory", "34 s b h, as of GPT's block"),
    ("plan.planner", "fewest stages before the lowest zero"),
    ("context.merge", "exponentials in float64"),
    ("experts.layer", "leaves out experts without tokens"),
)
"""Wrong answers that had all points, of `check` and of `course grade`, until a case was made for each."""
BESIDE = (("evaluation.perplexity", "this rank's own"), ("pipeline.run", "forwards alone"))
"""They lose, beside theirs, a property that no answer is planted for."""


def one_for_each_property(folder):
    """Of the planted answers those that are the first to lose a property of their exercise, and the two lists."""
    listed, first = {*ACCEPTED_ONCE, *BESIDE}, {}
    for answer in PLANTED(folder):
        own = (answer.task, answer.name)
        first.setdefault(own if own in listed else (answer.task, answer.loses), answer)
    assert listed <= first.keys(), "planted under another name"
    return list(first.values())


def public_cases(task, *arguments):
    return hidden_cases(task, *arguments) if task.name in NEED_HIDDEN else []


def every_second(first):
    """The table of every second exercise; most of what wrong answers take is waiting, here beside the other half's."""
    return selftest.table(list(TASKS.values())[first::2])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((one_for_each_property, public_cases), id="an answer for each property, public cases"),
        pytest.param((PLANTED, hidden_cases), id="all answers and cases", marks=pytest.mark.long),
    ],
)
def rows(request):
    answers, hidden = request.param
    with mock.patch.object(selftest, "planted", answers), mock.patch.object(selftest, "hidden_cases", hidden):
        openmp.end_threads()
        with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
            found = [row for rows in pool.map(every_second, (0, 1)) for row in rows]
    assert len(found) == 3 * len(TASKS) + len(answers(selftest.solutions_folder()))
    return found


def test_every_answer_goes_as_it_should(rows):
    assert {row.task for row in rows if row.loses} == set(TASKS)
    assert [row for row in rows if not row.holds] == []


def test_every_property_is_shown_to_reject_something(rows):
    """A property that no planted answer fails would be worth nothing."""
    failed = {(row.task, name) for row in rows if row.loses for name in row.failed}
    every = {(task.name, name) for task in TASKS.values() for name in task.properties}
    assert every - failed == set()


def test_stubs_and_idlers_earn_nothing_and_solutions_all(rows):
    for row in rows:
        if row.answer in ("stub", "does nothing"):
            assert row.points == 0 and not row.loses
        elif row.answer == "solution":
            assert row.points == row.maximum > 0 and not row.failed
        else:
            assert row.points < row.maximum and row.loses in row.failed


def test_who_misses_the_point_has_a_third_of_the_points_at_most(rows):
    missed = [row for row in rows if set(row.failed) & set(TASKS[row.task].essential)]
    assert [row for row in missed if row.points > row.maximum // 3] == []
    assert max(row.points for row in missed if row.task == "ddp.overlap") == 3, "of those whose result is right"


def blocking(model):
    def send(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(send)
    return lambda: None


def test_what_a_learner_reads(capsys):
    report = check("ddp.overlap", blocking)
    said = capsys.readouterr().out
    assert report.failed == ("does not block backward",) and report.points == 3
    assert "ddp.overlap: 3 of 9 points" in said and "yes  mean gradient (3)" in said
    assert "no   does not block backward (3)\n       expected on rank 0: no wait before backward" in said
    assert "case 1 of 4: 2 ranks, weights [2x5, 4x2, 6x4, 5x6], rows 2 of 2 of 4x5" in said
    assert "without `does not block backward`, which is the point of it, at most 3 points" in said


def on_rank_1(what):
    """An answer of which rank 1 does something before its collective."""

    def ring_all_reduce(tensor):
        if dist.get_rank() == 1:
            what()
        dist.all_reduce(tensor)

    return ring_all_reduce


def raises():
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda: time.sleep(1000), ["a hang: rank 1 is not in a collective (in line ", "; rank 0 waits for it"]),
        (lambda: os._exit(3), ["rank 1 exited with code 3"]),
        (raises, ["ValueError: not today", '`raise ValueError("not today")`']),
    ],
    ids=["hangs", "dies", "raises"],
)
def test_a_rank_that_hangs_dies_or_raises_is_named(what, said, monkeypatch):
    monkeypatch.setattr(checking, "SECONDS_PER_CASE", 3.0)
    report = check("ddp.ring", on_rank_1(what))
    found = " ".join(finding.found for finding in report.findings)
    assert report.points == 0 and [part for part in said if part not in found] == [], found


def test_a_function_of_a_notebook_cell_is_checked(capsys):
    scope = {}
    exec("def perplexity(loss_sum, tokens):\n    print('here')\n    return 1.0", scope)
    assert check("evaluation.perplexity", scope["perplexity"]).points == 0
    assert "here" in capsys.readouterr().out, "what it prints is shown"


def test_an_unknown_exercise_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean `ddp.ring`"):
        check("ddp.rings", print)


def test_an_answer_that_goes_otherwise_makes_the_self_test_fail(monkeypatch, capsys):
    """A planted answer that is as good as the solution: its row says so, and so does the exit code."""
    task = TASKS["pipeline.bubble"]
    harmless = selftest.Planted(task.name, "harmless", "1F1B", "return (ranks - 1)", "return (ranks + 0 - 1)")
    assert grade.self_test({task.name: task}) == 0
    assert "8 answers, 0 not graded as they should be" in capsys.readouterr().out
    monkeypatch.setattr(selftest, "planted", lambda folder: [harmless])
    assert grade.self_test({task.name: task}) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and "4 answers, 1 not graded as they should be" in out


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_in_the_sandbox_too(name):
    """Stub, solution and wrong answers as `course grade` runs them."""
    ((task, answers),) = selftest._answers(selftest.solutions_folder(), [TASKS[name]])
    for answer, loses, source in answers:
        hidden = hidden_cases(task, random.Random(2))
        verdict = grade_source(task, source, hidden=hidden, limits=Limits(seconds=200.0), sandbox=Sandbox())
        if loses:
            assert verdict.scores[loses].said, answer
        else:
            assert verdict.points == (verdict.maximum if answer == "solution" else 0), answer
