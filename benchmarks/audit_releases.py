"""Released versions under `course audit`: what it says of a gradient that was wrong, as it was released.

    python benchmarks/audit_releases.py      # needs the package index; writes benchmarks/audit-releases.md

A release is installed beside this environment's packages, into a folder of its own, and only for its own run.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.harness import options, publish, table

COMMAND = ("audit", "--model", "olmoe", "--engine", "transformers")
RELEASES: tuple[tuple[str, ...], ...] = (("transformers==5.16.0", "huggingface-hub>=1.5,<2"), ())
"""Packages of each; none: this environment's own."""


def audited(packages: tuple[str, ...], *options: str) -> dict[str, Any]:
    """What `course audit --json` printed.

    Raises:
        RuntimeError: it was refused, with its line.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if packages:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages], check=True
            )
            environment["PYTHONPATH"] = folder
        done = subprocess.run(
            [sys.executable, "-m", "course_lib", *COMMAND, *options, "--json"],
            env=environment,
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)


def rows(name: str, told: dict[str, Any]) -> Iterator[tuple]:
    """A line of the table per layout: what agrees, and the first sentence."""
    for verdict in told["verdicts"]:
        wrong = [finding for finding in verdict["gradients"] if finding["kind"] != "equal"]
        layout = " × ".join(f"{axis}{size}" for axis, size in verdict["layout"].items())
        agree = f"{len(verdict['gradients']) - len(wrong)} of {len(verdict['gradients'])}"
        yield name, layout, f"{max(verdict['losses_apart']):.1e}", agree, verdict["told"][0] if wrong else ""
    for layout, why in (told["failed"] | told["refused"]).items():
        yield name, layout, "", "not run", why.split(" (")[0]


def main() -> None:
    """Audit all, and write the table."""
    options(__doc__)
    publish(
        "audit-releases",
        "Releases under `course audit`",
        ("torch", "transformers"),
        f"`course {' '.join(COMMAND)}`: a small OLMoE, two steps of AdamW beside one process. In 5.16.0 ep is its "
        "tensor ranks, which have the same rows and share the experts. The first sentence of each is shown.",
        table(
            "release | layout | loss apart, relative | gradients that agree | said",
            [
                row
                for packages in RELEASES
                for row in rows(packages[0] if packages else "transformers, as pinned here", audited(packages))
            ],
        ),
    )


if __name__ == "__main__":
    main()
