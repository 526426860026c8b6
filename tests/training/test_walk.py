"""A reader opens at most seven files to follow one ZeRO-3 step; what is counted is what runs."""

import pytest

from course_lib.training.trainer import Trainer
from tools import walk


@pytest.fixture(scope="module")
def calls():
    return walk.walk("zero3", "scratch")


def test_at_most_seven_files_for_one_zero3_step(calls):
    files = walk.opened(calls)
    followed = files.keys() - walk.BESIDE.keys()
    assert len(followed) <= 7, sorted(followed)
    assert walk.BESIDE.keys() <= files.keys(), "what the step does not come by any more need not be set aside"


def test_the_walk_saw_the_whole_step(calls):
    names = [name for _, name in calls]
    assert names[0] == Trainer.train_step.__qualname__
    for each in (
        "ShardedUnit.gather",
        "PerParamUnit.unpack",
        "Reduction.finish",
        "ShardedModule.clip_grad_norm_",
        "ShardedModule.step",
        "ShardedModule.zero_grad",
    ):
        assert each in names
    gathers, frees = names.count("ShardedUnit.gather"), names.count("ShardedUnit.free")
    assert gathers > 2 and frees > 2 and walk.switches(calls) > 50


def test_one_liners_are_none_to_open():
    counts = walk.statements("training/engines/base.py")
    assert counts["Engine.sum"] == 1 and counts["Engine.connect"] > 10
    assert walk.opened([("training/engines/base.py", "Engine.sum")]) == {}
    assert list(walk.opened([("training/engines/base.py", "Engine.connect")])) == ["training/engines/base.py"]
