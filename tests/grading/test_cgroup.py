"""The kernel's limit on the processes of a sandbox: it holds for root, nothing of it stays, and grading does without.

Every bomb here forks a bounded number of times, also where it would be stopped earlier.
"""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from course_lib.grading import cgroup as cgroup_module
from course_lib.grading import sandbox as sandbox_module
from course_lib.grading.cgroup import pids_folder, processes_limited
from course_lib.grading.supervisor import THREADS
from course_lib.grading.watch import Limits, ProcessWatch
from tests.grading.conftest import RIGHT
from tests.grading.hostile import BOMBS

ROOT = Path(cgroup_module.__file__).parents[2]
MOST = 200  # forks of an answer
LIMITS = Limits(seconds=200.0, processes=12)
KERNEL = THREADS * LIMITS.processes  # 96
FORKS = f"""
import os, signal, time
def forked():
    children = []
    try:
        for i in range({MOST}):
            pid = os.fork()
            if pid == 0:
                time.sleep(100)
                os._exit(0)
            children.append(pid)
    except BlockingIOError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)
"""
RIGHT_BY_ALL = FORKS + RIGHT.replace("return sum", f"return (forked() == {MOST}) * sum")
RIGHT_ANYWAY = FORKS + RIGHT.replace("return", "forked()\n    return")
# Forks at most 64 times. Its children end with it, as then nobody holds the pipe's other end.
CHILDREN = """
import os
where = [line.rpartition("/")[2].strip() for line in open("/proc/self/cgroup")]
reader, writer = os.pipe()
count = 0
try:
    for i in range(64):
        if os.fork() == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        count += 1
except BlockingIOError:
    pass
print(*where)
print(count)
"""
LEFT = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    print(os.getpid(), flush=True)\n    os.close(1)\n"
    "    os.close(2)\n    time.sleep(60)\n"
)


@pytest.fixture
def possible():
    """The folder in which this machine's graders make cgroups."""
    with processes_limited(9) as cgroup:
        if cgroup is None:
            pytest.skip("no cgroup can be made here: not root, or no hierarchy with pids that can be written")
        return cgroup.folder.parent


def mine(folder):
    return sorted(cgroup for cgroup in folder.glob("course-grade-*") if f"-{os.getpid()}-" in cgroup.name)


