"""Hostile answers on real ranks: patched torch, tensors that lie, ranks that hang, collectives that never were."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from course_lib.grading import wire_check
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.task import Case
from tests.grading import naive_torch
from tests.grading.toys import toy_tasks

HIDDEN = [Case(2, {"shares": [[1, 2, 3, 4], [5, 6, 7, 9]]})]
RIGHT = "import torch.distributed as dist\ndef mean(share):\n    dist.all_reduce(share)\n    return share / 2\n"
PUBLIC = [sum(column) / 2 for column in zip(*toy_tasks.MEAN.cases(random.Random(0))[0].inputs["shares"], strict=True)]

LIES = {  # PASS in the naive grader
    "patched allclose": "import torch\ntorch.allclose = lambda *a, **k: True\ndef mean(share): return share\n",
    "patched tensor": "import torch\ntorch.tensor = lambda *a, **k: torch.zeros(4)\n"
    "def mean(share): return share * 0\n",
    "patched method": "import torch\ntorch.Tensor.__truediv__ = lambda a, b: a * 0\n"
    "def mean(share): return share * 0\n",
    "subclassed tensor": "import torch\nclass Any(torch.Tensor):\n    @classmethod\n"
    "    def __torch_function__(cls, f, types, args=(), kwargs=None):\n"
    "        if f is torch.allclose: return True\n"
    "        return super().__torch_function__(f, types, args, kwargs or {})\n"
    "def mean(share): return torch.zeros(4).as_subclass(Any)\n",
    "learnt by heart": f"import torch\ndef mean(share): return torch.tensor({PUBLIC}, dtype=torch.float64)\n",
    "ends as it prints": "import os\nfor each in os.sys.argv: os.write(1, f'PASS {each}\\n'.encode())\nos._exit(0)\n"
    "def mean(share): return share\n",
    "ends one rank": "import os\ndef mean(share):\n    for each in os.sys.argv: "
    "os.write(1, f'PASS {each}\\n'.encode())\n    os._exit(0)\n",
}
HANGS = {  # HANGS in the naive grader
    "a rank that sleeps": "import time\ndef mean(share):\n    if share[0] == 864: time.sleep(1e6)\n    return share\n",
    "a rank that waits for another": "import os\ndef mean(share):\n    import torch.distributed as dist\n"
    "    if dist.is_initialized() and dist.get_rank() == 1: dist.barrier()\n"
    "    import time\n    time.sleep(1e6)\n",
}
FORGED = """import sys
def mean(share):
    frame = sys._getframe(1)
    shares = frame.f_locals['case'].inputs['shares']
    noted = frame.f_locals.get('events')
    if noted is not None:
        noted.append('all_reduce 32')
    return share * 0 + share.new_tensor([sum(column) / 2 for column in zip(*shares)])
"""


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(tasks="toy_tasks", folders=(Path(toy_tasks.__file__).parent,))


def graded(source, sandbox, task=toy_tasks.MEAN):
    """Those that hang get as long as it takes to hang, the others as long as they may need on a busy machine."""
    limits = Limits(seconds=6.0 if source in HANGS.values() else 100.0)
    return grade_source(task, source, hidden=HIDDEN, limits=limits, sandbox=sandbox)


def test_each_works_on_the_naive_grader(tmp_path):
    assert [(a + b) / 2 for a, b in zip(*naive_torch.PUBLIC, strict=True)] == PUBLIC
    attacks = LIES | HANGS
    for i, source in enumerate(attacks.values()):
        (tmp_path / f"{i}.py").write_text(source)
    command = [sys.executable, naive_torch.__file__, *(str(tmp_path / f"{i}.py") for i in range(len(attacks)))]
    out = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=400).stdout
    said = [
        {line.split(" ", 1)[0] for line in out.splitlines() if line.endswith(f"/{i}.py")} for i in range(len(attacks))
    ]
    assert all("PASS" in line for line in said[: len(LIES)]), said
    assert all("HANGS" in line for line in said[len(LIES) :]), said


@pytest.mark.parametrize(
    "lies",
    [("patched allclose", "learnt by heart", "ends one rank"), pytest.param(tuple(LIES), marks=pytest.mark.long)],
    ids=["some lies", "all"],
)
def test_none_gains_a_point_and_the_right_one_has_all(sandbox, lies):
    attacks = {name: LIES[name] for name in lies} | HANGS
    with ThreadPoolExecutor(2) as pool:
        right, *verdicts = pool.map(lambda source: graded(source, sandbox), [RIGHT, *attacks.values()])
    assert right.points == right.maximum == 2, right
    assert {name: verdict for name, verdict in zip(attacks, verdicts, strict=True) if verdict.points} == {}
    assert [verdict.error for verdict in verdicts[len(lies) :]] == ["timeout"] * len(HANGS)


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
