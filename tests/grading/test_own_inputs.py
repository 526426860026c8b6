"""A rank of an answer is given its own inputs: what the others hold, it has to get from them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from course_lib.grading import supervisor
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Sandbox
from course_lib.grading.serialize import pack, unpack
from course_lib.grading.tasks import TASKS
from course_lib.grading.watch import Limits
from tests.long_cases import some

# Each reads everybody's inputs out of the frame of its observer, computes alone, and sends zeros of the right size.
PRELUDE = """
import math, sys, torch
import torch.distributed as dist
def everybodys():
    return sys._getframe(2).f_locals['case'].inputs
"""
ALONE = {
    "evaluation.perplexity": """
def perplexity(loss_sum, tokens):
    inputs = everybodys()
    dist.all_reduce(torch.zeros(2, dtype=torch.float64))
    return math.exp(sum(inputs['sums']) / sum(inputs['tokens']))
""",
    "zero.stage1": """
steps, state = [], {}
def zero1_step(weights, gradient, momentum, lr, beta):
    inputs, ranks, rank = everybodys(), dist.get_world_size(), dist.get_rank()
    dist.reduce_scatter_single(torch.zeros_like(momentum), torch.zeros_like(weights))
    mean = sum(torch.from_numpy(each[len(steps)]) for each in inputs['gradients']) / ranks
    steps.append(rank)
    new = state['momentum'] = beta * state.get('momentum', torch.from_numpy(inputs['momentum'])) + mean
    momentum.copy_(new.chunk(ranks)[rank])
    weights -= lr * new
    dist.all_gather_single(torch.zeros_like(weights), torch.zeros_like(momentum))
""",
    "tensor.embedding": """
def split_embedding(ids, rows):
    found = torch.from_numpy(everybodys()['table'])[ids]
    dist.all_reduce(torch.zeros_like(found))
    return found
""",
    "evaluation.gather": """
def gather_rows(rows, total):
    found = torch.from_numpy(everybodys()['rows'])
    dist.all_reduce(torch.zeros(1))  # as the ranks have unlike numbers of rows
    return found
""",
}
SHARED = {"accelerate.main_first", "cloud.interruption", "lora.sharded_load"}
"""Exercises on ranks whose inputs are the same for all of them."""


def points(task, source):
    """By property."""
    verdict = grade_source(task, source, hidden=None, limits=Limits(), sandbox=Sandbox())
    return {name: score.points for name, score in verdict.scores.items()}


@pytest.mark.parametrize("name", some(ALONE, "zero.stage1"))
def test_who_computes_from_everybodys_inputs_has_none_of_them(name):
    task = TASKS[name]
    assert points(replace(task, own={}), PRELUDE + ALONE[name]) == task.points, "the inputs of all give it all points"
    assert sum(points(task, PRELUDE + ALONE[name]).values()) < sum(task.points.values())


def test_every_exercise_on_ranks_keeps_what_each_rank_has_of_its_own():
    on_ranks = {
        name
        for name, task in TASKS.items()
        if task.needs_ranks and any(case.world_size > 1 for case in task.cases(random.Random(0)))
    }
    assert {name for name in on_ranks if not TASKS[name].own} == SHARED


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
