"""Pipelines on real ranks: every schedule gives the losses and gradients of the unsplit model, ours and torch's."""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
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

WIDTH, ROWS, MICROBATCHES = 8, 16, 8
TOLERANCE = 5e-6  # float32 sums in another order; gradients are of the order of 1
FAMILIES = ["bert", "roberta", "distilbert", "gpt2 causal", "opt causal", "llama causal", "llama"]
RUNS = [("1f1b", PipelineExecutor), ("zbv", PipelineExecutor), ("zbv", TorchPipeline)]


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


@functools.cache
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


def furthest(some, others):
    """The largest difference; a gradient that is missing is far from one that is not."""
    assert some.keys() == others.keys() and some
    return max(
        0.0 if a is b is None else float("inf") if a is None or b is None else (a - b).abs().max().item()
        for a, b in ((some[name], others[name]) for name in some)
    )


def local(schedule, group=None, block=Block):
    """This rank's stages."""
    blocks = build(schedule.stages, block)
    return {stage: blocks[stage] for stage in schedule.stages_of(dist.get_rank(group))}


def run(schedule, group=None, engine=PipelineExecutor):
    stages = local(schedule, group)
    x, y, mask = batch()
    done = engine(schedule, stages, squares, group).step(x, targets=y, mask=mask)
    return {
        "losses": [loss.item() for loss in done.losses],
        "gradients": gradients(stages),
        "peak": done.peak,
        "actions": [span.action for span in done.spans],
    }


def broken(schedule):
    """The same without one of the mechanisms: a gradient message, the weights' half, the order of micro-batches."""
    take = P2PChannel.take
    lost = mock.patch.object(
        P2PChannel,
        "take",
        lambda mail, user: tuple(torch.zeros_like(each) if user.kind in "BI" else each for each in take(mail, user)),
    )
    forgotten = mock.patch.object(SplitBackward, "weight", lambda _: None)
    swapped = mock.patch.object(
        P2PChannel,
        "take",
        lambda mail, user: tuple(
            each.detach().flip(0).requires_grad_() if user.kind == "F" else each for each in take(mail, user)
        ),
    )
    found = {}
    for name, patch in {"gradients lost": lost, "weights forgotten": forgotten, "rows swapped": swapped}.items():
        with patch:
            found[name] = run(schedule)
    return found


def several_batches():
    """Steps of two shapes without clearing gradients, with an evaluation of 3 rows between them."""
    schedule = make("zbv", 4, MICROBATCHES)
    stages = local(schedule)
    executor = PipelineExecutor(schedule, stages, squares)
    x, y, mask = batch(3, rows=3)
    losses, evaluated = [], []
    for seed, rows in ((0, 16), (1, 11), (2, 16)):
        a, b, c = batch(seed, rows)
        losses += [loss.item() for loss in executor.step(a, targets=b, mask=c, scale=0.5).losses]
        evaluated.append(executor.evaluate(x, targets=y, mask=mask))
    outputs = [torch.cat(each.outputs) if each.outputs else None for each in evaluated]
    with pytest.raises(ConfigError, match="a batch of 7 rows for 8 micro-batches"):
        executor.step(*batch(0, 7)[:1], targets=y, mask=batch(0, 7)[2])
    with pytest.raises(ConfigError, match=r"a batch of tensors of \[3, 16\] rows"):
        executor.evaluate(x, mask=batch()[2])
    return {
        "losses": losses,
        "outputs": outputs,
        "gradients": gradients(stages),
        "peaks": [e.peak for e in evaluated],
        "evaluation": [loss.item() for loss in evaluated[0].losses],
    }


def with_frozen(schedule):
    """The first stages have nothing to train: no gradient comes back to them."""
    stages = local(schedule)
    for stage, block in stages.items():
        block.requires_grad_(stage >= 2)
    x, y, mask = batch()
    with Meter() as meter:
        PipelineExecutor(schedule, stages, squares).step(x, targets=y, mask=mask)
    return gradients(stages), meter.count("send")


