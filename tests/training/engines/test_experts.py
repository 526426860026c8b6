"""`--expert_parallel_size`: trained to the loss of one process, and checkpoints that go to any layout and come back."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from course_lib.config import build
from course_lib.errors import ConfigError
from course_lib.lessons import parity
from course_lib.modeling.experts import ExpertParallel
from course_lib.parallel.torch_engines import fsdp
from course_lib.training.engines.from_scratch import ScratchDDP, ScratchState
from course_lib.training.router_loss import RouterLoss
from tests.training.engines.layouts import agree, alone, goes_on, on, saved

STEPS, SAVED = 3, 2
NORM_TOLERANCE = 1e-6
"""Relative: all is in float64 except for transformers' softmax and loss."""
ALONE = {"model": "tiny-olmoe", "max_steps": STEPS}
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


@pytest.fixture(scope="module")
def one(folder):
    return alone(folder / "one", **ALONE, save_steps=SAVED, save_total_limit=None)


@pytest.fixture(scope="module")
def found(folder, one):
    return on(4, folder, CASES, **ALONE, save_steps=SAVED, save_total_limit=None)


def test_every_strategy_equals_one_process(found, one):
    for trace in found.values():
        agree(trace, one, NORM_TOLERANCE)


@pytest.mark.parametrize("names", [SOME, pytest.param([*ONWARDS], marks=pytest.mark.long)], ids=["some", "all"])
def test_checkpoints_go_to_other_layouts_and_to_the_same_one_to_the_bit(folder, found, one, names):
    again = folder / f"again-{len(names)}"
    cases = {
        name: ONWARDS[name][1] | {"resume_from_checkpoint": saved(folder, ONWARDS[name][0], SAVED)} for name in names
    }
    onwards = on(4, again, cases, **ALONE)
    onwards["one process"] = alone(again / "basic", **ALONE, resume_from_checkpoint=saved(folder, "ddp", SAVED))
    for trace in onwards.values():
        goes_on(trace, one, SAVED)
    assert onwards["itself"].losses == found["ddp"].losses[SAVED:]
    assert_close(onwards["itself"].weights, found["ddp"].weights, rtol=0, atol=0)


def unscaled(engine, max_norm, clip=ScratchDDP.clip):
    """The mistake: experts' gradients divided by the number of ranks that hold the same ones."""
    for name, gradient in engine.gradients().items():
        if name in engine.experts.shapes:
            gradient *= dist.get_world_size(engine.experts.groups.sharing)
    return clip(engine, max_norm)


def by_its_own_norm(engine, max_norm):
    """The mistake: each rank counts its own experts alone."""
    return torch.nn.utils.clip_grad_norm_(engine.model.parameters(), max_norm)


@pytest.mark.parametrize(
    ("place", "name", "mistake", "options"),
    [
        (ScratchDDP, "clip", unscaled, {}),
        (ScratchDDP, "clip", by_its_own_norm, {}),
        (ExpertParallel, "summed_over", lambda _: {}, {}),
        (fsdp, "_divide", lambda gradient, by: None, {"strategy": "fsdp"}),
    ],
    ids=["unscaled", "own norm", "mixed", "undivided"],
)
def test_without_a_part_of_it_the_comparison_notices_and_the_first_loss_does_not(
    tmp_path, one, place, name, mistake, options
):
    with mock.patch.object(place, name, mistake):
        found = on(2, tmp_path, {"x": SHARED | options}, **ALONE | {"max_steps": 1})["x"]
    assert abs(found.norms[0] - one.norms[0]) > 1000 * NORM_TOLERANCE * max(one.norms)
    if place is not ExpertParallel:
        assert found.losses[0] == pytest.approx(one.losses[0], abs=parity.LOSS_TOLERANCE)


def with_the_mean_of_own_losses(loss, batch, sequences, ranks, share=RouterLoss.share):
    """The mistake: each rank's auxiliary loss from its own choices, and the mean of the ranks' losses."""
    alone = SimpleNamespace(sum=lambda numbers: numbers, own_part=ranks.own_part)
    return share(loss, batch, sequences, alone) / ranks.data_ranks


def test_the_auxiliary_loss_is_that_of_all_ranks_tokens(tmp_path):
    balanced = ALONE | {"router_aux_loss_coef": 0.5, "max_steps": 2, "max_eval_samples": 2}
    right = alone(tmp_path / "one", **balanced)
    without = alone(tmp_path / "without", **balanced | {"router_aux_loss_coef": 0})
    assert without.losses[0] == right.losses[0] and abs(without.norms[0] - right.norms[0]) > 1e-4 * right.norms[0]
    cases = {"ours": SHARED, "dense": {"engine": "torch", "activation_checkpointing": True}}
    for trace in on(2, tmp_path, cases, **balanced).values():
        agree(trace, right, NORM_TOLERANCE)
    with mock.patch.object(RouterLoss, "share", with_the_mean_of_own_losses):
        wrong = on(2, tmp_path, {"own losses": SHARED}, **balanced)["own losses"]
    assert abs(wrong.norms[1] - right.norms[1]) > 100 * NORM_TOLERANCE * right.norms[1]


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="num_processes 3 is no multiple of expert_parallel_size 2"):
        build(SHARED | {"num_processes": 3})


def test_experts_are_compared_with_the_ranks_that_hold_the_same_and_all_else_with_all():
    stored = ScratchState(SimpleNamespace(part=0), torch.nn.Linear(2, 2))
    stored.experts = SimpleNamespace(shapes={"weight": torch.Size([4, 2])}, place=1)
    assert [(part, list(alike)) for part, alike in stored.parameters_by_part()] == [(0, ["bias"]), (1, ["weight"])]


def test_the_engine_is_ours_by_default():
    assert build(SHARED | {"strategy": "zero1"}).parallel.chosen_engine == "scratch"
