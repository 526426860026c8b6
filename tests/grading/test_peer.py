"""A rank of ours beside the learner's finds out who only pretends to average over ranks."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from course_lib.grading import masters, trusted_peer
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Sandbox
from course_lib.grading.task import Case
from course_lib.grading.tasks.ddp import AVERAGE, BUCKETING, OVERLAP
from course_lib.grading.watch import Limits
from tests.grading.conftest import points
from tests.grading.hostile import PRETENDS

SOLUTIONS = masters.answers(solutions_folder() / "02_data_parallel.ipynb")

LOOKS_AT_THE_OTHERS = (
    SOLUTIONS["ddp.average"]
    + """
import os
average = average_gradients
def average_gradients(model):
    average(model)
    found = []
    for pid in os.listdir('/proc'):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            for what in ('mem', 'environ', 'fd/0'):
                try:
                    found.append(os.close(os.open(f'/proc/{pid}/{what}', os.O_RDONLY)))
                except PermissionError:
                    found.append('closed')
    if found and set(found) == {'closed'}:
        raise ValueError('closed')
"""
)
DIVIDES_FIRST = SOLUTIONS["ddp.average"].replace(
    "            dist.all_reduce(parameter.grad)\n            parameter.grad /= dist.get_world_size()",
    "            parameter.grad /= dist.get_world_size()\n            dist.all_reduce(parameter.grad)\n"
    "            dist.barrier()",
)
GATHERS = """
import torch
import torch.distributed as dist
def average_gradients(model):
    for parameter in (parameter for parameter in model.parameters() if parameter.grad is not None):
        everybody = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, parameter.grad)
        parameter.grad.copy_(sum(everybody) / len(everybody))
"""


@pytest.mark.parametrize(
    ("cheat", "buckets"),
    [pytest.param("sends nothing of use", 2, marks=pytest.mark.long), ("notes what never was", 0)],
)
def test_who_pretends_is_found_out_by_the_peer_and_by_nothing_else(cheat, buckets):
    everybodys = replace(BUCKETING, own={})  # else there is nothing to compute alone from
    with mock.patch.object(trusted_peer, "meeting", return_value=None):
        assert points(everybodys, PRETENDS[cheat]) == BUCKETING.points
    assert points(everybodys, PRETENDS[cheat]) == {"mean": 0, "buckets": buckets}


@pytest.mark.parametrize(
    ("task", "answer", "lost"),
    [
        (AVERAGE, DIVIDES_FIRST, {"bytes": 0}),  # the barrier is one message too many, and does no other harm
        (BUCKETING, SOLUTIONS[BUCKETING.name], {}),
        *(pytest.param(task, SOLUTIONS[task.name], {}, marks=pytest.mark.long) for task in (AVERAGE, OVERLAP)),
    ],
    ids=["divides first", "buckets", "averages", "overlaps"],
)
def test_who_averages_over_ranks_has_all_points(task, answer, lost):
    assert points(task, answer) == task.points | lost


def test_what_the_peer_cannot_join_costs_the_result_alone():
    assert points(AVERAGE, GATHERS) == {"mean gradient": 0, "weights untouched": 1, "bytes": 0}


def test_the_peer_is_closed_to_the_answer_and_its_other_ranks_are_not():
    verdict = grade_source(AVERAGE, LOOKS_AT_THE_OTHERS, hidden=None, limits=Limits(), sandbox=Sandbox())
    assert verdict.error == "failed in a hidden case"  # in the case with the peer alone


def seen(result, arrived, told=("all_reduce 8",), joined=("all_reduce 8",)):
    return [
        {"gradients": np.array(result), "events": list(told)},
        {"joined": list(joined), "arrived": np.array(arrived), "left": None},
    ]


@pytest.mark.parametrize(
    ("told", "holds"),
    [
        (seen([2.0, 3.0], [4.0, 6.0]), [True, True]),
        (seen([3.5, 4.5], [3.5, 4.5]), [True, True]),
        (seen([2.0, 3.0], [6.0, 9.0, 4.0]), [True, True]),  # in another order, and padded
        (seen([2.0, 3.0], [4.0, 3.0]), [False, True]),
        (seen([2.0, 3.0], [3.5, 4.5]), [False, True]),
        (seen([4.0, 6.0], [4.0, 6.0]), [False, True]),
        (seen([2.0, 3.0], []), [False, True]),
        (seen([2.0, float("nan")], [4.0, 6.0]), [False, True]),
        (seen([2.0], [4.0]), [False, True]),
        (seen([2.0, 3.0], [4.0, 6.0], joined=()), [True, False]),
        (seen([2.0, 3.0], [4.0, 6.0], told=["all_reduce 8", "all_reduce 8"]), [True, False]),
    ],
)
def test_what_a_meeting_shows(told, holds):
    """Rank 0 brings 1 and 3, its peer 3 and 3."""
    gradients = [[np.array([1.0], np.float32), np.array([3.0], np.float32)]] * 2
    met = trusted_peer.PeerMeeting(Case(2, {"gradients": gradients}), 3.0)
    assert [finding.holds for finding in trusted_peer.judge(BUCKETING, met, told)] == holds