def pairs(schedule):
    stages = local(schedule, block=Pair)
    x, y, _ = batch()
    done = PipelineExecutor(schedule, stages, squares).step(x, targets=y)
    return [loss.item() for loss in done.losses], gradients(stages)


def metered(schedule):
    """Bytes of activations at the peak of a step, and those of one micro-batch through one stage."""
    stages = local(schedule)
    executor = PipelineExecutor(schedule, stages, squares)
    x, y, mask = batch()
    executor.step(x, targets=y, mask=mask)
    with Meter(nn.ModuleList(stages.values())) as meter:
        executor.step(x, targets=y, mask=mask)
    return meter.peak["activations"]


def one_microbatch():
    block, rows = build(1)[0], ROWS // MICROBATCHES
    with Meter(block) as meter:
        block(torch.zeros(rows, WIDTH, requires_grad=True), torch.ones(rows, 1)).sum()
    return meter.peak["activations"]


def hugging_face(family, schedule, engine, group):
    """Gradients of a real model cut by cost, its tied weights summed or not."""
    model = stage_cases.build(family)
    inputs, targets = stage_cases.batch(family)
    split = split_evenly(model, schedule.stages, by="parameters")
    stages = cut(model, split, schedule.stages_of(dist.get_rank(group)))
    done = engine(schedule, stages, stage_cases.loss_sum, group).step(targets=targets, scale=0.25, **inputs)
    names = {stage: {name for name, _ in part.model.named_parameters()} for stage, part in stages.items()}

    def found():
        own = dict(model.named_parameters(remove_duplicate=False))
        return {
            name: None if own[name].grad is None else own[name].grad.clone() for name in set().union(*names.values())
        }

    before = found()
    sum_shared_gradients(shared_weights(model, split), stages, schedule.stage_ranks, group)
    return {"losses": [loss.item() for loss in done.losses], "before": before, "after": found()}


def refusals():
    schedule = make("1f1b", 4, 4)
    stages = local(schedule)
    with pytest.raises(ConfigError, match="1f1b is a table for 2 ranks, and there are 4"):
        PipelineExecutor(make("1f1b", 2, 4), stages, squares)
    with pytest.raises(ConfigError, match=r"was given stages \[9\], and 1f1b has \[\d\] there"):
        PipelineExecutor(schedule, {9: Block()}, squares)
    return True


