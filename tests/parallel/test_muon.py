"""Muon against its definition and torch's, and shared out over real ranks against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.muon import COEFFICIENTS, Muon, muon_groups, newton_schulz
from course_lib.parallel.sharded_muon import GatheredMuon, LayerwiseMuon, orthogonalising_flops, shared_out
from tests.parallel.between_ranks import spread
from tests.ranks import on_ranks

SHAPES = [(6, 10), (12, 4), (7, 7), (9, 5), (3, 8)]
HOW = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
STEPS = 3


def matrices():
    numbers = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=numbers)) for shape in SHAPES]


def give_gradients(parameters, step, ranks):
    """The mean of some ranks' gradients."""
    for index, parameter in enumerate(parameters):
        drawn = [
            torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + 10 * index + rank))
            for rank in ranks
        ]
        parameter.grad = sum(drawn) / len(drawn)


def muon(parameters):
    how = HOW | {"betas": (0.9, 0.999), "eps": 1e-8}
    return Muon([{"params": parameters, "muon": True, "weight_decay": how.pop("weight_decay")}], **how)


# --- one process ---


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        a, b, c = COEFFICIENTS
        values = a * values + b * values**3 + c * values**5
    result = newton_schulz(matrix)
    assert_close(result, left @ values.diag() @ right, rtol=0, atol=1e-12)
    assert values.min() > 0.6 and values.max() < 1.3 and (values - 1).abs().max() > 0.01
    assert not newton_schulz(torch.zeros(shape)).any()


def test_it_is_torchs_muon_and_torchs_adamw():
    mine, theirs = matrices(), matrices()
    plain, plains = ([nn.Parameter(torch.linspace(-1, 1, 7))] for _ in range(2))
    groups = [{"params": mine, "muon": True, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.1}]
    of_adam = {"lr": 0.05, "betas": (0.8, 0.99), "eps": 1e-6}
    own = Muon(groups, momentum=0.9, **of_adam)
    torchs = [
        torch.optim.Muon(theirs, **HOW, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(plains, weight_decay=0.1, **of_adam),
    ]
    for step in range(5):
        for parameters in (mine, theirs, plain, plains):
            give_gradients(parameters, step, [0])
        for optimizer in (own, *torchs):
            optimizer.step()
    assert_close(mine, theirs, rtol=0, atol=0)
    assert_close(plain, plains, rtol=0, atol=1e-6)
    assert (mine[0] - matrices()[0]).abs().max() > 0.05


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2))
        self.head = nn.Linear(3, 4)


def test_muon_gets_the_matrices_of_the_blocks():
    model = Blocks()
    names = {parameter: name for name, parameter in model.named_parameters()}
    decays = [
        {"params": [p for p in names if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in names if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = muon_groups(model, decays)
    assert [(group["muon"], group["weight_decay"], [names[p] for p in group["params"]]) for group in groups] == [
        (True, 0.1, ["blocks.0.0.weight", "blocks.1.0.weight"]),
        (False, 0.1, ["embedding.weight", "head.weight"]),
        (False, 0.0, [name for name in names.values() if name.endswith("bias") or ".1.weight" in name]),
    ]
    with pytest.raises(ConfigError, match=r"Muon of a parameter of shape \(3,\)"):
        Muon([{"params": [model.blocks[0][0].bias], "muon": True}], lr=1, momentum=0, betas=(0, 0), eps=1)


# --- ranks ---


def alone(ranks):
    parameters = matrices()
    optimizer = muon(parameters)
    for step in range(STEPS):
        give_gradients(parameters, step, range(ranks))
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


class Product(nn.Module):
    """A loss whose gradients are whatever one gives in."""

    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList(matrices())

    def forward(self, gradients):
        return sum((matrix * gradient).sum() for matrix, gradient in zip(self.matrices, gradients, strict=True))


ELEMENTS = sum(rows * columns for rows, columns in SHAPES)


def over_all(number):
    total = torch.tensor(number)
    dist.all_reduce(total)
    return total.item()


def assert_one_process(parameters):
    ranks = dist.get_world_size()
    # Sums in another order may round to the next bf16, 2^-8 of an update; between two ranks there is one order.
    near = 0 if ranks == 2 else STEPS * HOW["lr"] * 0.2 * 12**0.5 * 2**-5
    assert_close([parameter.detach() for parameter in parameters], alone(ranks), rtol=0, atol=near)
    assert spread(parameters) == 0


@on_ranks(2, 3)
def test_replicated_it_is_one_process_with_the_mean_gradient():
    engine = DataParallel(Product())
    parameters = list(engine.parameters())
    optimizer = muon(parameters)
    for step in range(STEPS):
        give_gradients(own := matrices(), step, [dist.get_rank()])
        engine([matrix.grad for matrix in own]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_one_process(parameters)


@pytest.mark.parametrize(("kind", "volume"), [(LayerwiseMuon, 1), (GatheredMuon, 3 / 4)])
@on_ranks(2, 3)
def test_shared_out_it_is_one_process_with_the_mean_gradient(kind, volume):
    parameters = matrices()
    optimizer = kind(parameters, **HOW, group=None)
    for step in range(STEPS):
        give_gradients(parameters, step, [dist.get_rank()])
        with Meter() as meter:
            optimizer.step()
    assert meter.bytes_sent == optimizer.bytes_per_step() > 0
    assert_one_process(parameters)
    whole = 2 * (dist.get_world_size() - 1) * 4 * ELEMENTS  # what an all-reduce of all gradients sends
    assert over_all(meter.bytes_sent) == pytest.approx(whole * volume, abs=0 if volume == 1 else 0.01 * whole * volume)
    if kind is GatheredMuon:
        assert optimizer.shard.numel() <= -(-ELEMENTS // dist.get_world_size())
    else:
        assert over_all(sum(momentum.numel() for momentum in optimizer.buffers.values())) == ELEMENTS


def test_of_a_half_it_is_not_half_of_the_whole():
    """Why flat shards break it: a shard that is orthogonalised by itself gives another step."""
    whole = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    halves = torch.cat([newton_schulz(half) for half in whole.chunk(2)])
    assert (newton_schulz(whole) - halves).abs().max() > 0.1
    assert torch.linalg.matrix_norm(halves, 2) > 1.2 * torch.linalg.matrix_norm(newton_schulz(whole), 2)


def test_the_work_is_shared_out_by_its_cost():
    assert orthogonalising_flops(100, 100) == 5 * 6 * 100**3
    assert orthogonalising_flops(4, 9) == orthogonalising_flops(9, 4) == 5 * (4 * 16 * 9 + 2 * 64)
    assert shared_out([5, 1, 1, 1, 2], 2) == [[0], [4, 1, 2, 3]]
    assert shared_out([3], 2) == [[0], []]
