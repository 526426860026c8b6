"""Offloaded state: FSDP2's on the host, and DeepSpeed's with its Adam for CPUs, which g++ compiles."""

import pytest

from tests.gpu import training as t

TORCH, PLUGIN = ("fsdp", "torch", "parameters"), ("fsdp", "accelerate", "optimizer")
DEEPSPEED = [
    ("zero1", "deepspeed", "optimizer"),
    ("zero2", "deepspeed", "optimizer"),
    ("zero3", "deepspeed", "optimizer"),
    ("zero3", "deepspeed", "parameters"),
]


def trains_saves_and_goes_on(gpus, tmp_path, plain, ways):
    first = tmp_path / "first"
    t.agree(t.trained(gpus, first, 2, [t.of(way, offload=way[2], **t.SAVING) for way in ways]), plain)
    came = {way: {"resume_from_checkpoint": t.saved(first, way)} for way in ways}
    again = [t.of(way, offload=way[2], **came[way]) for way in ways]
    t.agree(t.trained(gpus, tmp_path / "again", 2, again), plain, from_step=t.SAVED_AT)
    without = [(t.name_of(way), {"strategy": "zero1", "engine": "torch", **came[way]}) for way in ways]
    t.agree(t.trained(gpus, tmp_path / "without", 2, without), plain, from_step=t.SAVED_AT)


@pytest.mark.parametrize("way", [TORCH, pytest.param(PLUGIN, marks=pytest.mark.long)], ids=t.name_of)
def test_fsdp(gpus, tmp_path, plain, way):
    trains_saves_and_goes_on(gpus, tmp_path, plain, [way])


def compiled():
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load().__name__


@pytest.fixture(scope="module")
def cpu_adam(gpus):
    """DeepSpeed's operator, compiled before ranks want it: one that is ended meanwhile would leave its lock."""
    assert gpus.run(compiled) == "cpu_adam"


@pytest.mark.long
@pytest.mark.usefixtures("cpu_adam")
def test_deepspeed(gpus, tmp_path, plain):
    trains_saves_and_goes_on(gpus, tmp_path, plain, DEEPSPEED)


@pytest.mark.long
@pytest.mark.usefixtures("cpu_adam")
def test_deepspeed_goes_on_from_what_others_saved(gpus, tmp_path, plain):
    """Its count of steps, an int, comes from the tensors of a DDP run and of a sharded one."""
    before = [("ddp", "torch"), ("zero1", "scratch")]
    t.trained(gpus, tmp_path, 2, [t.of(pair, **t.SAVING) for pair in before])
    options = {"strategy": "zero2", "engine": "deepspeed", "offload": "optimizer"}
    runs = [(t.name_of(pair), options | {"resume_from_checkpoint": t.saved(tmp_path, pair)}) for pair in before]
    t.agree(t.trained(gpus, tmp_path / "again", 2, runs), plain, from_step=t.SAVED_AT)
