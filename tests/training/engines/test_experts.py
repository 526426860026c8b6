"""`--expert_parallel_size`: trained to the loss of one process, and checkpoints that go to any layout and come back."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.lessons import parity
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.torch_engines import fsdp
from course_lib.training.checkpoints import checkpoint
from course_lib.training.engines.from_scratch import ScratchDDP, ScratchState
from course_lib.training.router_loss import RouterLoss
from tests.fresh_accelerator import forget_accelerator

STEPS, SAVED = 3, 2
NORM_TOLERANCE = 1e-6
"""Relative: all is in float64 except for transformers' softmax and loss."""
MODEL = {"model": "tiny-olmoe", "max_steps": STEPS}
SHARED = {"expert_parallel_size": 2}
CASES = {
    "ddp": SHARED,
    "zero1": SHARED | {"strategy": "zero1", "activation_checkpointing": True},
    "zero2": {"expert_parallel_size": 4, "strategy": "zero2"},
    "fsdp": SHARED | {"strategy": "fsdp", "activation_checkpointing": True},
}
SOME = ("itself", "zero1 to four", "fsdp to zero1")
"""In `make test`; all are in `make long`."""
ONWARDS = {  # what goes on from whose checkpoint
    "itself": ("ddp", SHARED),
    "dense to zero2": ("one", SHARED | {"strategy": "zero2"}),
    "zero1 to four": ("zero1", {"expert_parallel_size": 4}),
    "four to dense": ("zero2", {"strategy": "zero3", "engine": "scratch"}),
    "fsdp to zero1": ("fsdp", {"expert_parallel_size": 4, "strategy": "zero1"}),
    "dense to fsdp": ("one", {"expert_parallel_size": 4, "strategy": "fsdp"}),
}


def runs(folder, cases, **common):
    """Several runs, one after the other on the same four ranks; what each left."""
    found = {}
    for name, options in cases.items():
        forget_accelerator()
        found[name] = parity.trace(parity.task(folder / name.replace(" ", "-"), 4, **(MODEL | common | options)))
    return found


def one_process(folder, **options):
    return parity.trace(parity.task(folder, 1, training_type="basic", **(MODEL | options)))


@pytest.fixture(scope="module")
def one(folder):
    return one_process(folder / "one", save_steps=SAVED, save_total_limit=None)


@pytest.fixture(scope="module")
def found(folder, one):
    return launch(runs, folder, CASES, save_steps=SAVED, save_total_limit=None, num_processes=4, timeout=1000)[0]


def test_every_strategy_equals_one_process(found, one):
    assert len(found) == len(CASES) == 4
    for name, trace in found.items():
        cell = parity.compare(trace, one, name, "", 4)
        assert cell.agrees and cell.norm < NORM_TOLERANCE * max(one.norms), cell


@pytest.mark.parametrize("names", [SOME, pytest.param([*ONWARDS], marks=pytest.mark.long)], ids=["some", "all"])
def test_checkpoints_go_to_other_layouts_and_to_the_same_one_to_the_bit(folder, found, one, names):
    def saved(name):
        return str(folder / name / checkpoint.name(SAVED))

    cases = {
        name: options | {"resume_from_checkpoint": saved(source)}
        for name, (source, options) in ONWARDS.items()
        if name in names
    }
    again = launch(runs, folder / f"again-{len(names)}", cases, num_processes=4, timeout=1000)[0]
    again["one process"] = one_process(folder / f"basic-{len(names)}", resume_from_checkpoint=saved("ddp"))
    assert len(again) == len(names) + 1 and len(ONWARDS) == 6
    for name, trace in again.items():
        assert trace.losses == pytest.approx(one.losses[SAVED:], abs=parity.LOSS_TOLERANCE), name
        largest = max(float((trace.weights[key] - one.weights[key]).abs().max()) for key in one.weights)
        assert largest <= parity.WEIGHT_TOLERANCE, name
    assert again["itself"].losses == found["ddp"].losses[SAVED:]
    assert all(torch.equal(again["itself"].weights[key], weight) for key, weight in found["ddp"].weights.items())


