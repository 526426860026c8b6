"""Types: mypy takes a core for twenty seconds where nothing is cached, so it runs beside the other tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_mypy_finds_nothing():
    done = subprocess.run([Path(sys.executable).parent / "mypy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
