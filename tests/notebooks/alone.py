"""A lesson run where there is no network but loopback, and what it tried to reach beyond it."""

import os
from pathlib import Path

from course_lib.launching.netns import in_own_network
from course_lib.lessons.tracking.lab import without_a_route
from tests.notebooks.conftest import execute


def run_alone(name: str, folder: Path, **parameters) -> tuple[dict, int]:
    """Recorded values of a fresh run of a lesson, and how many connections and packets had no way to go."""
    return in_own_network(_run, name, folder, parameters)


def _run(name: str, folder: Path, parameters: dict) -> tuple[dict, int]:
    os.environ["HOME"] = str(folder)
    before = without_a_route()
    values = execute(name, folder, **parameters)
    return values, without_a_route() - before
