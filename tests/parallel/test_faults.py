"""Faults of sharded training are named, with rank and parameter, or end with every rank's stack."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.errors import ModelError
from course_lib.launching import own_time
from course_lib.launching.launch import RanksHung, launch
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from tests.ranks import on_ranks

ENGINES = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "fsdp": FullyShardedDataParallel}


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ENGINES.values())
@on_ranks(2)
def test_ranks_that_differ_and_a_changed_model_are_named_on_every_rank(kind):
    odd = Net(width=6 + dist.get_rank())
    with pytest.raises(ModelError, match=r"rank 1's model is not rank 0's: `layers.0.weight` is parameter \(7, 4\)"):
        kind(odd, sgd(odd))
    model = Net()
    model.layers[1].weight.requires_grad_(dist.get_rank() == 0)
    with pytest.raises(ModelError, match=r"`layers.1.weight` is parameter \(4, 6\) torch.float32 frozen"):
        kind(model, sgd(model))
    model = Net()
    engine = kind(model, sgd(model))
    engine(torch.ones(1, 4)).sum().backward()
    model.layers[0].bias.requires_grad_(False)
    says = f"^parameter `layers.0.bias` was frozen after the model was wrapped by {kind.__name__}"
    with pytest.raises(ModelError, match=says):
        engine(torch.ones(1, 4))


def skips_a_step(name, folder):
    dist.init_process_group("gloo")
    model = Net()
    engine = ENGINES[name](model, sgd(model))
    engine(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 1:
        (folder / "elsewhere").touch()
        time.sleep(300)  # does something else, where the others update
    all_reduce = dist.all_reduce

    def noted(*args, **kwargs):
        (folder / "waits").touch()
        all_reduce(*args, **kwargs)

    dist.all_reduce = noted
    engine.clip_grad_norm_(1.0)


@pytest.mark.parametrize("name", ["zero2", "fsdp"])
def test_a_rank_that_skips_a_collective_ends_with_both_stacks(name, tmp_path, time_is_over_once):
    time_is_over_once(own_time, tmp_path / "elsewhere", tmp_path / "waits")
    with pytest.raises(RanksHung) as hung:
        launch(skips_a_step, name, tmp_path, num_processes=2, timeout=0.2)
    waiting, busy = hung.value.stacks[0], hung.value.stacks[1]
    assert "clip_grad_norm_" in waiting and "in skips_a_step" in waiting
    assert "in skips_a_step" in busy and "clip_grad_norm_" not in busy, "and this one never got there"
