"""Frozen weights beside trained ones: gathered but never reduced, no gradient and no state of them, in any dtype."""

import functools
import itertools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.metering.meter import Meter
from course_lib.modeling import lora, nf4
from course_lib.parallel.blocks import blocks
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero import OverlappedZero1, Zero2
from course_lib.parallel.zero3 import Zero3
from tests.torch_versions import FSDP2_ON_CPUS, needs

RANKS = 2
ENGINES = {
    "ddp": lambda model, optimizer: DataParallel(model),
    "zero1": OverlappedZero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp": FullyShardedDataParallel,
    "torch's fsdp": shard_with_torch,
}
KINDS = ["all trained", "adapters", "beside bf16", "beside 4 bits"]


def made(kind):
    """A GPT-2 of two blocks, of which all or the adapters are trained, and its frozen weights in a dtype."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    if kind == "all trained":
        return model
    if kind == "beside 4 bits":
        nf4.quantize_linear(model, lora.linear_layers(model))
    lora.add_lora(model, 4)
    for layer in lora.adapted(model).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    if kind == "beside bf16":
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and "ln_" not in name:  # norms in fp32, as their inputs
                parameter.data = parameter.data.bfloat16()
        for layer in lora.adapted(model).values():
            layer.base.register_forward_pre_hook(lambda module, x: (x[0].bfloat16(),))
            layer.base.register_forward_hook(lambda module, x, out: out.float())
        model.transformer.drop.register_forward_pre_hook(lambda module, x: (x[0].float(),))
        model.lm_head.register_forward_pre_hook(lambda module, x: (x[0].bfloat16(),))
    return model


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)


def rows(step):
    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))


def loss_of(model, ids):
    logits = model(input_ids=ids).logits.float()
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), ids[:, 1:].reshape(-1))


def train(wrapped, optimizer, share=slice(None)):
    """The losses of three steps; of the last one what moved, by collective and dtype, and the meter."""
    losses = []
    for step in range(3):
        moved = Counter()
        with Meter(wrapped, optimizer, getattr(wrapped, "resident", None)) as meter:
            loss = loss_of(wrapped, rows(step)[share])
            loss.backward()
            getattr(wrapped, "step", optimizer.step)()
        for one in meter.collectives:
            moved[one.name, one.dtype] += one.bytes
        getattr(wrapped, "zero_grad", optimizer.zero_grad)()
        losses.append(loss.item())
    return losses, moved, meter


@functools.cache
def alone(kind):
    model = made(kind)
    return train(model, optimizer_of(model))[0]


def on_each_rank(cases):
    """By case: the mean losses of all steps, and of the last what moved, and what was there."""
    found, share = {}, slice(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    for engine, kind in cases:
        model = made(kind)
        optimizer = optimizer_of(model)
        losses, moved, meter = train(ENGINES[engine](model, optimizer), optimizer, share)
        mean = torch.tensor(losses)
        dist.all_reduce(mean)
        found[engine, kind] = (mean / RANKS).tolist(), moved, dict(meter.resident)
    return found


@pytest.fixture(scope="module")
def found(ranks):
    return ranks(RANKS, join=True)(on_each_rank, list(itertools.product(ENGINES, KINDS)))[0]


def counted(model):
    """Elements: trained; frozen in the blocks, and outside of them, by dtype."""
    inside = {p for block in blocks(model).values() for p in block.parameters()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = Counter()
    for p in model.parameters():
        if not p.requires_grad:
            frozen[p in inside, p.dtype] += p.numel()
    return trained, frozen


@needs(FSDP2_ON_CPUS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_are_those_of_one_process(found, engine, kind):
    expected = alone(kind)
    assert found[engine, kind][0] == pytest.approx(expected, abs=1e-3 if kind == "beside bf16" else 2e-6)
    assert abs(expected[-1] - alone("all trained")[-1]) > 1e-3 or kind == "all trained"


@needs(FSDP2_ON_CPUS)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_adapters_alone_move(found, engine):
    """All that is reduced is the adapters; where weights are sharded all are gathered, the blocks' twice."""
    name = "all_reduce" if engine == "ddp" else "reduce_scatter"
    whole = sum(p.numel() for p in made("all trained").parameters())
    assert found[engine, "all trained"][1][name, torch.float32] >= 4 * whole
    for kind in KINDS[1:]:
        trained, frozen = counted(made(kind))
        moved = found[engine, kind][1]
        assert {key for key in moved if key[0] == name} == {(name, torch.float32)}
        assert 4 * trained <= moved[name, torch.float32] <= 4 * trained + 256, "padding"
        gathered = sum(size for (what, _), size in moved.items() if what == "all_gather")
        if engine in ("ddp", "zero1", "zero2"):
            assert gathered <= (0 if engine == "ddp" else 4 * trained + 256)
            continue
        wanted = 2 * 4 * trained + sum(
            dtype.itemsize * numel * (2 if in_block else 1) for (in_block, dtype), numel in frozen.items()
        )
        assert wanted <= gathered <= 1.02 * wanted, (engine, kind)


@needs(FSDP2_ON_CPUS)
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
def test_of_frozen_weights_there_are_no_gradients_and_no_states(found, engine, kind):
    """Per rank: a share of the adapters' gradients and moments, of sharded weights a share in their own dtype."""
    trained, frozen = counted(made(kind))
    resident = found[engine, kind][2]
    states = 8 * trained / RANKS
    assert states <= resident["optimizer states"] <= states + 4 * 64, "two moments, and Adam's counts"
    assert resident["gradients"] <= 4 * trained / (1 if engine == "zero1" else RANKS) + 256
    weights = sum(dtype.itemsize * numel for (_, dtype), numel in frozen.items())
    shares = RANKS if engine in ("zero3", "fsdp", "torch's fsdp") else 1
    wanted = (weights + 4 * trained) / shares
    assert wanted <= resident["parameters"] <= 1.02 * wanted, (engine, kind)
    if kind == "beside 4 bits":
        linear = sum(layer.base.weight.numel() for layer in lora.adapted(made("adapters")).values())
        assert frozen[True, torch.uint8] / linear == pytest.approx(0.516, rel=0.02)
