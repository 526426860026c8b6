"""Runs a lesson with papermill and hands back what its cells recorded, and the lines to take away.

A lesson measures times, and says what it measured; no test demands how they come out. It demands that the words are
those of that run, and that all that is counted bears out what the page claims (tools/claims.py).
"""

import ast
import contextlib
import html
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import nbformat
import papermill
import pytest

from course_lib.lessons.notebook import QUESTION, recorded
from tests.notebooks.forked_kernel import forked_kernels
from tools import claims

CELL_SECONDS = 960
"""More than any cell takes; the error names the cell, which pytest's limit for the whole lesson does not."""

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def page(name):
    """The stored page of a lesson: its cells, and its prose and its code as one text each."""
    cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    prose, code = ("\n".join(cell.source for cell in cells if cell.cell_type == kind) for kind in ("markdown", "code"))
    return SimpleNamespace(cells=cells, prose=prose, code=code)


def defined(name, *first_lines, **names):
    """Those names, and the functions and classes of the page's cells that begin so; nothing else of them is run."""
    for first in first_lines:
        source = next(cell.source for cell in page(name).cells if cell.source.startswith(first))
        found = [node for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        exec(compile(ast.Module(found, []), name, "exec"), names)
    return names


def assert_quoted(name, error):
    """The lesson explains an error under its own words, as far as they tell it from others."""
    assert error[:32] in " ".join(page(name).prose.split()), f"lesson {name} does not quote {error!r}"


def stored(name):
    """What the stored page recorded, and its takeaways."""
    return recorded(NOTEBOOKS / f"{name}.ipynb") | {"takeaways": takeaways(page(name))}


def execute(name, folder, cell_seconds=CELL_SECONDS, forked=True, **parameters):
    """Recorded values of a fresh run of a lesson, whose working directory is a folder; its ``takeaways`` with them.

    If ``forked``, the kernel is forked from this process, rather than started as a user's is.
    """
    done, answers = folder / f"{name}.ipynb", folder / "my_answers.json"
    learner = {
        "PYTHONSTARTUP": str(Path(__file__).with_name("answering.py")),
        "COURSE_LESSON": name,
        "COURSE_ANSWERS": str(answers),
    }
    with mock.patch.dict(os.environ, learner), forked_kernels() if forked else contextlib.nullcontext():
        papermill.execute_notebook(
            str(NOTEBOOKS / f"{name}.ipynb"),
            str(done),
            parameters,
            cwd=str(folder),
            progress_bar=False,
            kernel_name="python3",
            execution_timeout=cell_seconds,
            request_save_on_cell_execute=False,
            autosave_cell_every=0,
        )
    notebook = nbformat.read(done, as_version=4)
    assert not [o for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "error"]
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {"state": {}})
    assert "OutputModel" not in {state["model_name"] for state in states["state"].values()}, (
        "nbclient now and then waits for ever for a cell with an Output widget: jupyter/nbclient, issue 312"
    )
    assert claims.untrue(done, counted_only=True) == []
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    asked = [data[QUESTION]["name"] for data in outputs if QUESTION in data]
    kept = json.loads(answers.read_text())[name]
    assert [question for question in asked if "measured" not in kept.get(question, {})] == [], (
        "nobody can answer these before their results are shown, or nothing ever answers them"
    )
    return recorded(done) | {"takeaways": takeaways(notebook)}


def takeaways(notebook):
    """What the boxes of a notebook, or of a page, say, as text."""
    shown = ["".join(o.get("data", {}).get("text/html", "")) for c in notebook.cells for o in c.get("outputs", [])]
    return [html.unescape(re.sub("<[^>]+>", "", text)) for text in shown if "<b>Takeaway.</b>" in text]


def says(values, words):
    """Whether one of a lesson's boxes has these words; fails with what they say."""
    assert any(words in line for line in values["takeaways"]), (words, values["takeaways"])
    return True


@pytest.fixture(scope="module")
def run_lesson(tmp_path_factory):
    """A function (name, **parameters) -> recorded values of a fresh run."""
    return lambda name, **parameters: execute(name, tmp_path_factory.mktemp("lesson"), **parameters)


@pytest.fixture(scope="module")
def lesson(request, run_lesson):
    """Recorded values of a fresh run, by the module's PARAMETERS, of the lesson that it is named after."""
    return run_lesson(request.path.stem.removeprefix("test_"), **request.module.PARAMETERS)
