"""Sections that go wrong, for the test of what runs them."""

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.hardware.findings import Findings, Settings
from course_lib.launching.rank_process import Failure
from course_lib.launching.supervisor import RankError


def fine(settings: Settings, findings: Findings) -> None:
    table = findings.table("what", "found")
    table.row("GPUs", settings.gpus)
    findings.leave_out("the rest", "there is none")


def nothing(settings: Settings, findings: Findings) -> None:
    findings.leave_out("all of it", "it needs two GPUs")


def tells(settings: Settings, findings: Findings) -> None:
    """Fails with a message that names home, host and folders."""
    with findings.trying("a row | of a table"):
        raise ValueError(f"{Path.home()}/secret/data.csv on {socket.gethostname()}\nin /home/somebody/course/x.py\n")
    findings.table("what").row(f"{Path.home()}/.cache/file and /opt/site/lib/torch.py at https://host.org/a/b")


def raises(settings: Settings, findings: Findings) -> None:
    findings.note("before")
    raise RuntimeError("planted")


def hangs(settings: Settings, findings: Findings) -> None:
    """Never ends, nor does a process that it starts in a session of its own."""
    findings.table("what").row("a row before it hung")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(os.environ["PIDS"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def lacks(settings: Settings, findings: Findings) -> None:
    """Wants packages: two that are not installed, and a module of the course that is not there."""
    findings.note("before")
    with findings.trying("a row"):
        cause = pickle.dumps(ModuleNotFoundError("none", name="absent.part"))
        error = RankError(0, Failure("raised", 0.0, False, cause=cause), {})
        raise error from error.cause
    with findings.trying("another"):
        import course_lib.nowhere  # noqa: F401
    import nowhere_at_all  # noqa: F401


def dies(settings: Settings, findings: Findings) -> None:
    os._exit(3)
