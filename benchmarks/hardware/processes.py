"""Runs each section in a process of its own, which has a time limit and leaves no other behind.

    python -m benchmarks.hardware.processes MODULE:FUNCTION SETTINGS.json FINDINGS.json

is such a process: it calls ``FUNCTION(settings, findings)``.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.hardware.findings import Findings, Settings, missing

ROOT = Path(__file__).resolve().parents[2]
MARK = "GPU_CHECK_SECTION"
"""In the environment of all processes of a section, by which those are found that have left its process group."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets; a section starts its own ranks."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "COURSE_TRACKER": "none",
    "MPLBACKEND": "Agg",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    # Asked whether there are GPUs, torch would else start the driver, which no forked rank could use.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
ENDING_SECONDS = 10.0


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Attributes:
        name: of its log.
        title: its heading.
        target: the function that does it, as ``module:function``.
        seconds: its limit; with ``--full`` as many times ``full_factor``.
        environment: further variables for its processes.
    """

    name: str
    title: str
    target: str
    seconds: float
    full_factor: float = 6.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a section.

    Attributes:
        parts: paragraphs, and tables as lists of rows, the first the header.
        failures: what failed, and the first line of why.
        left_out: what was not run, and why.
        seconds: it took.
        log: what it printed.
    """

    section: Section
    parts: list[str | list[list[str]]]
    failures: list[tuple[str, str]]
    left_out: list[tuple[str, str]]
    seconds: float
    log: Path

    @property
    def state(self) -> str:
        """``passed``, ``FAILED``, or ``not run`` where something was left out and no table has a row."""
        if self.failures:
            return "FAILED"
        shown = any(isinstance(part, list) and len(part) > 1 for part in self.parts)
        return "passed" if shown or (self.parts and not self.left_out) else "not run"


def not_begun(section: Section, why: str, logs: Path) -> Outcome:
    """Of a section that is left out."""
    return Outcome(section, [], [], [("all of it", why)], 0.0, logs / f"{section.name}.log")


def run(section: Section, settings: Settings, logs: Path, seconds: float = inf) -> Outcome:
    """Run a section to its end or its limit; every process that it started is ended.

    Its output goes to a file in the folder ``logs``. Its limit is its own or, if less, ``seconds``, its share of the
    time for all sections.
    """
    started, room = time.monotonic(), settings.room(section.name)
    asked, found, log = room / "settings.json", room / "findings.json", logs / f"{section.name}.log"
    own = section.seconds * (section.full_factor if settings.full else 1)
    mark, limit = uuid.uuid4().hex, min(own, seconds)
    asked.write_text(json.dumps(asdict(replace(settings, seconds=limit))), encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHED and not name.startswith("ACCELERATE_")
    }
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment |= ENVIRONMENT | dict(section.environment)
    if settings.simulated:
        environment["OMP_NUM_THREADS"] = "1"  # its kernels are the CPU's
    environment |= {MARK: mark, "PYTHONPATH": os.pathsep.join([str(ROOT), *given])}
    command = [sys.executable, "-m", "benchmarks.hardware.processes", section.target, str(asked), str(found)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=room,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            late = process.poll() is None
            _end(process, mark)
    content: dict[str, Any] = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    failures, left_out = ([(what, why) for what, why in content.get(part, ())] for part in ("failures", "left_out"))
    if late and limit < own:
        left_out.append(("the rest of it", f"ended after {limit:.0f} s, its share of --minutes"))
    elif late:
        failures.append((section.name, f"not done after {limit:g} s, and ended"))
    elif process.returncode:
        failures.append((section.name, f"its process ended with {process.returncode}"))
    return Outcome(section, content.get("parts", []), failures, left_out, time.monotonic() - started, log)


def _end(process: subprocess.Popen, mark: str) -> None:
    """Kill a section's process group, then what has left it: ranks and kernels have sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    until = time.monotonic() + ENDING_SECONDS
    while (left := marked(mark)) and time.monotonic() < until:
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Processes of this user that carry a section's mark; of a zombie's environment nothing is left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def main() -> int:
    """What the process of a section does."""
    target, settings, found = sys.argv[1:]
    module, function = target.split(":")
    given = Settings(**json.loads(Path(settings).read_text(encoding="utf-8")))
    findings = Findings(Path(found), given.seconds)
    try:
        getattr(importlib.import_module(module), function)(given, findings)
    except Exception as error:
        traceback.print_exc()
        if lacking := missing(error):
            findings.leave_out("all of it" if not findings.parts else "the rest of it", lacking)
        else:
            what = function if function != "run" else module.rpartition(".")[2]
            findings.fail(what, f"{type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
