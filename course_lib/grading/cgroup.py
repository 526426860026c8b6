"""A cgroup of its own for each sandbox: the kernel's limit on its processes and threads, which binds root's too.

RLIMIT_NPROC does not bind root, so that a fork bomb could make thousands of processes until somebody counts them. In a
cgroup with `pids.max` the fork itself fails. It is made below the grader's own cgroup, so that the grader's limits hold
for it as well: of v1 in the hierarchy `pids`, of v2 where `pids` can be handed on to cgroups below.

Where none can be made, as for most ordinary users and in containers that see cgroups read-only or not at all, a sandbox
goes without: RLIMIT_NPROC limits an ordinary user's processes, and root's only the grader's count.
"""

import contextlib
import errno
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

END_SECONDS = 5.0  # until what was killed has to be gone
JOIN_SECONDS = 10.0  # for a shell, on a machine that is busy
_NAME = "course-grade-"
_JOIN = 'echo 0 > "$0/cgroup.procs" && exec "$@"'  # 0 is the shell itself, so nothing ever runs outside


@dataclass(frozen=True)
class Cgroup:
    """A cgroup that limits processes, threads among them.

    Attributes:
        folder: where its files are.
    """

    folder: Path

    def joined(self, command: Sequence[str]) -> list[str]:
        """A command that joins it, and becomes the given one."""
        return ["/bin/sh", "-c", _JOIN, str(self.folder), *command]

    def hit(self) -> bool:
        """Whether a process or thread was refused in it; in v1 also by the limit of a cgroup above."""
        events = dict(line.split() for line in (self.folder / "pids.events").read_text().splitlines())
        return int(events["max"]) > 0

    def remove(self) -> None:
        """End all that is left in it, and remove it; what cannot end in END_SECONDS leaves it to the next grader."""
        (self.folder / "pids.max").write_text("0")  # what is left makes nothing new
        deadline = time.monotonic() + END_SECONDS
        while not _removed(self.folder) and time.monotonic() < deadline:
            for thread in _threads(self.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(thread, signal.SIGKILL)  # its whole process
            time.sleep(0.01)


@contextlib.contextmanager
def processes_limited(limit: int) -> Iterator[Cgroup | None]:
    """A new cgroup, which at the end is removed, and all that is in it ended; None where none can be made.

    Args:
        limit: processes and threads at one time, for which the kernel refuses one more.
    """
    cgroup = _made(limit)
    try:
        yield cgroup
    finally:
        if cgroup:
            cgroup.remove()


def pids_folder(cgroups: str, mounts: str) -> Path | None:
    """The folder of this process's own cgroup, in the hierarchy that counts processes if it is mounted.

    Args:
        cgroups: the text of /proc/self/cgroup.
        mounts: the text of /proc/self/mountinfo.
    """
    entries = [line.split(":", 2) for line in cgroups.splitlines()]
    first = [path for _, controllers, path in entries if "pids" in controllers.split(",")]
    own = first or [path for number, _, path in entries if number == "0"]
    for line in mounts.splitlines() if own else ():
        before, _, after = line.partition(" - ")
        root, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), field) for field in before.split()[3:5])
        kind, _, options = after.split(" ", 2)
        right = kind == "cgroup" and "pids" in options.split(",") if first else kind == "cgroup2"
        if right and PurePosixPath(own[0]).is_relative_to(root) and ".." not in own[0].split("/"):
            return Path(point) / PurePosixPath(own[0]).relative_to(root)
    return None


def _made(limit: int) -> Cgroup | None:
    """A new cgroup that processes can join; None if there can be none."""
    try:
        parent = pids_folder(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
        if parent is None:
            return None
        _tidy(parent)
        _hand_on(parent)
        cgroup = Cgroup(Path(tempfile.mkdtemp(prefix=f"{_mine()}{os.getpid()}-", dir=parent)))
    except OSError:  # not ours to write, read-only, or a kernel without
        return None
    try:
        kind = cgroup.folder / "cgroup.type"
        if kind.exists() and kind.read_text().strip() == "domain invalid":  # as the grader's own has processes in it
            kind.write_text("threaded")
        (cgroup.folder / "pids.max").write_text(str(limit))
        tried = subprocess.run(cgroup.joined(["true"]), capture_output=True, timeout=JOIN_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        tried = None
    if tried and not tried.returncode:
        return cgroup
    _removed(cgroup.folder)
    return None


def _hand_on(parent: Path) -> None:
    """Have the cgroups below one count processes, which in v1 they always do."""
    handed = parent / "cgroup.subtree_control"
    if handed.exists() and "pids" not in handed.read_text().split():
        handed.write_text("+pids")


def _mine() -> str:
    """How the cgroup folders of graders in this process's PID namespace begin."""
    return f"{_NAME}{os.stat('/proc/self/ns/pid').st_ino}-"


def _tidy(parent: Path) -> None:
    """Remove what graders left that were killed."""
    for folder in parent.glob(f"{_mine()}*"):
        pid = folder.name.removeprefix(_mine()).split("-")[0]
        if not Path("/proc", pid).exists():
            _removed(folder)


def _removed(folder: Path) -> bool:
    """Remove a cgroup; False if something is still in it."""
    try:
        folder.rmdir()
    except FileNotFoundError:  # by another grader
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _threads(folder: Path) -> list[int]:
    """What is in a cgroup and can be seen from here; v2 lists processes only outside threaded ones, threads in all."""
    listed = folder / "tasks"
    if not listed.exists():
        listed = folder / "cgroup.threads"
    return [number for number in map(int, listed.read_text().split()) if number > 0]
