"""Released versions under `course audit`: what it says of a gradient that was wrong, as it was released.

    python benchmarks/audit_releases.py      # needs the package index; writes benchmarks/audit-releases.md

Each release is installed beside this environment's packages, into a folder of its own, and only for its own run.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).parent
SUBJECT = HERE / "audit_olmoe.py"


class Release(NamedTuple):
    """What is installed, and what is audited."""

    packages: tuple[str, ...]
    function: str
    axes: str


RELEASES = (
    Release(("transformers==5.16.0", "huggingface-hub>=1.5,<2"), "experts", "tp"),
    Release(("transformers==5.16.0", "huggingface-hub>=1.5,<2"), "make", "shard"),
    Release((), "make", "tp"),
    Release((), "make", "shard"),
)
"""No packages: this environment's own."""


def audited(release: Release) -> dict[str, Any]:
    """What `course audit --json` printed, for two ranks.

    Raises:
        RuntimeError: it was refused, with its line.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        if release.packages:
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder,
                            *release.packages], check=True)
            environment["PYTHONPATH"] = folder
        done = subprocess.run([sys.executable, "-m", "course_lib", "audit", f"{SUBJECT}:{release.function}", "--ranks",
                               "2", "--axes", release.axes, "--json"], env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1) or "{" not in done.stdout:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout[done.stdout.index("{"):])


def row(release: Release, told: dict[str, Any]) -> str:
    """A line of the table: what agrees, and the sentence of the finding that explains most."""
    (verdict,) = told["verdicts"]
    wrong = [finding for finding in verdict["gradients"] if finding["kind"] != "equal"]
    named = [finding["sentence"] for finding in wrong if finding["kind"] != "unrelated"]
    what = {"make": "layers split", "experts": "experts split"}[release.function]
    layout = " × ".join(f"{axis}{size}" for axis, size in verdict["layout"].items())
    name = release.packages[0] if release.packages else "transformers, as pinned here"
    agree = f"{len(verdict['gradients']) - len(wrong)} of {len(verdict['gradients'])}"
    apart = max(verdict["losses_apart"])
    return f"| {name} | OLMoE, {what}, {layout} | {apart:.1e} | {agree} | {named[0] if named else ''} |"


def main() -> None:
    """Audit all, and write the table."""
    rows = [row(release, audited(release)) for release in RELEASES]
    text = (f"# Releases under `course audit`\n\n{machine.measured_on('torch', 'transformers')}\n\n"
            "Two ranks beside one process, two steps of AdamW. A gradient that lies before a wrong one in the backward "
            "is often a little off too; the sentence is of the one that is explained.\n\n"
            "| release | what | loss apart, relative | gradients that agree | said |\n|---|---|---|---|---|\n"
            + "\n".join(rows) + "\n")
    write_text(HERE / "audit-releases.md", text)
    print(text)


if __name__ == "__main__":
    main()
