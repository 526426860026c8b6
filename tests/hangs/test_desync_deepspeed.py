"""The desync guard at its fullest under DeepSpeed's own engines: what it compares is what they keep alike."""

import contextlib

import pytest
import torch

from course_lib.config import build
from course_lib.errors import DesyncError
from course_lib.hangs.desync import GatheringRanks, compare, digest_of, replicas
from course_lib.launching.launch import launch
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.run import build_trainer
from tests.forked_process import import_deepspeed
from tests.fresh_accelerator import forget_accelerator
from tests.narrow_presets import narrow_presets  # noqa: F401

FULL = {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "engine": "deepspeed",
    "max_train_samples": 24,
    "max_eval_samples": 8,
    "max_length": 16,
    "max_steps": 4,
    "batch_size": 2,
    "logging_steps": 100,
    "progress_bar": False,
    "device": "cpu",
    "mixed_precision": "no",
    "learning_rate": 1e-3,
    "save_steps": 0,
    "eval_steps": 0,
    "keep_best": False,
    "tracker": "none",
    "watchdog": 0,
    "desync_check": "full",
    "desync_steps": 2,
    "lean_buffers": True,
}  # or a model as small as this is whole on every rank of zero3
CHANGED = "classifier.weight"


class Changes(Callback):
    """Does something to rank 1 alone, after one step."""

    def __init__(self, step, deed):
        self.step, self.deed = step, deed

    def on_step_end(self, trainer):
        if trainer.state.step == self.step and trainer.rank == 1:
            with torch.no_grad():
                self.deed(trainer)


def one_element(trainer):
    """Of the copy that this rank computes with; 0.5 is no rounding."""
    trainer.model.get_parameter(CHANGED).view(-1)[7] += 0.5


def one_element_of_the_shard(trainer):
    """Of the part of the master that this rank has, and of what it computes with."""
    trainer.stored.homes()[CHANGED].shard.data[7] += 0.5
    trainer.stored.refresh()


def ahead(trainer):
    trainer.state.step += 1


RUNS = {  # strategy, more options, step and deed
    "zero1": ("zero1", {}, None),
    "zero2": ("zero2", {}, None),
    "zero3": ("zero3", {}, None),
    "zero1 changed": ("zero1", {}, (2, one_element)),
    "zero2 changed": ("zero2", {}, (2, one_element)),
    "zero1 unguarded": ("zero1", {"desync_check": "off", "desync_steps": 100, "max_steps": 2}, (2, one_element)),
    "zero1 between": ("zero1", {}, (1, one_element)),
    "zero3 changed": ("zero3", {}, (2, one_element_of_the_shard)),
    "zero3 ahead": ("zero3", {}, (2, ahead)),
}


class Looks(Callback):
    """After the last step: a digest of the whole weights as this rank has them, and what a comparison of its shards
    would say."""

    def on_step_end(self, trainer):
        if trainer.state.step < trainer.state.max_steps:
            return
        parameters = dict(trainer.model.named_parameters())
        self.shards, whole = "", contextlib.nullcontext()
        if trainer.config.parallel.strategy == "zero3":
            assert not any(each.numel() for each in parameters.values()), "a rank has its shards alone"
            self.shards = compared({name: each.ds_tensor for name, each in parameters.items()}, trainer.device)
            import deepspeed

            whole = deepspeed.zero.GatheredParameters(list(parameters.values()))
        with whole:
            self.weights = digest_of([each.detach().flatten() for each in parameters.values()])


def compared(tensors, device):
    try:
        compare([replicas(tensors, "nothing is to be mended")], "by their shards", GatheringRanks(device))
    except DesyncError as error:
        return str(error)
    return ""


def run(folder, strategy, options, change):
    """Train; gives the last step, the weights and what is said of their shards, or the line that the guard ended
    it with."""
    forget_accelerator()
    config = build(FULL | {"strategy": strategy, "output_dir": str(folder)} | options)
    folder.mkdir(exist_ok=True)
    looks = Looks()
    trainer = build_trainer(config, [*([Changes(*change)] if change else []), looks, *guards(config)])[0]
    try:
        trainer.train()
    except DesyncError as error:
        return str(error)
    return trainer.state.step, looks.weights, looks.shards


def all_runs(folder):
    torch.set_num_threads(1)
    return {name: run(folder / name.replace(" ", "-"), *each) for name, each in RUNS.items()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What each of the runs gave on each of two ranks; one after another on the same ranks."""
    import_deepspeed()
    every = launch(all_runs, tmp_path_factory.mktemp("runs"), num_processes=2, timeout=800)
    return {name: [results[name] for results in every] for name in RUNS}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_healthy_ranks_are_left_alone(ends, strategy):
    (step, weights, _), (other_step, other_weights, _) = ends[strategy]
    assert step == other_step == 4 and weights == other_weights


def test_a_copy_that_differs_is_named_and_goes_unnoticed_without_the_guard(ends):
    (_, weights, _), (_, others, _) = ends["zero1 unguarded"]
    assert weights != others
    for name in ("zero1 changed", "zero2 changed"):
        assert (
            ends[name][0]
            == ends[name][1]
            == (
                f"ranks disagree after step 2 (they agreed before the first step): `{CHANGED}` of rank 1 is not that "
                f"of rank 0, by up to 0.5 (1 of 73 tensors differ): look for what that rank alone does, and resume "
                f"from a "
                "checkpoint before it"
            )
        )


def test_a_copy_changed_between_two_comparisons_is_replaced_by_the_next_step(ends):
    """Each rank updates its part of the masters and sends it to all: the ranks agree, on what one step did wrong."""
    assert ends["zero1 between"][0][:2] == ends["zero1 between"][1][:2]
    assert ends["zero1 between"][0][1] != ends["zero1"][0][1]


def test_shards_have_no_copy_to_be_compared_with_and_the_rest_is_compared(ends):
    """A change of a shard reaches every rank alike, so no rank differs from another: all go the same wrong way."""
    assert "of rank 1 is not that of rank 0" in ends["zero3"][0][2], "what a comparison of shards says of healthy ranks"
    assert ends["zero3 changed"][0][:2] == ends["zero3 changed"][1][:2]
    assert ends["zero3 changed"][0][1] != ends["zero3"][0][1]
    for own, line in zip((2, 3), ends["zero3 ahead"], strict=True):  # each says when by its own count
        assert line.startswith(
            f"ranks disagree after step {own} (they agreed before the first step): "
            "the step is 2 on rank 0 and 3 on rank 1: "
        )
