"""``course doctor``: what this machine is, what of the course it can run, and what to do about the rest."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from course_lib import missing_extra
from course_lib.errors import CourseError

if TYPE_CHECKING:  # torch takes two seconds, which --help need not pay
    from course_lib.commands.doctor_checks import CheckResult
    from course_lib.system.machine import Machine

NAME = "doctor"
HELP = "say what this machine can run, and what to do about what it cannot"

COLOURS = {"ok": "green", "slow": "yellow", "cannot": "red"}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 where the quickstart can run, else 1."""
    try:
        from course_lib.commands.doctor_checks import CHECKS, examine
        from course_lib.system import machine
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and missing_extra.explain(error, NAME):
            raise
        raise CourseError(f"an installed package is missing or broken ({error})", "run `make setup`") from error

    here = machine.describe()
    findings = {check.name: examine(check, here) for check in CHECKS}
    reasons = [
        f"{check.name}: {findings[check.name].detail}"
        for check in CHECKS
        if check.quickstart and findings[check.name].state == "cannot"
    ]
    if args.json:
        checks = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
        print(
            json.dumps(
                {"quickstart": not reasons, "reasons": reasons, "machine": dataclasses.asdict(here), "checks": checks},
                indent=1,
            )
        )
    else:
        _print(here, findings, reasons)
    return 1 if reasons else 0


def _print(here: "Machine", findings: "Mapping[str, CheckResult]", reasons: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    facts = Table(title="this machine", show_header=False)
    facts.add_row("system", f"{here.os} {here.os_release}, Python {here.python}")
    facts.add_row("processor", f"{here.cpu}, {here.cores} cores for this process; {', '.join(here.cpu_features)}")
    facts.add_row("GPUs", "\n".join(gpu.name for gpu in here.gpus) or "none")
    facts.add_row("backends", ", ".join(here.backends))
    facts.add_row("installed", ", ".join(f"{name} {version or '(absent)'}" for name, version in here.engines.items()))
    console.print(facts)
    table = Table("", "", "what was found, and what to do", title="what it can run")
    for name, finding in findings.items():
        text = finding.detail + (f"\n→ {finding.advice}" if finding.advice else "")
        table.add_row(name, Text(finding.state, COLOURS[finding.state]), Text(text))
    console.print(table)
    cannot = f"The quickstart cannot run here. {'; '.join(reasons)}"
    console.print(Text(cannot if reasons else "The quickstart can run here: make train"))
