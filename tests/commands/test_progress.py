"""``course progress`` on planted files: what it counts, and what it says of files that it cannot read."""

import json

import nbformat
import pytest

from course_lib.cli import main
from course_lib.grading import check as checking
from course_lib.grading.check import Report, task_of
from course_lib.grading.task import Finding
from course_lib.learner_files import results_file

CELLS = (
    "predict('a', 1, ask='how many?')\npredict('not asked', 2)",
    "%time 1\nlesson.predict('b', 1, ask='which?')",
    "for n in (1, 2):\n    predict(f'c_{n}', 1, ask='and here?')",
    "predict('broken', ask=",
)
WHEN = {"when": "2026-01-01T10:00:00+00:00"}
ANSWERS = {
    "02_data_parallel": {
        "a": {"value": 1, "measured": 1.0, "close": True} | WHEN,
        "b": {"value": 2} | WHEN,
        "c_1": {"value": 2, "measured": 5.0, "close": False} | WHEN,
        "gone": {"value": 3} | WHEN,
    },
    "my own": {"x": {"value": 1} | WHEN},
}


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of two lessons, with a learner's files."""
    for variable in ("COURSE_ANSWERS", "COURSE_RESULTS"):
        monkeypatch.delenv(variable, raising=False)
    for folder in ("notebooks", "exercises"):
        (tmp_path / folder).mkdir()
    for name, cells in (("02_data_parallel", CELLS), ("06_fsdp", ())):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    (tmp_path / "notebooks" / "my_answers.json").write_text(json.dumps(ANSWERS))
    for name, wanting in (("ddp.average", 0), ("ddp.ring", 1)):
        task = task_of(name)
        findings = tuple(Finding(each, number >= wanting, None, "", "") for number, each in enumerate(task.properties))
        checking.keep(Report(task, findings), results_file(tmp_path / "exercises"))
    monkeypatch.chdir(tmp_path / "notebooks")
    return tmp_path


def test_the_table(course, capsys):
    assert main(["progress"]) == 0
    printed = capsys.readouterr().out
    lines = {line[:16].strip(): line.split() for line in printed.splitlines()}
    ring, average = (sum(task_of(name).points.values()) for name in ("ddp.ring", "ddp.average"))
    first, points = next(iter(task_of("ddp.ring").points.items()))
    earned = average + min(ring - points, task_of("ddp.ring").most({first}))
    row = " ".join(lines["02 data parallel"])
    assert "3 of 3 1 of 2 1 of " in row and f" {earned} of " in row
    assert " ".join(lines["06 fsdp"]).startswith("06 fsdp - - 0 of ")
    assert "within 10 %" in printed and "not here: my own" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_json(course, capsys):
    assert main(["progress", str(course), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    lesson = next(lesson for lesson in said["lessons"] if lesson["lesson"] == "02_data_parallel")
    assert (lesson["asked"], lesson["answered"], lesson["seen"], lesson["close"], lesson["solved"]) == (3, 3, 2, 1, 1)
    assert said["total"]["exercises"] == len(checking.TASKS) and said["other_lessons"] == ["my own"]


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("notebooks/my_answers.json", "{", "damaged"),
        ("notebooks/my_answers.json", '{"a": 1}', "damaged"),
        ("notebooks/my_answers.json", '{"02_data_parallel": {"a": {"value": 1, "close": "so"}}}', "true nor false"),
        ("exercises/my_results.json", "[]", "damaged"),
        ("exercises/my_results.json", '{"ddp.ring": {}}', "whole number"),
        ("notebooks/06_fsdp.ipynb", "{}", "not a notebook"),
    ],
)
def test_a_bad_file_is_one_line(course, capsys, file, content, says):
    (course / file).write_text(content)
    assert main(["progress"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert says in printed.err and file.split("/")[1] in printed.err
    assert (course / file).read_text() == content


def test_forgetting_a_lesson(course, capsys):
    assert main(["progress", str(course / "exercises")]) == 2 and "no lessons in" in capsys.readouterr().err
    assert main(["progress", "--forget", "02_data_paralel"]) == 2 and "02_data_parallel" in capsys.readouterr().err
    assert main(["progress", "--forget", "02_data_parallel"]) == 0
    assert set(json.loads((course / "notebooks" / "my_answers.json").read_text())) == {"my own"}


def test_a_check_keeps_its_last_result(course, capsys, monkeypatch):
    task = task_of("ddp.ring")
    for holds in (True, False):
        found = tuple(Finding(name, holds, None, "", "") for name in task.properties)
        monkeypatch.setattr(checking, "examine", lambda task, *_, found=found: Report(task, found))
        checking.check("ddp.ring", print, folder=course / "exercises")
    kept = json.loads((course / "exercises" / "my_results.json").read_text())
    assert kept["ddp.ring"]["points"] == 0 and kept["ddp.average"]["points"] == kept["ddp.average"]["of"]
    (course / "exercises" / "my_results.json").unlink()
    checking.check("ddp.ring", print)
    assert not list(course.rglob("my_results.json")), "a grader's run of the notebook keeps nothing"
