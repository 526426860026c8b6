"""Pipelines on real ranks: every schedule gives the losses and gradients of the unsplit model, ours and torch's."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.modeling.stages import cut, shared_weights, split_evenly
from course_lib.parallel.pipeline.backward import SplitBackward
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.fitted.search import NAMES, uniform
from course_lib.parallel.pipeline.p2p import P2PChannel
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.tied import sum_shared_gradients
from course_lib.parallel.pipeline.validation import in_flight
from course_lib.parallel.torch_engines.pipeline import TorchPipeline
from tests.modeling import stage_cases
from tests.ranks import on_ranks

WIDTH, ROWS, MICROBATCHES = 8, 16, 8
TOLERANCE = 5e-6  # float32 sums in another order; gradients are of the order of 1
FAMILIES = ["bert", "roberta", "distilbert", "gpt2 causal", "opt causal", "llama causal", "llama"]


class Block(nn.Module):
    """One stage; every stage needs the mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + mask * self.down(torch.tanh(self.up(self.norm(x))))


class Pair(nn.Module):
    """A stage that hands on two tensors, one of them without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, count=None):
        count = torch.zeros(len(x), 1, dtype=torch.int64) if count is None else count
        return torch.tanh(self.linear(x)) + count, count + 1


def build(stages, block=Block):
    torch.manual_seed(0)
    return [block() for _ in range(stages)]


def batch(seed=0, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return x, y, torch.randint(2, (rows, 1), generator=generator).float()


def squares(output, target):
    return (output - target).square().sum()


def whole(stages, batches=((0, ROWS),), scale=1 / MICROBATCHES, frozen=0):
    """Losses by micro-batch and gradients of the unsplit model."""
    blocks = build(stages)
    for block in blocks[:frozen]:
        block.requires_grad_(False)
    losses = []
    for seed, rows in batches:
        for x, y, mask in zip(*(each.tensor_split(MICROBATCHES) for each in batch(seed, rows)), strict=True):
            for block in blocks:
                x = block(x, mask)
            losses.append(squares(x, y))
            (losses[-1] * scale).backward()
    return [loss.item() for loss in losses], gradients(dict(enumerate(blocks)))


def gradients(stages):
    return {
        f"{stage}.{name}": None if parameter.grad is None else parameter.grad.clone()
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
    }


def are_those_of(stages, wanted, tolerance=TOLERANCE):
    """That a rank's stages have gradients which the unsplit model has for them."""
    found = gradients(stages)
    assert_close(found, {name: wanted[name] for name in found}, rtol=0, atol=tolerance)


def local(schedule, group=None, block=Block):
    """This rank's stages."""
    blocks = build(schedule.stages, block)
    return {stage: blocks[stage] for stage in schedule.stages_of(dist.get_rank(group))}


def numbers(losses):
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2, 4)
def test_equals_the_unsplit_model(name):
    schedule, rank = uniform(name, dist.get_world_size(), MICROBATCHES), dist.get_rank()
    losses, wanted = whole(schedule.stages)
    x, y, mask = batch()
    for engine in (PipelineExecutor, TorchPipeline):
        stages = local(schedule)
        done = engine(schedule, stages, squares).step(x, targets=y, mask=mask)
        assert numbers(done.losses) == pytest.approx(losses if rank == schedule.stage_ranks[-1] else [], rel=1e-6)
        are_those_of(stages, wanted)
        if engine is PipelineExecutor:
            assert done.peak == in_flight(schedule)[rank]
            assert tuple(span.action for span in done.spans) == schedule.rows[rank]


def no_gradients(channel, user, take=P2PChannel.take):
    return tuple(torch.zeros_like(each) if user.kind in "BI" else each for each in take(channel, user))


def other_rows(channel, user, take=P2PChannel.take):
    taken = take(channel, user)
    return tuple(each.detach().flip(0).requires_grad_() for each in taken) if user.kind == "F" else taken


@pytest.mark.parametrize(
    ("place", "name", "instead"),
    [(P2PChannel, "take", no_gradients), (P2PChannel, "take", other_rows), (SplitBackward, "weight", lambda _: None)],
    ids=["gradients lost", "rows swapped", "weights forgotten"],
)
@on_ranks(4)
def test_it_differs_without_the_mechanism(place, name, instead):
    schedule, (x, y, mask) = make("zb_h1", 4, MICROBATCHES), batch()
    stages = local(schedule)
    with mock.patch.object(place, name, instead):
        PipelineExecutor(schedule, stages, squares).step(x, targets=y, mask=mask)
    _, wanted = whole(4)
    found = {name: 0 if gradient is None else gradient for name, gradient in gradients(stages).items()}
    apart = max((gradient - wanted[name]).abs().max() for name, gradient in found.items())
    if instead is no_gradients and dist.get_rank() == 3:  # the last stage needs none
        assert apart < TOLERANCE
    else:
        assert apart > 0.01


