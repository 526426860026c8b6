"""A model that outlives its process group does not wait for that group's threads while they wait for it."""

import os

import torch
import torch.distributed as dist
from torch import nn

from course_lib.launching import ended_groups
from course_lib.launching.launch import launch

ROUNDS = 60
"""Of two ranks that keep nothing one hung in round 1 to 42, in each of ten tries."""


def trains(rank, store):
    """Ends its group while the wrapped model and the tensors of the last collective are still its own."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    network = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
    rows = torch.ones(4, 8)
    network(rows).square().mean().backward()
    gathered = [torch.empty(4, 8) for _ in range(2)]
    dist.all_gather(gathered, rows)
    dist.destroy_process_group()
    return len(gathered)


def many_groups():
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    done = sum(trains(rank, dist.PrefixStore(str(i), store)) for i in range(ROUNDS))
    return done, len(ended_groups._kept[os.getpid()])


def test_a_wrapped_model_may_outlive_its_group():
    assert launch(many_groups, num_processes=2, device="cpu", timeout=240) == [(2 * ROUNDS, 1)] * 2
