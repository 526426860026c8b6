"""A lesson run where there is no network but loopback, and what it tried to reach beyond it."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat

from course_lib.launching.netns import in_own_network
from course_lib.lessons.notebook import recorded
from course_lib.lessons.tracking_lab import without_a_route
from tests.notebooks.conftest import NOTEBOOKS, takeaways


def run_alone(name: str, folder: Path, timeout: float = 960, **parameters) -> tuple[dict, int]:
    """Recorded values of a fresh run of a lesson, and how many connections and packets had no way to go."""
    return in_own_network(_run, name, folder, timeout, parameters)


def _run(name: str, folder: Path, timeout: float, parameters: dict) -> tuple[dict, int]:
    done = folder / f"{name}.ipynb"
    options = [text for key, value in parameters.items() for text in ("-p", key, str(value))]
    before = without_a_route()
    ended = subprocess.run([sys.executable, "-m", "papermill", str(NOTEBOOKS / f"{name}.ipynb"), str(done), *options,
                            "--cwd", str(folder), "--no-progress-bar", "-k", "python3"],
                           capture_output=True, text=True, timeout=timeout, env=os.environ | {"HOME": str(folder)})
    assert ended.returncode == 0, ended.stderr[-3000:]
    after = without_a_route()
    return recorded(done) | {"takeaways": takeaways(nbformat.read(done, as_version=4))}, after - before