@on_ranks(4)
def test_gradients_add_up_over_steps_of_any_shape_and_evaluation_leaves_them():
    schedule = make("zbv", 4, MICROBATCHES)
    stages = local(schedule)
    executor = PipelineExecutor(schedule, stages, squares)
    x, y, mask = batch(3, rows=3)
    batches, losses, evaluated = ((0, 16), (1, 11), (2, 16)), [], []
    for seed, rows in batches:
        a, b, c = batch(seed, rows)
        losses += numbers(executor.step(a, targets=b, mask=c, scale=0.5).losses)
        evaluated.append(executor.evaluate(x, targets=y, mask=mask))
    with pytest.raises(ConfigError, match="a batch of 7 rows for 8 micro-batches"):
        executor.step(*batch(0, 7)[:1], targets=y, mask=batch(0, 7)[2])
    with pytest.raises(ConfigError, match=r"a batch of tensors of \[3, 16\] rows"):
        executor.evaluate(x, mask=batch()[2])
    expected, wanted = whole(8, batches, scale=0.5)
    are_those_of(stages, wanted, 10 * TOLERANCE)
    assert [each.peak for each in evaluated] == [0, 0, 0]
    if dist.get_rank() == 0:  # of a V, the first rank has the last stage
        assert losses == pytest.approx(expected, rel=1e-5)
        output = functools.reduce(lambda hidden, block: block(hidden, mask), build(8), x)
        for each in evaluated:
            assert_close(torch.cat(each.outputs), output, rtol=1e-5, atol=1e-6)
        assert sum(numbers(evaluated[0].losses)) == pytest.approx(squares(output, y).item(), rel=1e-5)


@on_ranks(4)
def test_frozen_stages_get_and_send_no_gradient():
    schedule, (x, y, mask) = make("zbv", 4, MICROBATCHES), batch()
    stages = local(schedule)
    for stage, block in stages.items():
        block.requires_grad_(stage >= 2)
    with Meter() as meter:
        PipelineExecutor(schedule, stages, squares).step(x, targets=y, mask=mask)
    _, wanted = whole(8, frozen=2)
    assert wanted["1.up.weight"] is None
    are_those_of(stages, wanted)
    # Seven boundaries, one within a rank; gradients cross those above stage 2. A form is told in two messages.
    sent = torch.tensor(meter.count("send"))
    dist.all_reduce(sent)
    assert sent == MICROBATCHES * (6 + 4) + 2 * 6


@on_ranks(4)
def test_stages_hand_on_several_tensors():
    schedule, (x, y, _) = make("zbv", 4, MICROBATCHES), batch()
    stages = local(schedule, block=Pair)
    done = PipelineExecutor(schedule, stages, squares).step(x, targets=y)
    blocks, losses = build(8, Pair), []
    for hidden, target in zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True):
        count = None
        for block in blocks:
            hidden, count = block(hidden, count)
        losses.append(squares(hidden, target))
        (losses[-1] / MICROBATCHES).backward()
    assert numbers(done.losses) == pytest.approx(numbers(losses) if dist.get_rank() == 0 else [], rel=1e-6)
    are_those_of(stages, gradients(dict(enumerate(blocks))), 10 * TOLERANCE)


