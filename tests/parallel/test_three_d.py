"""DP x PP x TP at 2 x 2 x 2 on eight ranks, against one process with the same global batches."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.launching.launch import launch
from course_lib.lessons.tensor import hybrid as lab
from course_lib.metering.meter import Meter, ring_bytes
from course_lib.parallel import tensor_parallel
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.topology import RankGrid

GRID = RankGrid(dp=2, pp=2, tp=2)
LAYERS, WIDTH, ROWS, TOKENS, MICROBATCHES, STEPS = 4, 32, 8, 8, 4, 2
CASES = {  # schedule, options of the model, options of Hybrid
    "1f1b": ("1f1b", {}, {}),
    "1f1b, vocabulary whole": ("1f1b", {}, {"split_vocabulary": False}),
    "1f1b, untied": ("1f1b", {"tied": False}, {}),
    "zbv": ("zbv", {}, {}),
}
LEFT_OUT = {
    "dp": mock.patch.object(lab, "average_gradients", lambda *_: None),
    "pp": mock.patch.object(lab, "sum_shared_gradients", lambda *_: None),
    "tp": mock.patch.object(tensor_parallel, "reduce", lambda hidden, _: hidden),
}


def model(**options):
    whole = lab.tiny_gpt2(LAYERS, WIDTH, length=TOKENS, **options).double()
    for name, parameter in whole.named_parameters():  # biases of 0 and norms of 1 would hide much
        if "bias" in name or "ln_" in name:
            nn.init.normal_(parameter, 1.0 if "weight" in name else 0.0, 0.2)
    return whole


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@functools.cache
def one_process(tied=True):
    """Losses, norms, first gradients and last weights of the whole model."""
    whole = model(tied=tied)
    optimizer = optimizer_of(whole.parameters())
    found: dict = {"losses": [], "norms": []}
    for step in range(STEPS):
        tokens, targets = lab.batch(ROWS, TOKENS, step)
        loss = lab.next_token_loss(whole(input_ids=tokens).logits, targets)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item())
        if step == 0:
            found["gradients"] = {name: p.grad.clone() for name, p in whole.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {"weights": {name: p.detach() for name, p in whole.named_parameters()}}


def apart(mine, theirs):
    assert set(mine) == set(theirs)
    return max((mine[name] - each).abs().max().item() for name, each in theirs.items())


def on_the_grid(case, steps=STEPS):
    """The same on eight ranks, as distances from one process; and bytes that this rank sent by axis in a step."""
    schedule, options, splits = CASES[case]
    wanted = one_process(**options)
    hybrid = lab.Hybrid(model(**options), GRID, make(schedule, GRID.pp, MICROBATCHES), lab.next_token_loss, **splits)
    optimizer = optimizer_of(hybrid.parameters.values())
    found = {
        "held": sum(p.numel() for p in hybrid.parameters.values()),
        "losses": [],
        "norms": [],
        "wanted losses": wanted["losses"][:steps],
        "wanted norms": wanted["norms"][:steps],
    }
    for step in range(steps):
        with Meter() as meter:
            losses = hybrid.step(*lab.batch(ROWS, TOKENS, step))
        last = torch.stack(losses).mean() if losses else torch.zeros((), dtype=torch.float64)
        loss = last / GRID.dp
        dist.all_reduce(loss, group=hybrid.groups.dp)
        dist.all_reduce(loss, group=hybrid.groups.pp)
        found["losses"].append(loss.item())
        found["norms"].append(hybrid.gradient_norm().item())
        if step == 0:
            found["gradients"] = apart(hybrid.gradients(), wanted["gradients"])
            found["scale"] = max(each.abs().max().item() for each in wanted["gradients"].values())
        optimizer.step()
        optimizer.zero_grad()
    if steps == STEPS:
        found["weights"] = apart(hybrid.whole({n: p.detach() for n, p in hybrid.parameters.items()}), wanted["weights"])
    return found | {"sent": lab.sent_by_axis(GRID, meter)}


def on_rank():
    dist.init_process_group("gloo")
    found = {"with": {case: on_the_grid(case) for case in CASES}, "without": {}}
    for axis, patch in LEFT_OUT.items():
        with contextlib.ExitStack() as stack:
            stack.enter_context(patch)
            found["without"][axis] = on_the_grid("1f1b", steps=1)
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ranks():
    for _, options, _ in CASES.values():
        one_process(**options)  # once, for all ranks that are forked from here
    return launch(on_rank, num_processes=GRID.world_size, timeout=560, stream=False)


@pytest.mark.parametrize("axis", LEFT_OUT)
def test_without_an_axis_exchange_the_gradients_differ(ranks, axis):
    for found in ranks:
        assert found["without"][axis]["gradients"] > 1e-3
        wrong, right = found["without"][axis]["norms"], found["without"][axis]["wanted norms"]
        assert wrong != pytest.approx(right, rel=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_three_axes_equal_one_process(ranks, case):
    for found in ranks:
        mine = found["with"][case]
        assert len(mine["losses"]) == STEPS and len(set(mine["losses"])) == STEPS and mine["scale"] > 0.01
        assert mine["losses"] == pytest.approx(mine["wanted losses"], rel=1e-12)
        assert mine["norms"] == pytest.approx(mine["wanted norms"], rel=1e-12)
        assert mine["gradients"] < 1e-13 and mine["weights"] < 1e-11


def test_a_rank_holds_its_quarter(ranks):
    whole = sum(p.numel() for p in model().parameters())
    for found in ranks:
        assert 0.2 < found["with"]["1f1b, untied"]["held"] / whole < 0.32


def test_what_each_axis_sends(ranks):
    hidden = ROWS // GRID.dp // MICROBATCHES * TOKENS * WIDTH * 8
    for found in ranks:
        case = found["with"]["1f1b, vocabulary whole"]
        assert case["sent"]["tp"] == MICROBATCHES * LAYERS // GRID.pp * 4 * ring_bytes("all_reduce", hidden, GRID.tp)
        tied = lab.VOCABULARY * WIDTH * 8
        assert case["sent"]["pp"] - tied == MICROBATCHES * hidden
        assert case["sent"]["dp"] == ring_bytes("all_reduce", case["held"] * 8, GRID.dp)


def test_a_rank_pair_lies_along_one_axis():
    assert [lab.axis_of(GRID, pair) for pair in ((0, 4), (0, 2), (0, 1), (7, 5), (7, 6), (3, 7))] == [
        "dp",
        "pp",
        "tp",
        "pp",
        "tp",
        "dp",
    ]
    with pytest.raises(ValueError):
        lab.axis_of(GRID, (0, 3))