def run_python(source, command=lambda given: given):
    done = subprocess.run(
        command([sys.executable, "-I", "-S", "-c", source]), capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout.splitlines()


def test_the_kernel_refuses_one_more_and_nothing_below_it(possible):
    assert run_python(CHILDREN)[1] == "64"
    with processes_limited(9) as cgroup:
        assert (cgroup.folder / "pids.max").read_text() == "9\n"
        assert (cgroup.folder / "pids.current").read_text() == "0\n"
        assert not cgroup.hit()
        where, count = run_python(CHILDREN, cgroup.joined)
        assert cgroup.folder.name in where.split()  # as the first that it did
        assert count == "8"
        assert cgroup.hit()
    assert not cgroup.folder.exists()
    with processes_limited(65) as cgroup:
        assert run_python(CHILDREN, cgroup.joined)[1] == "64"
        assert not cgroup.hit()


def test_what_is_left_in_it_is_ended_with_it(possible):
    with processes_limited(9) as cgroup:
        left = Path("/proc", run_python(LEFT, cgroup.joined)[0])
        assert left.exists()
    assert not cgroup.folder.exists()
    assert not left.exists() or "Z" in (left / "stat").read_text().rpartition(")")[2]  # where nobody reaps orphans


def test_leftovers_of_a_dead_grader_are_removed_and_of_a_living_one_are_not(possible):
    source = (
        "import sys\nfrom course_lib.grading.cgroup import processes_limited\n"
        "with processes_limited(9) as cgroup:\n    print(cgroup.folder, flush=True)\n    sys.stdin.read()\n"
    )
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    graders = [subprocess.Popen([sys.executable, "-c", source], **piped) for _ in range(2)]
    try:
        killed, living = (Path(grader.stdout.readline().strip()) for grader in graders)
        graders[0].kill()
        graders[0].wait()
        assert killed.exists() and living.exists()
        with processes_limited(9):
            assert not killed.exists() and living.exists()
        graders[1].communicate("", timeout=300)
        assert not living.exists()
    finally:
        for grader in graders:
            grader.kill()
            grader.communicate()


def noted(peaks, limits):
    """`processes_limited`, with the kernel's limit read back before anything runs, and its count as long as it runs."""

    @contextlib.contextmanager
    def limited(limit):
        with processes_limited(limit) as cgroup:
            limits.append(int((cgroup.folder / "pids.max").read_text()))
            try:
                yield cgroup
            finally:
                peaks.append(int((cgroup.folder / "pids.peak").read_text()))

    return limited


@pytest.mark.skipif(os.geteuid() != 0, reason="RLIMIT_NPROC limits an ordinary user's processes with or without")
def test_a_bomb_meets_the_limit_where_the_grader_does_not_look(possible, graded, monkeypatch):
    def under(limited, source):
        with mock.patch.object(sandbox_module, "processes_limited", limited):
            verdict = graded(source, limits=LIMITS)
        return verdict.points, verdict.error

    monkeypatch.setattr(ProcessWatch, "_broken", lambda self, below: "")
    peaks, limits = [], []
    assert under(lambda limit: contextlib.nullcontext(), RIGHT_BY_ALL) == (4, None)  # it got all its processes
    assert under(noted(peaks, limits), RIGHT_BY_ALL) == (0, "too many processes")
    assert limits == [KERNEL] and LIMITS.processes < max(peaks) <= KERNEL < MOST
    assert under(lambda limit: contextlib.nullcontext(), RIGHT_ANYWAY) == (4, None)
    assert under(processes_limited, RIGHT_ANYWAY) == (0, "too many processes")  # though it ended by itself
    assert mine(possible) == []


@pytest.mark.parametrize("folder", [None, Path("/proc")])  # not mounted; not to be written
def test_grading_is_as_before_where_none_can_be_made(folder, graded):
    enough = replace(LIMITS, processes=24)  # for its 128, as an ordinary user's RLIMIT_NPROC
    with mock.patch.object(cgroup_module, "pids_folder", return_value=folder):
        with processes_limited(9) as cgroup:
            assert cgroup is None
        right, bomb = graded(RIGHT, limits=LIMITS), graded(BOMBS["forks"]["source"], limits=enough)
    assert right.points == 4
    assert (bomb.points, bomb.error) == (0, "too many processes")  # by the grader's count


def test_one_that_cannot_be_joined_is_none_and_is_removed(possible):
    with mock.patch.object(cgroup_module, "_JOIN", "exit 1"), processes_limited(9) as cgroup:
        assert cgroup is None and mine(possible) == []


V1 = "9:name=systemd:/user.slice\n8:cpu,pids:/docker/a b/x\n0::/ignored\n"
PIDS = r"40 31 0:37 {root} /sys/fs/cgroup/my\040pids rw,relatime - cgroup cgroup rw,cpu,pids"
UNIFIED = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 none rw"
OTHER = "39 31 0:36 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset"


@pytest.mark.parametrize(
    ("cgroups", "mounts", "folder"),
    [
        (V1, [OTHER, UNIFIED, PIDS.format(root="/")], "/sys/fs/cgroup/my pids/docker/a b/x"),
        (V1, [PIDS.format(root=r"/docker/a\040b")], "/sys/fs/cgroup/my pids/x"),
        (V1, [PIDS.format(root="/docker/another")], None),
        (V1, [OTHER, UNIFIED], None),
        ("8:pids:/../other\n", [PIDS.format(root="/")], None),
        ("0::/user.slice/a.scope\n", [OTHER, UNIFIED], "/sys/fs/cgroup/unified/user.slice/a.scope"),
        ("0::/\n", [OTHER], None),
    ],
)
def test_the_own_cgroup_is_found_where_it_is_mounted(cgroups, mounts, folder):
    assert pids_folder(cgroups, "\n".join(mounts) + "\n") == (Path(folder) if folder else None)
