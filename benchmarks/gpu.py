"""Hardware check of the course on this machine's GPUs: `make gpu`, or in any environment that has torch:

    python benchmarks/gpu.py [--minutes 8 | --full] [--output gpu-report.md]

Every strategy and engine, parity with the CPU, speed beside peers, memory, lessons, hangs and the tests of tests/gpu,
each in processes of its own, which use no network. What needs a package that is not installed is left out, with its
name. Writes a report that can be attached to an issue. Exit code: 0 where all passed or there is no GPU, 1 where
something failed or the GPUs cannot be used.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.hardware import processes, report
from benchmarks.hardware.findings import Settings
from benchmarks.hardware.processes import ENDING_SECONDS, ROOT, Section
from course_lib.errors import LaunchError
from course_lib.launching.launch_environment import check_loopback
from course_lib.writing import write_text

PROBE_SECONDS = 120
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
SECTIONS = (  # the best first: there may be time for no more
    Section("machine", "Machine", "benchmarks.hardware.facts:run", 120),
    Section("strategies", "Strategies and engines", "benchmarks.hardware.strategies:run", 900, environment=NO_TF32),
    Section("parity", "Parity with the CPU", "benchmarks.hardware.parity:run", 120, environment=NO_TF32),
    Section("speed", "Speed", "benchmarks.hardware.speed:run", 900),
    Section("memory", "Memory", "benchmarks.hardware.memory:run", 400),
    Section("lessons", "Lessons", "benchmarks.hardware.lessons:run", 600),
    Section("doctor", "course doctor", "benchmarks.hardware.doctor:run", 120),
    Section("hangs", "Hangs", "benchmarks.hardware.hangs:run", 400),
    Section("unsimulated", "Tests without the simulation", "benchmarks.hardware.unsimulated:run", 900),
)
SHARE = 0.5
"""Of the time that is left, the most that a section may take; the last one may take all of it."""
LEAST_SECONDS = 5.0
"""With less than these a section is not begun."""


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Run the sections one after the other, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="everything: an hour and more")
    size.add_argument("--tiny", action="store_true", help="as little as shows that it works")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[each.name for each in sections],
        metavar="SECTION",
        help=f"of {', '.join(each.name for each in sections)}",
    )
    parser.add_argument(
        "--minutes", type=_minutes, help="after which it ends by itself [8; with --full as many as it takes]"
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="[gpu-report.md]")
    options = parser.parse_args(arguments)
    minutes = options.minutes or (math.inf if options.full else 8.0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so end what is running
    started = time.monotonic()
    try:
        check_loopback()
    except LaunchError as error:
        raise SystemExit(str(error)) from None
    found = probe()
    if not found["gpus"]:
        print(f"no GPU here: {found['why']}")
        return 0
    logs = options.output.with_name(f"{options.output.stem}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    chosen = [each for each in sections if not options.only or each.name in options.only]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="course-gpu-") as folder:
        settings = Settings(**found, full=options.full, tiny=options.tiny, folder=folder)
        for section in chosen:
            left = minutes * 60 - (time.monotonic() - started) - ENDING_SECONDS
            limit = left if section is chosen[-1] else left * SHARE
            if limit < LEAST_SECONDS:
                outcomes.append(processes.not_begun(section, f"the {minutes:g} minutes were over: --minutes", logs))
            else:
                print(f"{section.title} ...", flush=True)
                outcomes.append(processes.run(section, settings, logs, limit))
                for what, why in outcomes[-1].left_out if outcomes[-1].state == "not run" else []:
                    print(f"  left out: {what}: {why}", flush=True)
                print(f"  {outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
            text = report.render(outcomes, settings, time.monotonic() - started, options.output.parent)
            write_text(options.output, text)
    failed = [each.section.title for each in outcomes if each.failures]
    print(f"{options.output}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of minutes above 0")
    return minutes


def probe() -> dict[str, Any]:
    """What GPUs there are, asked in a process of its own: this one keeps off them."""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "benchmarks.hardware.facts"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"the GPUs do not answer: torch has looked for them for {PROBE_SECONDS} s; try nvidia-smi"
        ) from None
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"the GPUs cannot be asked what they are: {last[0]}")
    found = json.loads(asked.stdout.splitlines()[-1])
    if unusable := found.pop("unusable", ""):
        raise SystemExit(unusable)
    return found


if __name__ == "__main__":
    sys.exit(main())
