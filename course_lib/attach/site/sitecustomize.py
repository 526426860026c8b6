"""Python runs this first in each process of a job that `course meter` or `course watch` has started."""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(HERE))


def run_the_hidden_one() -> None:
    """The job's own sitecustomize, where it has one: this file stands before it."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != HERE])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def attach() -> None:
    """Our package, by where it lies: the job's Python may be another than the command's, and has no course then."""
    spec = importlib.util.spec_from_file_location(
        "course_lib", os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["course_lib"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    from course_lib.attach import inside

    inside.wait_for_torch()


if os.environ.get("COURSE_ATTACH"):
    attach()
run_the_hidden_one()
