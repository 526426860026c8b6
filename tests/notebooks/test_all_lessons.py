"""What every lesson has to be: ordered, complete, committed with outputs, small, free of errors."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from course_lib.lessons import listing
from course_lib.lessons.notebook import MIME, QUESTION
from tests.notebooks.conftest import NOTEBOOKS, page

LESSONS = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def test_each_lesson_has_a_test_that_runs_it():
    ran = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_[0-9]*.py")}
    assert ran == set(LESSONS)


@pytest.mark.parametrize("name", LESSONS)
def test_it_is_whole_small_and_was_run(name):
    text = (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text.encode()) < 360_000
    assert re.findall(r"/(?:home|Users|root|work)/", text) == [], "an output tells of somebody's machine"
    lesson = nbformat.reads(text, as_version=4)
    nbformat.validate(lesson)
    code = [cell for cell in lesson.cells if cell.cell_type == "code" and cell.source.strip()]
    assert [cell.metadata.get("tags", []) for cell in code].count(["parameters"]) == 1
    assert [cell.source for cell in code if not cell.execution_count] == [], "run `make notebooks`"
    outputs = [output for cell in code for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert any({"image/png", "image/svg+xml"} & output.get("data", {}).keys() for output in outputs), "it has a figure"


@pytest.fixture(params=LESSONS)
def lesson(request):
    return page(request.param)


def entries(cell, mime):
    return [output["data"][mime] for output in cell.get("outputs", []) if mime in output.get("data", {})]


def test_a_question_can_be_answered_before_its_result_is_seen(lesson):
    """Question and measurement stand in cells of their own, in this order, and each question is taken up."""
    asked, measured = {}, {}
    for position, cell in enumerate(lesson.cells):
        asked |= {entry["name"]: position for entry in entries(cell, QUESTION)}
        measured |= {entry["name"]: position for entry in entries(cell, MIME)}
    assert len(asked) >= max(3, len(re.findall(r"\bask=", lesson.code))), "each `ask=` left its name on the stored page"
    assert {name: (asked[name], measured.get(name)) for name in asked if measured.get(name, -1) <= asked[name]} == {}


def test_a_listing_is_the_source_as_it_is(lesson):
    """Text, link and lines, also where no HTML is shown; `python tools/notebooks.py --listings` renews them."""
    shown = [output.get("data", {}) for cell in lesson.cells for output in cell.get("outputs", [])]
    stored = [data for data in shown if re.search("href='../course_lib/.*<pre", data.get("text/html", ""), re.S)]
    for data in stored:
        named = data[listing.MIME]
        assert listing.Listing.named(**named).as_stored().items() <= data.items(), named


def outside_of_comprehensions(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.comprehension, ast.Lambda)):
            yield from outside_of_comprehensions(child)


def test_no_cell_rebinds_what_a_learner_may_run_again(lesson):
    """A function, class or module keeps its name, so that its cell's callers can be run a second time."""
    given, rebound = {}, []
    for cell in lesson.cells:
        if cell.cell_type != "code" or cell.source.startswith("%"):
            continue
        tree = ast.parse(cell.source)
        top = [
            node
            for line in tree.body
            if not isinstance(line, (ast.FunctionDef, ast.ClassDef))
            for node in outside_of_comprehensions(line)
        ]
        stored = {node.id for node in top if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        rebound += sorted(stored & given.keys())
        for node in tree.body:
            names = (
                [node.name]
                if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                else [alias.asname or alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            )
            rebound += [name for name in names if given.setdefault(name, type(node)) is not type(node)]
    assert rebound == []


LAUNCHERS = {"launch", "launch_privately"}


def launches_of(source):
    """Keyword arguments of each call of a launcher, by itself or through functools.partial, as they are written."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = call.args[0] if call.args and ast.unparse(call.func) == "functools.partial" else call.func
        if getattr(called, "attr", getattr(called, "id", None)) in LAUNCHERS:
            given = {k.arg: ast.unparse(k.value) for k in call.keywords}
            for keyword in call.keywords:  # launch(**{"device": "cpu", **options})
                if keyword.arg is None and isinstance(keyword.value, ast.Dict):
                    pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
                    given |= {ast.literal_eval(key): ast.unparse(value) for key, value in pairs if key}
            yield given


def test_ranks_take_the_lessons_device_and_the_librarys_time():
    """No launch has a limit of its own, but the one that shows a hang."""
    given = [
        (name, launch)
        for name in LESSONS
        for cell in page(name).cells
        if cell.cell_type == "code" and not cell.source.startswith("%")
        for launch in launches_of(cell.source)
    ]
    assert [(name, launch["timeout"]) for name, launch in given if "timeout" in launch] == [
        ("07_pipeline_schedules", "8")
    ]
    assert {launch.get("device") for _, launch in given} == {"device", "'cpu'"}
