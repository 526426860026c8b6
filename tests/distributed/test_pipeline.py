"""Pipelines on real ranks: every schedule gives the losses and gradients of the unsplit model."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import B, Schedule
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.mail import Mail
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.validate import in_flight
from course_lib.runtime.launch import launch

WIDTH, ROWS, MICROBATCHES = 8, 16, 8
TOLERANCE = 1e-6  # float32 sums in another order; gradients are of the order of 1


class Block(nn.Module):
    """One stage: takes the mask as an extra, and hands it nothing."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + mask * self.down(torch.tanh(self.up(self.norm(x))))


def build(stages):
    torch.manual_seed(0)
    return [Block() for _ in range(stages)]


def batch(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return x, y, torch.randint(2, (rows, 1), generator=generator).float()


def squares(output, target):
    return (output - target).square().sum()


def whole(stages, seed=0, rows=ROWS, scale=1 / MICROBATCHES):
    """Losses by micro-batch and gradients of the unsplit model."""
    blocks = build(stages)
    losses = []
    for x, y, mask in zip(*(each.tensor_split(MICROBATCHES) for each in batch(seed, rows)), strict=True):
        for block in blocks:
            x = block(x, mask)
        losses.append(squares(x, y))
        (losses[-1] * scale).backward()
    return [loss.item() for loss in losses], gradients(dict(enumerate(blocks)))


def gradients(stages):
    return {f"{stage}.{name}": None if parameter.grad is None else parameter.grad.clone()
            for stage, module in stages.items() for name, parameter in module.named_parameters()}


def local(schedule, group):
    """This rank's stages."""
    blocks = build(schedule.stages)
    return {stage: blocks[stage] for stage in schedule.stages_of(dist.get_rank(group))}


def furthest(some, others):
    return max((some[name] - others[name]).abs().max().item() for name in some)


def run(schedule, group):
    stages = local(schedule, group)
    executor = PipelineExecutor(schedule, stages, squares, group)
    x, y, mask = batch()
    done = executor.step(x, targets=y, mask=mask)
    return {"losses": [loss.item() for loss in done.losses], "gradients": gradients(stages), "peak": done.peak,
            "actions": [span.action for span in done.spans]}


def on_rank():
    dist.init_process_group("gloo")
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    mine = {ranks: group for ranks, group in groups.items() if dist.get_rank() < ranks}
    return {(name, ranks): run(make(name, ranks, MICROBATCHES), group) for ranks, group in mine.items()
            for name in KINDS}


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, num_processes=4, timeout=120)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_equals_the_unsplit_model(ranks, name, count):
    schedule = make(name, count, MICROBATCHES)
    losses, wanted = whole(schedule.stages)
    outcomes = [rank[name, count] for rank in ranks[:count]]
    assert outcomes[schedule.stage_ranks[-1]]["losses"] == pytest.approx(losses, rel=1e-6)
    found = {key: value for outcome in outcomes for key, value in outcome["gradients"].items()}
    assert found.keys() == wanted.keys() and furthest(found, wanted) < TOLERANCE * 10
    assert tuple(outcome["peak"] for outcome in outcomes) == in_flight(schedule)
