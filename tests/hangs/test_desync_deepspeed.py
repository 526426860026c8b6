"""The desync guard at its fullest under DeepSpeed's own engines: what it compares is what they keep alike."""

import contextlib

import pytest

from course_lib.errors import DesyncError
from course_lib.hangs.desync import GatheringRanks, compare, digest_of, replicas
from tests.forked_process import import_deepspeed
from tests.hangs.desync_runs import Plant, a_run, trained
from tests.narrow_presets import narrow_presets  # noqa: F401

FULL = {"engine": "deepspeed", "mixed_precision": "no", "desync_check": "full"}
FULL |= {"lean_buffers": True}  # or a model as small as this is whole on every rank of zero3
CHANGED = "classifier.weight"


def one_element(trainer):
    """Of the copy that this rank computes with; 0.5 is no rounding."""
    trainer.model.get_parameter(CHANGED).view(-1)[7] += 0.5


def ahead(trainer):
    trainer.state.step += 1


RUNS = {  # strategy, what is planted
    "zero1": ("zero1",),
    "zero2": ("zero2",),
    "zero3": ("zero3",),
    "zero1 changed": ("zero1", Plant("on_step_end", one_element, turn=2)),
    "zero2 changed": ("zero2", Plant("on_step_end", one_element, turn=2)),
    "zero3 ahead": ("zero3", Plant("on_step_end", ahead, turn=2)),
}


def whole_weights(trainer):
    """A digest of the whole weights as this rank has them; of shards, what a comparison of them would say."""
    parameters = dict(trainer.model.named_parameters())
    said, whole = "", contextlib.nullcontext()
    if trainer.config.parallel.strategy == "zero3":
        assert not any(each.numel() for each in parameters.values()), "a rank has its shards alone"
        said = compared({name: each.ds_tensor for name, each in parameters.items()}, trainer.device)
        import deepspeed

        whole = deepspeed.zero.GatheredParameters(list(parameters.values()))
    with whole:
        return digest_of([each.detach().flatten() for each in parameters.values()]), said


def compared(tensors, device):
    try:
        compare([replicas(tensors, "nothing is to be mended")], "by their shards", GatheringRanks(device))
    except DesyncError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def ends(ranks, tmp_path_factory):
    """What each of the runs gave on each of two ranks."""
    import_deepspeed()
    runs = {}
    for name, (strategy, *plants) in RUNS.items():
        runs[name] = a_run(FULL | {"strategy": strategy}, *plants, look=whole_weights)
    return trained(ranks(2, timeout=800), tmp_path_factory.mktemp("runs"), runs)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_healthy_ranks_are_left_alone(ends, strategy):
    (step, (weights, _)), (other_step, (other_weights, _)) = ends[strategy]
    assert step == other_step == 4 and weights == other_weights


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_copy_that_differs_is_named(ends, strategy):
    first, second = ends[f"{strategy} changed"]
    assert first == second and first.startswith(
        f"ranks disagree after step 2 (they agreed before the first step): `{CHANGED}` of rank 1 is not that of "
        "rank 0, by up to 0.5 (1 of 73 tensors differ): look for what that rank alone does"
    )


def test_shards_are_not_compared_and_the_rest_is(ends):
    (_, (_, said)), _ = ends["zero3"]
    assert "of rank 1 is not that of rank 0" in said, "what a comparison of shards says of healthy ranks"
    for own, line in zip((2, 3), ends["zero3 ahead"], strict=True):  # each says when by its own count
        when = f"after step {own} (they agreed before the first step)"
        assert line.startswith(f"ranks disagree {when}: the step is 2 on rank 0 and 3 on rank 1: ")
