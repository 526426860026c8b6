"""Failing ranks under torchrun: it names the first failure, from the error file that the rank left."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds after which torchrun is ended: it and its ranks import torch."""


@dataclass(frozen=True)
class Launched:
    """End of a launch.

    Attributes:
        code: torchrun's exit code.
        report: what it prints of a failure, less paths; empty where there was none.
        root_cause: the rank that it calls the root cause, None where there was none.
        errors: by rank, what the rank's error file says; of ranks without ``@record`` there is none, nor of one that
            torchrun ended while it wrote its file.
    """

    code: int
    report: str
    root_cause: int | None
    errors: dict[int, Any]


def torchrun(script: str, world_size: int) -> Launched:
    """Run a script as `torchrun --standalone` does, on a port that the system chooses.

    Args:
        script: Python source.
        world_size: ranks.
    Raises:
        subprocess.TimeoutExpired: it did not end within LIMIT.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fails.py").write_text(script, encoding="utf-8")
        options = ["--standalone", f"--nproc-per-node={world_size}", "--max-restarts=0", f"--log-dir={folder / 'logs'}"]
        ended = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *options, str(folder / "fails.py")],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        errors = _messages(folder)
        report = ended.stderr.partition("=" * 60)[2].rpartition("=" * 60)[0].replace(f"{folder}/", "")
    cause = re.search(r"Root Cause .*?rank\s+: (\d+)", report, re.DOTALL)
    return Launched(ended.returncode, re.sub(r'"/\S+/', '"', report).strip(), int(cause[1]) if cause else None, errors)


def _messages(logs: Path) -> dict[int, Any]:
    """What the ranks' error files say, by rank. torch writes them in place: one may be half there."""
    messages = {}
    for path in sorted(logs.rglob("error.json")):
        with contextlib.suppress(json.JSONDecodeError):
            messages[int(path.parent.name)] = json.loads(path.read_text(encoding="utf-8"))["message"]
    return messages
