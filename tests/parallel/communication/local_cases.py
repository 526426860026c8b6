"""What each rank does in the tests of training that is local between agreements: it returns what came out."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel.communication.diloco import DiLoCo, plain_sum
from course_lib.parallel.communication.local_sgd import LocalSGD
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.ddp import DataParallel

ROWS, WIDTH = 6, 5
"""Rows of a rank's batch."""


class Blocks(nn.Module):
    """Four blocks between two layers; one weight is frozen."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.frozen
        return self.last(hidden).squeeze(-1)


def model(seed=0):
    return Blocks(seed).double()


def batch(step, rank):
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64)
    return x, x.sum(1) * (1 + rank)  # the ranks' rows ask for different functions


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def train(engine, optimizer, rank, steps, after_step=None):
    """Steps on this rank's rows; the trained parameters after each."""
    history = []
    for step in steps:
        x, y = batch(step, rank)
        (engine(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step = after_step or getattr(engine, "after_step", None)
        if after_step:
            after_step()
        history.append(weights(engine))
    return history


def weights(engine):
    return torch.cat([p.detach().reshape(-1) for p in engine.parameters() if p.requires_grad])


def local(make_engine, make_optimizer, number, *, seed_of_rank=False):
    """The weights after each of some steps, on this rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = make_engine(model(seed=rank if seed_of_rank else 0))
    return train(engine, make_optimizer([p for p in engine.parameters() if p.requires_grad]), rank, range(number))


def local_sgd(sync_every, make_optimizer, number):
    return local(
        lambda net: engine_of(net, sync_every=sync_every, averaging=True), make_optimizer, number, seed_of_rank=True
    )


def engine_of(net, *, bits=0, **options):
    """DiLoCo with the paper's values, or where they are left out LocalSGD."""
    if "averaging" in options:
        return LocalSGD(net, sync_every=options["sync_every"], group=None)
    options = {"outer_lr": 0.7, "outer_momentum": 0.9} | options
    return DiLoCo(
        net,
        **options,
        group=None,
        sum_over_ranks=QuantizedAllReduce(bits, 16).sum if bits else plain_sum,
    )


def diloco(options, make_optimizer, number):
    return local(lambda net: engine_of(net, **options), make_optimizer, number)


def data_parallel(make_optimizer, number):
    return local(DataParallel, make_optimizer, number)


def torchs_local_sgd(sync_every, number):
    """PostLocalSGDOptimizer, which counts its steps from 0 and averages at each multiple: it is told one step more."""
    dist.init_process_group("gloo")
    averager = PeriodicModelAverager(period=sync_every)
    averager.step = 1
    net, rank = model(), dist.get_rank()
    optimizer = PostLocalSGDOptimizer(adamw([p for p in net.parameters() if p.requires_grad]), averager)
    return train(net, optimizer, rank, range(number))


def agreement(kind):
    """Within agreed(): alike on all ranks? And after it the ranks' own again?"""
    dist.init_process_group("gloo")
    rank, net = dist.get_rank(), model()
    engine = engine_of(net, sync_every=4, **kind)
    train(engine, sgd(engine.trained), rank, range(6))
    own = weights(engine)
    with engine.agreed():
        within = weights(engine)
    return own, within, torch.equal(weights(engine), own)


def bytes_of_steps(options, number):
    """Bytes that this rank sends in each of some steps, and the elements that it trains."""
    dist.init_process_group("gloo")
    net, rank, sent = model(), dist.get_rank(), []
    engine = engine_of(net, **options)
    optimizer = sgd(engine.trained)
    for step in range(number):
        with Meter() as meter:
            train(engine, optimizer, rank, [step])
        sent.append(meter.bytes_sent)
    return sent, sum(parameter.numel() for parameter in engine.trained)


def resumed(options, steps):
    """Weights after twice as many steps: undisturbed; saved after the first half and loaded; and without the state."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = engine_of(model(), **options)
    optimizer = adamw(first.trained)
    train(first, optimizer, rank, range(steps))
    state = first.state_dict_of_rank()
    saved = copy.deepcopy((first.module.state_dict(), optimizer.state_dict()))
    ends = [train(first, optimizer, rank, range(steps, 2 * steps))[-1]]
    for wanted in (state, None):
        engine = engine_of(model(seed=3), **options)
        engine.module.load_state_dict(saved[0])
        if wanted is not None:
            engine.load_state_dict_of_rank(wanted)
        optimizer = adamw(engine.trained)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        ends.append(train(engine, optimizer, rank, range(steps, 2 * steps))[-1])
    return ends


def refusal():
    dist.init_process_group("gloo")
    try:
        LocalSGD(model(), sync_every=0, group=None)
    except ConfigError as error:
        return str(error)
