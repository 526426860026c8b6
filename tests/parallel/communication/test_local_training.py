"""LocalSGD and DiLoCo on real ranks, each against its definition in one process, data parallelism and torch's.

In float64, so that the order of a sum shows in the 16th digit only.
"""

import copy
import functools

import pytest
import torch
import torch._dynamo  # optimizers import it: here once, and not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel.communication.diloco import DiLoCo, plain_sum
from course_lib.parallel.communication.hooks import all_reduce_bytes
from course_lib.parallel.communication.local_sgd import LocalSGD
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.ddp import DataParallel
from tests.ranks import on_ranks

ROWS, WIDTH = 6, 5
"""Rows of a rank's batch."""
PAPERS = {"sync_every": 3, "outer_lr": 0.7, "outer_momentum": 0.9, "sum_over_ranks": plain_sum}
both = pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])


class Blocks(nn.Module):
    """Four blocks between two layers; one weight is frozen."""

    def __init__(self, seed):
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


def engine_of(kind, net, **options):
    given = options if kind is LocalSGD else PAPERS | options
    return kind(net, group=None, **given)


def loss(net, step, rank):
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=numbers, dtype=torch.float64)
    y = x.sum(1) * (1 + rank)  # the ranks' rows ask for different functions
    return (net(x) - y).square().mean()


def trained(net):
    return [parameter for parameter in net.parameters() if parameter.requires_grad]


def weights(net):
    return torch.cat([parameter.detach().reshape(-1) for parameter in trained(net)])


def sgd(net):
    return torch.optim.SGD(trained(net), lr=0.02)


def adamw(net):
    return torch.optim.AdamW(trained(net), lr=0.01)


