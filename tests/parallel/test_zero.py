"""ZeRO from scratch: what each stage holds is the paper's formula, what it moves the paper's volume, and it frees."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.metering.meter import Meter
from course_lib.parallel.zero import OverlappedZero1, Zero1, Zero2
from course_lib.parallel.zero3 import Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
SIZES = (1, 2, 4)


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


def adamw(model, **options):
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **({"lr": 1e-2, "eps": 1e-3} | options))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def groups_of_all_sizes():
    """World sizes 1, 2 and 4 in one launch of four; every rank has to make every group."""
    dist.init_process_group("gloo")
    return {n: dist.new_group(range(n)) for n in SIZES}


def rows_of(rank, world, step, micro=0):
    """The rank's share of 12 rows, the last step's being 10."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    x, y = torch.randn(12, 11, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    last = 10 if step == 3 else 12
    return x[:last][rank::world], y[:last][rank::world], last


def loss_of(module, rows, world):
    x, y, total = rows
    return nn.functional.cross_entropy(module(x).float(), y, reduction="sum") / total * world / 2


def train(engine, optimizer, group, rank, world):
    """Four steps of two micro-batches, clipped; gives the losses."""
    losses = []
    for step in range(4):
        for micro in range(2):
            whole = isinstance(engine, OverlappedZero1) and micro == 0
            with engine.no_sync() if whole else contextlib.nullcontext():
                loss = loss_of(engine, rows_of(rank, world, step, micro), world)
                loss.backward()
            total = loss.detach() / world
            dist.all_reduce(total, group=group)
            losses.append(total.item())
        if isinstance(engine, Zero1 | Zero3):
            engine.clip_grad_norm_(0.5)
            engine.step()
            engine.zero_grad()
        else:
            nn.utils.clip_grad_norm_(engine.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(engine, Zero1 | Zero3):  # an evaluation between the steps
            with torch.no_grad():
                engine(torch.zeros(1, 11))
    return losses


def whole(engine, group):
    from course_lib.parallel.sharding import gather_whole

    return gather_whole(engine.shards(), group)


def parity():
    """Largest differences from one process, by stage, world size and optimizer; and those of ranks left alone."""
    groups, found = groups_of_all_sizes(), {}
    for make in (adamw, sgd):
        torch.manual_seed(0)
        model = Net(width=17, depth=3)
        model.layers[1][0].weight.requires_grad_(False)
        reference = copy.deepcopy(model)
        optimizer = make(reference)
        wanted = train(reference, optimizer, groups[1], 0, 1) if dist.get_rank() == 0 else []
        for world, group in groups.items():
            if dist.get_rank() >= world:
                continue
            for stage, kind in (STAGES | {"1 overlapped": OverlappedZero1}).items():
                own = copy.deepcopy(model)
                for p in own.parameters():
                    p.data += dist.get_rank()  # the first rank's weights are what counts
                optimizer = make(own)
                schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
                engine = kind(own, optimizer, group=group)
                losses = train(engine, optimizer, group, dist.get_rank(), world)
                schedule.step()
                weights = whole(engine, group)
                if dist.get_rank() == 0:
                    far = max((weights[n] - p.detach()).abs().max().item() for n, p in reference.named_parameters())
                    found[stage, world, make.__name__] = (
                        max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
                        far,
                    )
        if dist.get_rank() == 0:
            alone = copy.deepcopy(model)
            optimizer = make(alone)
            for step in range(4):
                for micro in range(2):
                    loss_of(alone, rows_of(0, 2, step, micro), 2).backward()
                nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            found["alone", make.__name__] = max(
                (q - p).abs().max().item() for p, q in zip(reference.parameters(), alone.parameters(), strict=True)
            )
    return found


def test_every_stage_equals_one_process():
    found = launch(parity, num_processes=4, timeout=600)[0]
    alone = [value for key, value in found.items() if key[0] == "alone"]
    cells = [value for key, value in found.items() if key[0] != "alone"]
    assert len(alone) == 2 and min(alone) > 1e-3, "without the reduction a rank goes its own way"
    assert len(cells) == 4 * 3 * 2
    assert max(loss for loss, _ in cells) < 2e-6 and max(weight for _, weight in cells) < 2e-6


def formula(stage, world, elements, low):
    """Bytes a rank (arXiv 1910.02054, section 5): parameters, gradients, and K of optimizer state."""
    p, g, k = (2, 2, 12) if low else (4, 4, 8)
    return {
        "parameters": p * elements / (world if stage == 3 else 1),
        "gradients": g * elements / (world if stage >= 2 else 1),
        "optimizer states": k * elements / world,
    }


def held():
    """Model-state bytes after backward, by stage, world size and precision, on this rank."""
    groups, found = groups_of_all_sizes(), {}
    for world, group in groups.items():
        if dist.get_rank() >= world:
            continue
        for low in (False, True):
            for stage, kind in STAGES.items():
                torch.manual_seed(0)
                model = Net().to(torch.bfloat16 if low else torch.float32)
                elements = sum(p.numel() for p in model.parameters())
                engine = kind(model, adamw(model), group=group)
                x = torch.randn(4, 11, dtype=torch.bfloat16 if low else torch.float32)
                engine(x).sum().backward()
                engine.step()
                engine.zero_grad()
                with Meter(model, engine.optimizer, engine.resident) as meter:
                    engine(x).sum().backward()
                found[stage, world, low] = elements, meter.resident, meter.peak
    return found


def test_what_a_rank_holds_is_the_papers_formula():
    cells = 0
    for rank, found in enumerate(launch(held, num_processes=4, timeout=400)):
        for (stage, world, low), (elements, resident, peak) in found.items():
            assert rank < world and 190_000 < elements < 230_000
            wanted = formula(stage, world, elements, low)
            total = sum(resident[kind] for kind in wanted)
            # Stage 2 and 3 keep the averaged gradient in fp32, and stage 3 its parameters: their fp32 master is
            # the shard itself. So the kinds differ from the paper's split under bf16, and the sum does not.
            exact = wanted["parameters"] + wanted["gradients"] + wanted["optimizer states"]
            if low and stage == 2:
                exact += 2 * elements / world
            assert total == pytest.approx(exact, rel=0.01), (stage, world, low)
            if not low:
                assert {kind: resident[kind] for kind in wanted} == pytest.approx(wanted, rel=0.01)
            if stage == 3 and world == 4:
                assert peak["parameters"] > 1.2 * resident["parameters"], "blocks were gathered, and are gone"
            cells += 1
    assert cells == (1 + 2 + 4) * 2 * 3


def moved():
    """Elements a rank sends in a step under the ring model, in units of Ψ (N-1)/N, by stage and world size."""
    groups, found = groups_of_all_sizes(), {}
    for world in (2, 4):
        if dist.get_rank() >= world:
            continue
        for stage, kind in STAGES.items():
            model = Net()
            elements = sum(p.numel() for p in model.parameters())
            engine = kind(model, adamw(model), group=groups[world], **({"bucket_bytes": 100_000} if stage < 3 else {}))
            with Meter(model, engine.optimizer, engine.resident) as meter:
                engine(torch.randn(4, 11)).sum().backward()
                engine.step()
            found[stage, world] = meter.bytes_sent / (4 * elements * (world - 1) / world)
    return found


def test_stages_one_and_two_move_what_data_parallel_moves_and_three_half_as_much_again():
    found = launch(moved, num_processes=4, timeout=400)[0]
    assert len(found) == 6
    for (stage, _), volumes in found.items():
        # The root unit, gathered once a step, saves stage 3 a little.
        assert volumes == pytest.approx({1: 2.0, 2: 2.0, 3: 3.0}[stage], rel=0.02)


def sent_under_way(kind):
    """Reduce-scatters begun within the backwards of two micro-batches and after them, and all bytes in units of Ψ."""
    dist.init_process_group("gloo")
    model = Net()
    elements = sum(p.numel() for p in model.parameters())
    engine = kind(model, adamw(model), bucket_bytes=100_000)
    begun, real = [], dist.reduce_scatter_single
    with (
        mock.patch.object(dist, "reduce_scatter_single", lambda *a, **k: begun.append(1) or real(*a, **k)),
        Meter(model, engine.optimizer, engine.resident) as meter,
    ):
        with engine.no_sync():
            engine(torch.randn(4, 11)).sum().backward()
        first = len(begun)
        engine(torch.randn(4, 11)).sum().backward()
        second = len(begun) - first
        engine.step()
    return (first, second, len(begun) - first - second), len(engine.buckets), meter.bytes_sent / (4 * elements / 2)


def test_the_overlapped_stage_one_sends_in_the_last_backward_and_no_byte_more():
    (first, second, after), buckets, volume = launch(sent_under_way, OverlappedZero1, num_processes=2, timeout=200)[0]
    assert buckets > 4 and (first, second, after) == (0, buckets, 0) and volume == pytest.approx(2.0, rel=0.02)
    moments, buckets, volume = launch(sent_under_way, Zero1, num_processes=2, timeout=200)[0]
    assert moments == (0, 0, buckets) and volume == pytest.approx(2.0, rel=0.02)


def gathered(prefetch):
    """The most blocks that are whole at once while forward and backward run."""
    dist.init_process_group("gloo")
    model = Net()
    engine = Zero3(model, adamw(model))
    engine.prefetch = prefetch
    most = 0

    def look(*_):
        nonlocal most
        most = max(most, sum(unit.flat.untyped_storage().size() > 0 for unit in engine.units[1:]))

    for layer in model.layers:
        layer[1].register_forward_hook(look)
        layer[1].register_full_backward_hook(look)
    engine(torch.randn(4, 11)).sum().backward()
    left = [unit.flat.untyped_storage().size() for unit in engine.units]
    return most, left


def test_stage_three_frees_what_it_gathered_and_prefetches_one_block():
    assert launch(gathered, False, num_processes=2, timeout=200)[0] == (1, [0] * 7)
    assert launch(gathered, True, num_processes=2, timeout=200)[0] == (2, [0] * 7)


def with_checkpointing(stage):
    """A BERT classifier with recomputation against the same without and on one process: the largest difference."""
    dist.init_process_group("gloo")
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=99,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    plain = BertForSequenceClassification(config)
    sharded = copy.deepcopy(plain)
    sharded.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    theirs, ours = sgd(plain), sgd(sharded)
    engine = STAGES[stage](sharded, ours)
    for step in range(3):
        ids = torch.randint(0, 99, (4, 7), generator=torch.Generator().manual_seed(step))
        mine = ids[dist.get_rank() :: 2]
        plain(ids).logits.square().mean().backward()
        theirs.step()
        theirs.zero_grad()
        engine(mine).logits.square().mean().backward()
        engine.step()
        engine.zero_grad()
    weights = whole(engine, None)
    wanted = dict(plain.named_parameters())
    return max((weights[name] - wanted[name]).abs().max().item() for name in weights) if weights else None


@pytest.mark.parametrize("stage", STAGES)
def test_under_activation_checkpointing(stage):
    assert launch(with_checkpointing, stage, num_processes=2, timeout=400)[0] < 2e-6


def refused():
    dist.init_process_group("gloo")
    said = []
    for kind in STAGES.values():
        model = Net(width=8, depth=1)
        with pytest.raises(ConfigError) as error:
            kind(model, torch.optim.Adafactor(model.parameters()))
        said.append(str(error.value))
    return said


def test_an_optimizer_that_needs_whole_matrices_is_refused():
    for stage, line in enumerate(launch(refused, num_processes=1)[0], start=1):
        assert line.startswith(f"zero{stage} cannot shard Adafactor") and "strategy ddp" in line
