"""Hostile answers on real ranks: patched torch, tensors that lie, ranks that hang, collectives that never were."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from course_lib.grading import wire_check
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits
from course_lib.grading.task import Case
from tests.grading import naive_torch
from tests.grading.hostile import FORGED, HANGING_RANKS, LIES
from tests.grading.toys import toy_tasks

HIDDEN = [Case(2, {"shares": [[1, 2, 3, 4], [5, 6, 7, 9]]})]
RIGHT = "import torch.distributed as dist\ndef mean(share):\n    dist.all_reduce(share)\n    return share / 2\n"


def graded(source, sandbox, task=toy_tasks.MEAN):
    """Those that hang get as long as it takes to hang, the others as long as they may need on a busy machine."""
    limits = Limits(seconds=6.0 if source in HANGING_RANKS.values() else 100.0)
    return grade_source(task, source, hidden=HIDDEN, limits=limits, sandbox=sandbox)


def test_each_works_on_the_naive_grader(tmp_path):
    for name, source in (LIES | HANGING_RANKS).items():
        (tmp_path / f"{name}.py").write_text(source)
    paths = {str(tmp_path / f"{name}.py"): name for name in LIES | HANGING_RANKS}
    command = [sys.executable, naive_torch.__file__, *paths]
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=400).stdout
    said = {(word, paths[path]) for word, path in (line.split(" ", 1) for line in out.splitlines()) if path in paths}
    assert said >= {("PASS", name) for name in LIES} | {("HANGS", name) for name in HANGING_RANKS}


@pytest.mark.parametrize(
    "lies",
    [("patched allclose", "learnt by heart", "ends one rank"), pytest.param(tuple(LIES), marks=pytest.mark.long)],
    ids=["some lies", "all"],
)
def test_none_gains_a_point_and_the_right_one_has_all(sandbox, lies):
    attacks = {name: LIES[name] for name in lies} | HANGING_RANKS
    with ThreadPoolExecutor(2) as pool:
        right, *verdicts = pool.map(lambda source: graded(source, sandbox), [RIGHT, *attacks.values()])
    assert right.points == right.maximum == 2, right
    assert {name: verdict for name, verdict in zip(attacks, verdicts, strict=True) if verdict.points} == {}
    assert [verdict.error for verdict in verdicts[len(lies) :]] == ["timeout"] * len(HANGING_RANKS)


def test_collectives_that_never_were_are_not_on_the_wire(sandbox):
    """The forger reads all ranks' inputs out of its caller's frame, computes alone, and notes an all-reduce."""
    with mock.patch.object(wire_check, "not_on_the_wire", return_value=[]):
        believed = graded(FORGED, sandbox, toy_tasks.NOTED)
    doubted = graded(FORGED, sandbox, toy_tasks.NOTED)
    honest = graded(RIGHT, sandbox, toy_tasks.NOTED)
    assert believed.points == 3
    assert doubted.points == 0 and "bytes on the wire" in doubted.scores["collectives"].said
    assert honest.points == 3


def test_the_first_cause_is_told_and_not_its_consequence(sandbox):
    source = RIGHT.replace("    dist.all", "    if dist.get_rank() == 1: raise ValueError('mine')\n    dist.all")
    verdict = graded(source, sandbox)
    assert verdict.points == 0 and verdict.error.startswith("rank 1 raised ValueError: mine (in line 3 of yours")