def unscaled(engine, max_norm, clip=ScratchDDP.clip):
    """The mistake: experts' gradients divided by the number of ranks that hold the same ones."""
    for name, gradient in engine.gradients().items():
        if name in engine.experts.shapes:
            gradient *= dist.get_world_size(engine.experts.groups.sharing)
    return clip(engine, max_norm)


def by_its_own_norm(engine, max_norm):
    """The mistake: each rank counts its own experts alone."""
    return torch.nn.utils.clip_grad_norm_(engine.model.parameters(), max_norm)


def broken(folder):
    found = {}
    for name, options, patch in (
        ("unscaled", {}, mock.patch.object(ScratchDDP, "clip", unscaled)),
        ("own norm", {}, mock.patch.object(ScratchDDP, "clip", by_its_own_norm)),
        ("mixed", {}, mock.patch.object(ExpertParallel, "summed_over", lambda _: {})),
        ("undivided", {"strategy": "fsdp"}, mock.patch.object(fsdp, "_divide", lambda gradient, by: None)),
    ):
        with patch:
            found |= runs(folder, {name: SHARED | options}, batch_size=parity.GLOBAL_ROWS // 4, max_steps=1)
    return found


def test_without_a_part_of_it_the_comparison_notices_and_the_first_loss_does_not(tmp_path, one):
    found = launch(broken, tmp_path, num_processes=2, timeout=800)[0]
    for name in ("unscaled", "own norm", "mixed", "undivided"):
        assert abs(found[name].norms[0] - one.norms[0]) > 1000 * NORM_TOLERANCE * max(one.norms), name
    for name in ("unscaled", "own norm", "undivided"):
        assert found[name].losses[0] == pytest.approx(one.losses[0], abs=parity.LOSS_TOLERANCE)


BALANCED = {"router_aux_loss_coef": 0.5, "max_steps": 2, "eval_steps": 0, "max_eval_samples": 2}


def with_the_mean_of_own_losses(loss, batch, sequences, ranks, share=RouterLoss.share):
    """The mistake: each rank's auxiliary loss from its own choices, and the mean of the ranks' losses."""
    alone = SimpleNamespace(sum=lambda numbers: numbers, own_part=ranks.own_part)
    return share(loss, batch, sequences, alone) / ranks.data_ranks


def balanced(folder):
    found = runs(
        folder,
        {"ours": SHARED, "dense": {"engine": "torch", "activation_checkpointing": True}},
        **BALANCED,
        batch_size=parity.GLOBAL_ROWS // 4,
    )
    with mock.patch.object(RouterLoss, "share", with_the_mean_of_own_losses):
        return found | runs(folder, {"own losses": SHARED}, **BALANCED, batch_size=parity.GLOBAL_ROWS // 4)


def test_the_auxiliary_loss_is_that_of_all_ranks_tokens(tmp_path):
    right = one_process(tmp_path / "one", **BALANCED)
    without = one_process(tmp_path / "without", **BALANCED | {"router_aux_loss_coef": 0})
    assert without.losses[0] == right.losses[0] and abs(without.norms[0] - right.norms[0]) > 1e-4 * right.norms[0]
    found = launch(balanced, tmp_path, num_processes=2, timeout=800)[0]
    for name in ("ours", "dense"):
        cell = parity.compare(found[name], right, name, "", 2)
        assert cell.agrees and cell.norm < NORM_TOLERANCE * max(right.norms), cell
    assert abs(found["own losses"].norms[1] - right.norms[1]) > 100 * NORM_TOLERANCE * right.norms[1]


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="num_processes 3 is no multiple of expert_parallel_size 2"):
        build(SHARED | {"num_processes": 3})


def test_experts_are_compared_with_the_ranks_that_hold_the_same_and_all_else_with_all():
    stored = ScratchState(SimpleNamespace(part=0), torch.nn.Linear(2, 2))
    stored.experts = SimpleNamespace(shapes={"weight": torch.Size([4, 2])}, place=1)
    assert [(part, list(alike)) for part, alike in stored.parameters_by_part()] == [(0, ["bias"]), (1, ["weight"])]


def test_the_engine_is_ours_by_default():
    assert build(SHARED | {"strategy": "zero1"}).parallel.chosen_engine == "scratch"
