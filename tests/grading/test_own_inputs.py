"""A rank of an answer is given its own inputs: what the others hold, it has to get from them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from course_lib.grading import supervisor
from course_lib.grading.serialize import pack, unpack
from course_lib.grading.tasks import TASKS
from tests.grading.conftest import points
from tests.grading.hostile import ALONE
from tests.long_cases import some

PRELUDE = """
import math, sys, torch
import torch.distributed as dist
def everybodys():
    return sys._getframe(2).f_locals['case'].inputs
"""
SHARED = {"accelerate.main_first", "cloud.interruption", "lora.sharded_load"}
"""Exercises on ranks whose inputs are the same for all of them."""


@pytest.mark.parametrize("name", some(ALONE, "zero.stage1"))
def test_who_computes_from_everybodys_inputs_has_none_of_them(name):
    task = TASKS[name]
    assert points(replace(task, own={}), PRELUDE + ALONE[name]) == task.points, "the inputs of all give it all points"
    assert sum(points(task, PRELUDE + ALONE[name], may_raise=True).values()) < sum(task.points.values())


def test_every_exercise_on_ranks_keeps_what_each_rank_has_of_its_own():
    without = {name: task for name, task in TASKS.items() if task.needs_ranks and not task.own}
    on_ranks = {
        name for name, task in without.items() if any(case.world_size > 1 for case in task.cases(random.Random(0)))
    }
    assert on_ranks == SHARED


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.own])
def test_a_rank_gets_its_part_in_the_inputs_form_and_all_parts_are_the_whole(name):
    task = TASKS[name]
    for case in task.cases(random.Random(5)):
        world, given = case.world_size, pack(case.inputs)
        ranks = supervisor._Ranks(task, {"own": list(task.own), "limits": {"output": 1}, "met": None}, 0, world, -1)
        parts = [unpack(ranks._part(given, rank)) for rank in range(world)]
        for key, value in unpack(given).items():
            mine = [part[key] for part in parts]
            if key not in task.own or world == 1:
                assert all(pack(copy) == pack(value) for copy in mine)
            elif isinstance(value, np.ndarray):
                assert {(copy.shape, copy.dtype) for copy in mine} == {(value.shape, value.dtype)}
                assert np.array_equal(sum(mine), value)
            elif mine[0][-1] is None:
                assert all((mine[i][j] is None) == (i != j) for i in range(world) for j in range(world))
                assert all(pack(mine[rank][rank]) == pack(value[rank]) for rank in range(world))
            else:  # weights that are cut into shards
                assert all(
                    np.array_equal(sum(shares), whole)
                    for shares, whole in zip(zip(*mine, strict=True), value, strict=True)
                )
