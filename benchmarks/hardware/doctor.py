"""``course doctor`` on this machine, in a process of its own as its users have it."""

import json
import subprocess
import sys

from benchmarks.hardware.findings import Findings, Settings, failed, first_line
from benchmarks.hardware.processes import ROOT

MAY_BE_ABSENT = ("Hugging Face Hub", "MiniLM", "W&B")
"""What this tool does without."""


def run(settings: Settings, findings: Findings) -> None:
    """Every check that a machine with so many GPUs should pass."""
    command = [sys.executable, str(ROOT / "course_lib" / "cli.py"), "doctor", "--json"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=110)
    print(said.stdout, said.stderr)
    if not said.stdout:
        raise failed(said.stderr, first_line(said.stderr))
    content = json.loads(said.stdout)
    for reason in content["reasons"]:
        findings.fail("the quickstart cannot run", reason)
    table = findings.table("check", "state", "what was found")
    for check in content["checks"]:
        table.row(check["name"], check["state"], check["detail"])
        expected = check["name"] in MAY_BE_ABSENT or (check["name"] == "many GPUs" and settings.gpus < 2)
        if check["state"] == "cannot" and not expected and not any(check["detail"] in r for r in content["reasons"]):
            findings.fail(check["name"], check["detail"])