@on_ranks(4)
def test_a_rank_holds_no_more_activations_than_the_table_says():
    rank, block = dist.get_rank(), build(1)[0]
    with Meter(block) as meter:
        block(torch.zeros(ROWS // MICROBATCHES, WIDTH, requires_grad=True), torch.ones(ROWS // MICROBATCHES, 1)).sum()
    of_one, of_mask = meter.peak["activations"], 4 * ROWS  # the batch's mask, of which each micro-batch saves a view
    held = {}
    for name in KINDS:
        schedule, (x, y, mask) = make(name, 4, MICROBATCHES), batch()
        stages = local(schedule)
        executor = PipelineExecutor(schedule, stages, squares)
        executor.step(x, targets=y, mask=mask)
        with Meter(nn.ModuleList(stages.values())) as meter:
            executor.step(x, targets=y, mask=mask)
        held[name] = meter.peak["activations"]
        if rank in (1, 2):  # the others hold the batch's inputs or targets besides
            most = in_flight(schedule)[rank]
            assert 0 <= held[name] - most * of_one <= of_mask, name
            assert held[name] < held["gpipe"] or most >= MICROBATCHES, name


@functools.cache
def whole_model(family):
    model = stage_cases.build(family)
    inputs, targets = stage_cases.batch(family)
    losses = [
        stage_cases.loss_sum(model(**dict(zip(inputs, parts, strict=True))).logits, target)
        for *parts, target in zip(*(each.tensor_split(4) for each in (*inputs.values(), targets)), strict=True)
    ]
    (sum(losses) * 0.25).backward()
    return numbers(losses), {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    ("name", "engine"), [("1f1b", PipelineExecutor), ("zbv", PipelineExecutor), ("zbv", TorchPipeline)]
)
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_hugging_face_models_equal_the_unsplit_one(family, name, engine):
    """Real models cut by cost, before their tied weights are summed and after."""
    model, schedule = stage_cases.build(family), make(name, 2, 4)
    inputs, targets = stage_cases.batch(family)
    split = split_evenly(model, schedule.stages, by="parameters")
    stages = cut(model, split, schedule.stages_of(dist.get_rank()))
    done = engine(schedule, stages, stage_cases.loss_sum).step(targets=targets, scale=0.25, **inputs)
    losses, wanted = whole_model(family)
    last = dist.get_rank() == schedule.stage_ranks[-1]
    assert numbers(done.losses) == pytest.approx(losses if last else [], rel=1e-5)
    own = {name for stage in stages.values() for name, _ in stage.model.named_parameters()}
    scale = max(each.abs().max().item() for each in wanted.values() if each is not None)

    def found():
        return {name: None if (grad := model.get_parameter(name).grad) is None else grad.clone() for name in own}

    before = found()
    sum_shared_gradients(shared_weights(model, split), stages, schedule.stage_ranks, None)
    after = found()
    assert_close(after, {name: wanted[name] for name in own}, rtol=0, atol=1e-6 * scale)
    if "causal" in family and name == "1f1b":  # the embedding and the head live on different ranks
        moved = [(after[name] - before[name]).abs().max() for name in own if after[name] is not None]
        assert max(moved) > 0.01 * scale


@on_ranks(4)
def test_a_table_for_other_ranks_or_stages_is_refused():
    schedule = make("1f1b", 4, 4)
    with pytest.raises(ConfigError, match="1f1b is a table for 2 ranks, and there are 4"):
        PipelineExecutor(make("1f1b", 2, 4), local(schedule), squares)
    with pytest.raises(ConfigError, match=r"was given stages \[9\], and 1f1b has \[\d\] there"):
        PipelineExecutor(schedule, {9: Block()}, squares)


class Gives(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"hidden": 1}, "a dict"),
        (None, "a NoneType"),
        ((torch.ones(1), None), "a tuple with a NoneType"),
        ([torch.ones(1)], "a list"),
    ],
)
@on_ranks(1)
def test_a_stage_returns_tensors(what, told):
    executor = PipelineExecutor(make("gpipe", 1, 2), {0: Gives(what)}, squares)
    with pytest.raises(ConfigError, match=f"^stage 0 returned {told}: let a stage return a tensor, or a tuple of tens"):
        executor.step(torch.ones(2, 3), targets=torch.ones(2, 3))


class TakesScale(nn.Module):
    def forward(self, x, scale=None, targets=None):
        return x * scale + targets


@on_ranks(1)
def test_extras_may_be_named_as_arguments_of_a_step_are():
    executor = PipelineExecutor(make("gpipe", 1, 2), {0: TakesScale()}, lambda output, target: output.sum() + target)
    extras = {"scale": torch.full((2, 3), 5.0), "targets": torch.full((2, 3), 0.5)}
    x = torch.ones(2, 3, requires_grad=True)
    done = executor.step(x, targets=torch.zeros(2, 1), scale=2.0, named=extras)
    assert numbers(done.losses) == [16.5, 16.5]  # 3 * (1 * 5 + 0.5)


def test_the_first_half_of_the_backward_computes_no_gradient_of_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    model.append(model[0])  # used twice
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    wanted = copy.deepcopy([parameter.grad for parameter in model.parameters()])
    with FlopCounterMode(display=False) as forward:
        output = model(x)
    model.zero_grad()
    split = SplitBackward([get_gradient_edge(output)], [x])
    with FlopCounterMode(display=False) as first:
        (gradient,) = split.input([torch.ones_like(output)])
    assert torch.equal(gradient, x.grad) and all(parameter.grad is None for parameter in model.parameters())
    with FlopCounterMode(display=False) as second:
        split.weight()
    assert_close([parameter.grad for parameter in model.parameters()], wanted, rtol=1e-5, atol=1e-8)
    once = forward.get_total_flops() // 3  # one product; the weight that is used twice walks between its uses again
    assert first.get_total_flops() == 3 * once and second.get_total_flops() <= (3 + 2) * once
