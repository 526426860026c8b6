"""A reader opens at most seven files to follow one ZeRO-3 step, all counted; what is counted is what runs."""

import pytest

from course_lib.training.trainer import Trainer
from tools import walk


@pytest.fixture(scope="module")
def calls():
    return walk.walk("zero3", "scratch")


def test_at_most_seven_files_are_opened_and_fourteen_passed_through_in_one_zero3_step(calls):
    assert len(walk.opened(calls)) <= 7, sorted(walk.opened(calls))
    assert len({file for file, _ in calls}) <= 14, sorted({file for file, _ in calls})
    assert walk.row(calls) in walk.PAGE.read_text(encoding="utf-8"), "run `python tools/walk.py --write`"


def test_the_walk_saw_the_whole_step(calls):
    names = [name for _, name in calls]
    assert names[0] == Trainer.train_step.__qualname__
    sharded = {"ShardedModule.clip_grad_norm_", "ShardedModule.step", "ShardedModule.zero_grad"}
    assert sharded | {"ShardedUnit.gather", "PerParamUnit.unpack", "Reduction.finish"} <= set(names)
    assert names.count("ShardedUnit.gather") > 2 and names.count("ShardedUnit.free") > 2
