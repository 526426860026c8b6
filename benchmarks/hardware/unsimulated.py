"""The tests of tests/gpu on the GPUs that are there, those that need no simulation."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.hardware.findings import Findings, Settings, failed
from benchmarks.hardware.processes import ROOT

TINY = "tests/gpu/test_machine.py"
SECONDS = 280
"""For one file; with ``--full`` six times that."""


def run(settings: Settings, findings: Findings) -> None:
    """Run them, one process per file, and list what they say."""
    findings.note("`GPU_TESTS=hardware pytest tests/gpu`: the tests that `make test` runs on a simulated device.")
    table = findings.table("file", "passed", "failed", "skipped", "seconds")
    skipped: dict[str, int] = {}
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        if (settings.tiny and name != TINY) or findings.is_late(name):
            continue
        with findings.trying(name):
            cases = _cases(name, settings.room("unsimulated") / f"{path.stem}.xml", settings)
            counts = {"passed": 0, "failed": 0, "skipped": 0}
            for case in cases:
                state, why = _state(case)
                counts[state] += 1
                if state == "failed":
                    findings.fail(f"{name}::{case.get('name')}", why)
                elif state == "skipped":
                    skipped[why] = skipped.get(why, 0) + 1
            table.row(name, *counts.values(), f"{sum(float(case.get('time', 0)) for case in cases):.0f}")
    for why, count in skipped.items():
        findings.leave_out(f"{count} test{'s' * (count > 1)}", why)


def _cases(name: str, xml: Path, settings: Settings) -> list[ElementTree.Element]:
    """What each test of a file came to.

    Raises:
        RuntimeError: pytest found none, or could not run.
    """
    command = [sys.executable, "-m", "pytest", name, f"--junitxml={xml}", "-p", "no:cacheprovider"]
    seconds = SECONDS * (6 if settings.full else 1)
    said = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"GPU_TESTS": "hardware"},
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(said.stdout, flush=True)
    cases = list(ElementTree.parse(xml).iter("testcase")) if xml.exists() else []
    if said.returncode not in (0, 1) or not cases:
        raise failed(said.stdout, f"pytest ended with {said.returncode}: {said.stdout.strip().splitlines()[-1:]}")
    return cases


def _state(case: ElementTree.Element) -> tuple[str, str]:
    """``passed``, ``failed`` or ``skipped``, and why."""
    for tag, state in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return state, found.get("message") or (found.text or "")
    return "passed", ""
