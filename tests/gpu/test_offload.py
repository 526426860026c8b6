"""Offloaded state: FSDP2's on the host, and DeepSpeed's with its Adam for CPUs, which g++ compiles."""

import pytest

from course_lib.lessons import parity
from tests.gpu import training as t

TORCH, PLUGIN = ("fsdp", "torch", "parameters"), ("fsdp", "accelerate", "optimizer")
DEEPSPEED = [
    ("zero1", "deepspeed", "optimizer"),
    ("zero2", "deepspeed", "optimizer"),
    ("zero3", "deepspeed", "optimizer"),
    ("zero3", "deepspeed", "parameters"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain loop on the CPU."""
    return parity.trace(parity.task(tmp_path_factory.mktemp("plain"), 1, training_type="basic", max_steps=t.STEPS))


def runs_of(ways, folder=None):
    """Their runs: from the beginning with a checkpoint, or from where those of a folder were saved."""
    return [
        (
            t.name_of(way),
            {"strategy": way[0], "engine": way[1], "offload": way[2]}
            | ({"resume_from_checkpoint": t.saved(folder, way)} if folder else t.SAVING),
        )
        for way in ways
    ]


def trains_saves_and_goes_on(gpus, tmp_path, plain, ways):
    first = tmp_path / "first"
    t.agree(gpus.run(t.launched, first, 2, runs_of(ways), timeout=1800), plain)
    again = gpus.run(t.launched, tmp_path / "again", 2, runs_of(ways, first), timeout=1800)
    t.agree(again, plain, from_step=t.SAVED_AT)
    without = [
        (name, options | {"strategy": "zero1", "engine": "torch", "offload": "none"})
        for name, options in runs_of(ways, first)
    ]
    t.agree(gpus.run(t.launched, tmp_path / "without", 2, without, timeout=1200), plain, from_step=t.SAVED_AT)


@pytest.mark.parametrize("way", [TORCH, pytest.param(PLUGIN, marks=pytest.mark.long)], ids=t.name_of)
def test_fsdp(gpus, tmp_path, plain, way):
    trains_saves_and_goes_on(gpus, tmp_path, plain, [way])


def compiled():
    from deepspeed.ops.op_builder import CPUAdamBuilder

    return CPUAdamBuilder().load().__name__


@pytest.fixture(scope="module")
def cpu_adam(gpus):
    """DeepSpeed's operator, compiled before ranks want it: one that is ended meanwhile would leave its lock."""
    return gpus.run(compiled, timeout=1500)


@pytest.mark.long
def test_deepspeed(gpus, tmp_path, plain, cpu_adam):
    assert cpu_adam == "cpu_adam"
    trains_saves_and_goes_on(gpus, tmp_path, plain, DEEPSPEED)


@pytest.mark.long
def test_deepspeed_goes_on_from_what_others_saved(gpus, tmp_path, plain, cpu_adam):
    """Its count of steps, an int, comes from the tensors of a DDP run and of a sharded one."""
    before = [("ddp", "torch"), ("zero1", "scratch")]
    gpus.run(t.launched, tmp_path, 2, [t.of(pair, **t.SAVING) for pair in before], timeout=1200)
    runs = [
        (
            t.name_of(pair),
            {
                "strategy": "zero2",
                "engine": "deepspeed",
                "offload": "optimizer",
                "resume_from_checkpoint": t.saved(tmp_path, pair),
            },
        )
        for pair in before
    ]
    t.agree(gpus.run(t.launched, tmp_path / "again", 2, runs, timeout=1200), plain, from_step=t.SAVED_AT)
