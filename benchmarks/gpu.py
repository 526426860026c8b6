"""What of the course runs on the GPUs of this machine: `make gpu`.

    python benchmarks/gpu.py [--full] [--output gpu-report.md]

Ten minutes on one GPU; every strategy and engine, parity with the CPU, lessons, memory, speed beside peers, hangs and
the tests of tests/gpu, each in processes of its own. Writes a report that can be attached to an issue. Exit code: 0
where all passed or there is no GPU, 1 where something failed.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.hardware import processes, report  # noqa: E402
from benchmarks.hardware.findings import Settings  # noqa: E402
from benchmarks.hardware.processes import Section  # noqa: E402
from course_lib.writing import write_text  # noqa: E402

NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
SECTIONS = (
    Section("machine", "Machine", "benchmarks.hardware.facts:run", 120),
    Section("doctor", "course doctor", "benchmarks.hardware.doctor:run", 120),
    Section("strategies", "Strategies and engines", "benchmarks.hardware.strategies:run", 900, environment=NO_TF32),
    Section("parity", "Parity with the CPU", "benchmarks.hardware.parity:run", 120, environment=NO_TF32),
    Section("lessons", "Lessons", "benchmarks.hardware.lessons:run", 600),
    Section("memory", "Memory", "benchmarks.hardware.memory:run", 400),
    Section("speed", "Speed", "benchmarks.hardware.speed:run", 900),
    Section("hangs", "Hangs", "benchmarks.hardware.hangs:run", 400),
    Section("unsimulated", "Tests without the simulation", "benchmarks.hardware.unsimulated:run", 900),
)


def main(arguments: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Run the sections one after the other, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="everything: an hour and more")
    size.add_argument("--tiny", action="store_true", help="as little as shows that it works")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in sections], metavar="SECTION",
                        help=f"of {', '.join(each.name for each in sections)}")
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="[gpu-report.md]")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so end what is running
    found = probe()
    if not found["gpus"]:
        print(f"no GPU here: {found['why']}")
        return 0
    started, logs = time.monotonic(), options.output.with_name(f"{options.output.stem}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="course-gpu-") as folder:
        settings = Settings(**found, full=options.full, tiny=options.tiny, folder=folder)
        for section in sections:
            if options.only and section.name not in options.only:
                continue
            print(f"{section.title} ...", flush=True)
            outcomes.append(processes.run(section, settings, logs))
            print(f"  {outcomes[-1].state}, {outcomes[-1].seconds:.0f} s", flush=True)
            text = report.render(outcomes, settings, time.monotonic() - started, options.output.parent)
            write_text(options.output, text)
    failed = [each.section.title for each in outcomes if each.failures]
    print(f"{options.output}: " + (f"failed: {', '.join(failed)}" if failed else "all passed"))
    return 1 if failed else 0


def probe() -> dict[str, Any]:
    """What GPUs there are, asked in a process of its own: this one keeps off them."""
    asked = subprocess.run([sys.executable, "-m", "benchmarks.hardware.facts"], capture_output=True, text=True,
                           cwd=ROOT, timeout=120)
    if asked.returncode:
        last = asked.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SystemExit(f"the GPUs cannot be asked what they are: {last[0]}")
    return json.loads(asked.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
