"""Runs a lesson with papermill and hands back what its cells recorded."""

from pathlib import Path

import nbformat
import papermill
import pytest

from course_lib.lesson import recorded

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def run_lesson(tmp_path_factory):
    """A function (name, **parameters) -> recorded values of a fresh run."""

    def run(name, **parameters):
        done = tmp_path_factory.mktemp("lesson") / f"{name}.ipynb"
        papermill.execute_notebook(str(NOTEBOOKS / f"{name}.ipynb"), str(done), parameters, cwd=str(done.parent),
                                   progress_bar=False, kernel_name="python3")
        assert not [o for c in nbformat.read(done, as_version=4).cells for o in c.get("outputs", [])
                    if o.output_type == "error"]
        return recorded(done)

    return run
