"""ZeRO from scratch: what each stage holds is the paper's formula, what it moves the paper's volume, and it frees."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel.sharding import gather_whole
from course_lib.parallel.zero import OverlappedZero1, Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from tests.ranks import on_ranks

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


class Net(nn.Module):
    """Blocks of odd sizes, about 200,000 parameters; matrices and vectors go to groups of their own."""

    def __init__(self, width=127, depth=6):
        super().__init__()
        self.embed = nn.Linear(11, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 131), nn.GELU(), nn.Linear(131, width)) for _ in range(depth)]
        )
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def adamw(model):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def narrow():
    torch.manual_seed(0)
    model = Net(width=17, depth=3)
    model.layers[1][0].weight.requires_grad_(False)
    return model


def rows_of(rank, world, step, micro):
    """The rank's share of 12 rows, the last step's being 10."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x, y = torch.randn(12, 11, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    last = 10 if step == 3 else 12
    return x[:last][rank::world], y[:last][rank::world], last


def train(engine, optimizer, rank=0, world=1):
    """Four steps of two micro-batches, clipped; gives the losses, of this rank's rows."""
    losses = []
    for step in range(4):
        for micro in range(2):
            whole = isinstance(engine, OverlappedZero1) and micro == 0
            with engine.no_sync() if whole else contextlib.nullcontext():
                x, y, total = rows_of(rank, world, step, micro)
                loss = nn.functional.cross_entropy(engine(x).float(), y, reduction="sum") / total / 2
                (loss * world).backward()
            losses.append(loss.detach())
        if isinstance(engine, Net):
            nn.utils.clip_grad_norm_(engine.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.clip_grad_norm_(0.5)
            engine.step()
            engine.zero_grad()
            with torch.no_grad():  # an evaluation between the steps
                engine(torch.zeros(1, 11))
    return torch.stack(losses)


def assert_equals_one_process(kind, make, group=None):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    reference, model = narrow(), narrow()
    wanted = train(reference, make(reference))
    for p in model.parameters():
        p.data += rank  # the first rank's weights are what counts
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    engine = kind(model, optimizer, group=group)
    losses = train(engine, optimizer, rank, world)
    schedule.step()
    dist.all_reduce(losses, group=group)
    assert_close(losses, wanted, rtol=0, atol=2e-6)
    expected = dict(reference.named_parameters())
    assert_close(gather_whole(engine.shards(), group) or expected, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_without_the_reduction_a_rank_goes_its_own_way(make):
    reference, alone = narrow(), narrow()
    train(reference, make(reference))
    train(alone, make(alone), 0, 2)
    pairs = zip(reference.parameters(), alone.parameters(), strict=True)
    assert max((a - b).abs().max() for a, b in pairs) > 1e-3


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("kind", [Zero1, OverlappedZero1, Zero2, Zero3])
@on_ranks(1, 2, 4)
def test_every_stage_equals_one_process(kind, make):
    assert_equals_one_process(kind, make)


@pytest.mark.parametrize("kind", [Zero1, OverlappedZero1, Zero2, Zero3])
@on_ranks(4)
def test_a_group_of_some_of_the_ranks(kind):
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        assert_equals_one_process(kind, adamw, group)


def formula(stage, world, elements, low):
    """Bytes a rank (arXiv 1910.02054, section 5): parameters, gradients, and K of optimizer state."""
    p, g, k = (2, 2, 12) if low else (4, 4, 8)
    return {
        "parameters": p * elements / (world if stage == 3 else 1),
        "gradients": g * elements / (world if stage >= 2 else 1),
        "optimizer states": k * elements / world,
    }


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1, 2, 4)
def test_what_a_rank_holds_is_the_papers_formula(stage, low):
    world, dtype = dist.get_world_size(), torch.bfloat16 if low else torch.float32
    model = Net().to(dtype)
    elements = sum(p.numel() for p in model.parameters())
    assert 190_000 < elements < 230_000
    engine = STAGES[stage](model, adamw(model))
    x = torch.randn(4, 11, dtype=dtype)
    engine(x).sum().backward()
    engine.step()
    engine.zero_grad()
    with Meter(model, engine.optimizer, engine.resident) as meter:
        engine(x).sum().backward()
    wanted = formula(stage, world, elements, low)
    held = {kind: meter.resident[kind] for kind in wanted}
    # Stage 2 and 3 keep the averaged gradient in fp32, and stage 3 its parameters: their fp32 master is
    # the shard itself. So the kinds differ from the paper's split under bf16, and the sum does not.
    in_fp32 = 2 * elements / world if low and stage == 2 else 0
    assert sum(held.values()) == pytest.approx(sum(wanted.values()) + in_fp32, rel=0.01)
    if not low:
        assert held == pytest.approx(wanted, rel=0.01)
    if stage == 3 and world == 4:
        assert meter.peak["parameters"] > 1.2 * held["parameters"], "blocks were gathered, and are gone"


@pytest.mark.parametrize(("stage", "volumes"), [(1, 2.0), (2, 2.0), (3, 3.0)])
@on_ranks(2, 4)
def test_stages_one_and_two_move_what_data_parallel_moves_and_three_half_as_much_again(stage, volumes):
    """Elements that a rank sends in a step under the ring model, in units of Ψ (N-1)/N."""
    model, world = Net(), dist.get_world_size()
    elements = sum(p.numel() for p in model.parameters())
    engine = STAGES[stage](model, adamw(model), **({"bucket_bytes": 100_000} if stage < 3 else {}))
    with Meter(model, engine.optimizer, engine.resident) as meter:
        engine(torch.randn(4, 11)).sum().backward()
        engine.step()
    # The root unit, gathered once a step, saves stage 3 a little.
    assert meter.bytes_sent / (4 * elements * (world - 1) / world) == pytest.approx(volumes, rel=0.02)


@pytest.mark.parametrize("kind", [Zero1, OverlappedZero1])
@on_ranks(2)
def test_the_overlapped_stage_one_sends_in_the_last_backward_and_no_byte_more(kind):
    model = Net()
    elements = sum(p.numel() for p in model.parameters())
    engine = kind(model, adamw(model), bucket_bytes=100_000)
    begun = []  # reduce-scatters after the first micro-batch, the second, and the step
    with (
        mock.patch.object(dist, "reduce_scatter_single", side_effect=dist.reduce_scatter_single) as reduce,
        Meter(model, engine.optimizer, engine.resident) as meter,
    ):
        with engine.no_sync():
            engine(torch.randn(4, 11)).sum().backward()
        begun.append(reduce.call_count)
        engine(torch.randn(4, 11)).sum().backward()
        begun.append(reduce.call_count)
        engine.step()
        begun.append(reduce.call_count)
    buckets = len(engine.buckets)
    assert buckets > 4
    assert begun == ([0, 0, buckets] if kind is Zero1 else [0, buckets, buckets])
    assert meter.bytes_sent / (4 * elements / 2) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(("prefetch", "most"), [(False, 1), (True, 2)])
@on_ranks(2)
def test_stage_three_frees_what_it_gathered_and_prefetches_one_block(prefetch, most):
    model, whole = Net(), []
    engine = Zero3(model, adamw(model))
    engine.prefetch = prefetch

    def look(*_):
        whole.append(sum(unit.flat.untyped_storage().size() > 0 for unit in engine.units[1:]))

    for layer in model.layers:
        layer[1].register_forward_hook(look)
        layer[1].register_full_backward_hook(look)
    engine(torch.randn(4, 11)).sum().backward()
    assert max(whole) == most
    assert [unit.flat.untyped_storage().size() for unit in engine.units] == [0] * 7


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(1)
def test_an_optimizer_that_needs_whole_matrices_is_refused(stage):
    model = Net(width=8, depth=1)
    with pytest.raises(ConfigError, match=f"^zero{stage} cannot shard Adafactor.*strategy ddp"):
        STAGES[stage](model, torch.optim.Adafactor(model.parameters()))