def train(engine, optimizer, steps):
    """Steps on this rank's rows; the trained parameters after each."""
    history = []
    for step in steps:
        loss(engine, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        getattr(engine, "after_step", lambda: None)()
        history.append(weights(engine))
    return torch.stack(history)


def data_parallel(make_optimizer, steps):
    engine = DataParallel(model())
    return train(engine, make_optimizer(engine), range(steps))


def local_sgd(sync_every, make_optimizer, steps):
    engine = LocalSGD(model(seed=dist.get_rank()), sync_every=sync_every, group=None)
    return train(engine, make_optimizer(engine), range(steps))


def diloco(make_optimizer, steps, **options):
    engine = engine_of(DiLoCo, model(), **options)
    return train(engine, make_optimizer(engine), range(steps))


def on_all(tensor):
    """Every rank's, (ranks, …)."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def furthest(mine, theirs):
    return (mine - theirs).abs().max().item()


same = functools.partial(assert_close, rtol=0, atol=1e-13)


# --- LocalSGD ---


@on_ranks(2, 3)
def test_local_sgd_is_local_training_with_means_as_torchs():
    averager = PeriodicModelAverager(period=3)
    averager.step = 1  # torch's counts its steps from 0 and averages at each multiple: it is told one step more
    net, mine = model(), local_sgd(3, adamw, 7)
    same(mine, train(net, PostLocalSGDOptimizer(adamw(net), averager), range(7)))
    first, second, *_ = on_all(mine)
    apart = (first - second).abs().amax(1)
    assert apart.nonzero().flatten().tolist() == [0, 1, 3, 4, 6] and apart[apart > 0].min() > 1e-3


@on_ranks(2)
def test_at_h_1_local_sgd_is_data_parallelism_with_plain_sgd_alone():
    parallel = data_parallel(sgd, 4)
    same(local_sgd(1, sgd, 4), parallel)
    assert furthest(local_sgd(2, sgd, 4), parallel) > 1e-3
    # AdamW's step is not linear in the gradient: the mean of two steps is not the step of the mean.
    assert furthest(local_sgd(1, adamw, 4), data_parallel(adamw, 4)) > 1e-3


# --- DiLoCo ---


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@on_ranks(2, 3)
def test_diloco_is_local_training_with_torchs_nesterov_outside(momentum):
    """A model for each rank, in turn, and torch's optimizer on their mean change."""
    ranks, shared = range(dist.get_world_size()), model()
    models = [model() for _ in ranks]
    optimizers = [adamw(net) for net in models]
    outer = torch.optim.SGD(trained(shared), lr=0.7, momentum=momentum, nesterov=momentum > 0)
    theirs = []
    for step in range(7):
        for rank in ranks:
            loss(models[rank], step, rank).backward()
            optimizers[rank].step()
            optimizers[rank].zero_grad()
        if step in (2, 5):
            for parameter, *of_ranks in zip(trained(shared), *map(trained, models), strict=True):
                parameter.grad = sum(parameter.detach() - own.detach() for own in of_ranks) / len(models)
            outer.step()
            for net in models:
                net.load_state_dict(shared.state_dict())
        theirs.append(weights(models[dist.get_rank()]))
    mine = diloco(adamw, 7, outer_momentum=momentum)
    assert_close(mine, torch.stack(theirs), rtol=0, atol=1e-12)
    assert furthest(mine, local_sgd(3, adamw, 7)) > 1e-2


@pytest.mark.parametrize("bits, near", [(8, 1e-3), (4, 3e-2)])
@on_ranks(2)
def test_quantized_outer_gradients_are_near_and_the_ranks_agree(bits, near):
    rounded = diloco(adamw, 6, sum_over_ranks=QuantizedAllReduce(bits, 16).sum)[-1]
    first, second = on_all(rounded)
    assert torch.equal(first, second)
    assert 0 < furthest(rounded, diloco(adamw, 6)[-1]) < near


# --- agreement, bytes, state ---


@both
@on_ranks(2)
def test_within_agreed_all_ranks_are_alike_and_after_it_themselves(kind):
    engine = engine_of(kind, model(), sync_every=4)
    train(engine, sgd(engine), range(6))
    own = weights(engine)
    with engine.agreed():
        within, other = on_all(weights(engine))
    everyones = on_all(own)
    assert torch.equal(within, other) and torch.equal(weights(engine), own) and not torch.equal(*everyones)
    if kind is LocalSGD:
        assert_close(within, everyones.mean(0), rtol=0, atol=1e-14)


@both
@on_ranks(2, 3)
def test_what_is_sent_is_the_formula(kind):
    engine, sent = engine_of(kind, model(), sync_every=3), []
    optimizer = sgd(engine)
    for step in range(7):
        with Meter() as meter:
            train(engine, optimizer, [step])
        sent.append(meter.bytes_sent)
    once = all_reduce_bytes(8 * weights(engine).numel(), dist.get_world_size())
    assert sent == [0, 0, once, 0, 0, once, 0]


@both
@on_ranks(2)
def test_what_was_saved_in_the_middle_of_a_period_goes_on_with_the_same_bits(kind):
    engine = engine_of(kind, model(), sync_every=4)
    optimizer = adamw(engine)
    train(engine, optimizer, range(5))
    state = engine.state_dict_of_rank()
    saved = copy.deepcopy((engine.module.state_dict(), optimizer.state_dict()))
    undisturbed = train(engine, optimizer, range(5, 10))[-1]

    def resumed(with_state):
        engine = engine_of(kind, model(seed=3), sync_every=4)
        engine.module.load_state_dict(saved[0])
        if with_state:
            engine.load_state_dict_of_rank(state)
        optimizer = adamw(engine)
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        return train(engine, optimizer, range(5, 10))[-1]

    assert torch.equal(resumed(with_state=True), undisturbed)
    assert furthest(resumed(with_state=False), undisturbed) > 1e-4


def test_a_period_of_no_steps_is_refused():
    with pytest.raises(ConfigError, match="ranks that agree every 0 steps: use 1 or more"):
        LocalSGD(model(), sync_every=0, group=None)