def on_rank():
    dist.init_process_group("gloo")
    groups = {2: dist.new_group([0, 1]), 4: dist.group.WORLD}
    mine = {ranks: group for ranks, group in groups.items() if dist.get_rank() < ranks}
    found = {}
    for ranks, group in mine.items():
        for name in NAMES:
            schedule = uniform(name, ranks, MICROBATCHES)
            found[name, ranks, "ours"] = run(schedule, group)
            found[name, ranks, "torch's"] = run(schedule, group, TorchPipeline)
    if 2 in mine:
        found["hugging face"] = {
            (family, name, engine.__name__): hugging_face(family, make(name, 2, 4), engine, mine[2])
            for family in FAMILIES
            for name, engine in RUNS
        }
    found["activations"] = {name: metered(make(name, 4, MICROBATCHES)) for name in KINDS}
    return found | {
        "broken": broken(make("zb_h1", 4, MICROBATCHES)),
        "several": several_batches(),
        "frozen": with_frozen(make("zbv", 4, MICROBATCHES)),
        "pairs": pairs(make("zbv", 4, MICROBATCHES)),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def ranks():
    return launch(on_rank, num_processes=4, timeout=600)


def merged(outcomes):
    return {key: value for outcome in outcomes for key, value in outcome.items()}


@pytest.mark.parametrize("engine", ["ours", "torch's"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_unsplit_model(ranks, name, count, engine):
    schedule = uniform(name, count, MICROBATCHES)
    losses, wanted = whole(schedule.stages)
    outcomes = [rank[name, count, engine] for rank in ranks[:count]]
    last = outcomes[schedule.stage_ranks[-1]]
    assert last["losses"] == pytest.approx(losses, rel=1e-6) and len(losses) == MICROBATCHES
    assert furthest(merged(outcome["gradients"] for outcome in outcomes), wanted) < TOLERANCE
    if engine == "ours":
        assert tuple(outcome["peak"] for outcome in outcomes) == in_flight(schedule)
        assert tuple(tuple(outcome["actions"]) for outcome in outcomes) == schedule.rows


def test_all_schedules_were_run(ranks):
    runs = [key for key in ranks[0] if isinstance(key, tuple)]
    assert len(KINDS) == 9 and len(NAMES) == 13 and len(runs) == 2 * (13 + 13)


@pytest.mark.parametrize("name", ["gradients lost", "weights forgotten", "rows swapped"])
def test_it_differs_without_the_mechanism(ranks, name):
    _, wanted = whole(4)
    found = merged(rank["broken"][name]["gradients"] for rank in ranks)
    assert furthest(found, wanted) > 0.01
    last = {key: value for key, value in found.items() if key.startswith("3")}
    if name == "gradients lost":  # the last stage needs none
        assert furthest(last, {key: wanted[key] for key in last}) < TOLERANCE


def test_gradients_add_up_over_steps_of_any_shape_and_evaluation_leaves_them(ranks):
    losses, wanted = whole(8, ((0, 16), (1, 11), (2, 16)), scale=0.5)
    found = [rank["several"] for rank in ranks]
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-5)  # of a V, the first rank has the last stage
    assert furthest(merged(each["gradients"] for each in found), wanted) < 10 * TOLERANCE
    x, y, mask = batch(3, rows=3)
    for block in build(8):
        x = block(x, mask)
    assert len(found[0]["outputs"]) == 3 and all(torch.allclose(output, x, atol=1e-6) for output in found[0]["outputs"])
    assert sum(found[0]["evaluation"]) == pytest.approx(squares(x, y).item(), rel=1e-5)
    assert [each["peaks"] for each in found] == [[0, 0, 0]] * 4


def test_frozen_stages_get_and_send_no_gradient(ranks):
    _, wanted = whole(8, frozen=2)
    found = merged(rank["frozen"][0] for rank in ranks)
    assert furthest(found, wanted) < TOLERANCE and found["1.up.weight"] is None
    # Seven boundaries, one within a rank; gradients cross those above stage 2. A form is told in two messages.
    sent = sum(rank["frozen"][1] for rank in ranks)
    assert sent == MICROBATCHES * (6 + 4) + 2 * 6


def test_stages_hand_on_several_tensors(ranks):
    blocks, losses = build(8, Pair), []
    for x, y in zip(*(each.tensor_split(MICROBATCHES) for each in batch()[:2]), strict=True):
        count = None
        for block in blocks:
            x, count = block(x, count)
        losses.append(squares(x, y))
        (losses[-1] / MICROBATCHES).backward()
    assert ranks[0]["pairs"][0] == pytest.approx([loss.item() for loss in losses], rel=1e-6)
    assert furthest(merged(rank["pairs"][1] for rank in ranks), gradients(dict(enumerate(blocks)))) < 10 * TOLERANCE


@pytest.mark.parametrize("name", KINDS)
def test_a_rank_holds_no_more_activations_than_the_table_says(ranks, name):
    schedule = make(name, 4, MICROBATCHES)
    mask = 4 * ROWS  # the whole batch's, of which each micro-batch saves a view
    each = one_microbatch()
    for rank in (1, 2):  # the others hold the batch's inputs or targets besides
        held = ranks[rank]["activations"][name]
        assert 0 <= held - in_flight(schedule)[rank] * each <= mask
        assert held < ranks[rank]["activations"]["gpipe"] or in_flight(schedule)[rank] >= MICROBATCHES


@functools.cache
def whole_model(family):
    model = stage_cases.build(family)
    inputs, targets = stage_cases.batch(family)
    losses = [
        stage_cases.loss_sum(model(**dict(zip(inputs, parts, strict=True))).logits, target)
        for *parts, target in zip(*(each.tensor_split(4) for each in (*inputs.values(), targets)), strict=True)
    ]
    (sum(losses) * 0.25).backward()
    found = {name: each.grad for name, each in model.named_parameters(remove_duplicate=False)}
    return (
        [loss.item() for loss in losses],
        found,
        max(each.abs().max().item() for each in found.values() if each is not None),
    )


@pytest.mark.parametrize(("name", "engine"), RUNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_models_equal_the_unsplit_one(ranks, family, name, engine):
    losses, wanted, scale = whole_model(family)
    outcomes = [rank["hugging face"][family, name, engine.__name__] for rank in ranks[:2]]
    assert outcomes[1 if name == "1f1b" else 0]["losses"] == pytest.approx(losses, rel=1e-5)
    for outcome in outcomes:
        assert furthest(outcome["after"], {key: wanted[key] for key in outcome["after"]}) < 1e-6 * scale
    if "causal" in family and name == "1f1b":  # the embedding and the head live on different ranks
        assert any(furthest(outcome["before"], outcome["after"]) > 0.01 * scale for outcome in outcomes)


class GivesScale(nn.Module):
    """Takes extras that are named as arguments of a step are."""

    def forward(self, x, scale=None, targets=None):
        return x * scale + targets


class GivesNoTensor(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what


def on_one_rank():
    """What a step says to stages that return no tensors, and its loss with extras of its own arguments' names."""
    dist.init_process_group("gloo")
    said = []
    for what in ({"hidden": 1}, None, (torch.ones(1), None), [torch.ones(1)]):
        executor = PipelineExecutor(make("gpipe", 1, 2), {0: GivesNoTensor(what)}, squares)
        with pytest.raises(ConfigError) as error:
            executor.step(torch.ones(2, 3), targets=torch.ones(2, 3))
        said.append(str(error.value))
    executor = PipelineExecutor(make("gpipe", 1, 2), {0: GivesScale()}, lambda output, target: output.sum() + target)
    x = torch.ones(2, 3, requires_grad=True)
    extras = {"scale": torch.full((2, 3), 5.0), "targets": torch.full((2, 3), 0.5)}
    done = executor.step(x, targets=torch.zeros(2, 1), scale=2.0, named=extras)
    return said, [loss.item() for loss in done.losses]


def test_what_a_stage_may_not_return_and_extras_of_any_name():
    said, losses = launch(on_one_rank, num_processes=1, timeout=200)[0]
    assert [line.partition(":")[0] for line in said] == [
        "stage 0 returned a dict",
        "stage 0 returned a NoneType",
        "stage 0 returned a tuple with a NoneType",
        "stage 0 returned a list",
    ]
    assert all(line.endswith("let a stage return a tensor, or a tuple of tensors") for line in said)
    assert losses == [16.5, 16.5]  # 3 * (1 * 5 + 0.5)


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
    assert all(torch.allclose(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))
    once = forward.get_total_flops() // 3  # one product; the weight that is used twice walks between its uses again
    assert first.get_total_flops() == 3 * once and second.get_total_flops() <= (3 + 2) * once


def test_a_first_stage_has_all_its_backward_in_the_second_half():
    model = nn.Linear(8, 8)
    output = model(torch.randn(4, 8))
    split = SplitBackward([get_gradient_edge(output)], [])
    assert split.input([torch.ones_like(output)]) == () and model.weight.grad is None
    split.weight()
    assert model.bias.grad.tolist() == [4.0] * 8
