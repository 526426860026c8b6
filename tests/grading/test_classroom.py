"""A whole hall: grades, reports without hidden checks, and a run that is killed and goes on."""

import csv
import json
import random
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import psutil
import pytest

from course_lib.errors import CourseError
from course_lib.grading import batch_grading, reports
from course_lib.grading.batch_grading import Grading
from course_lib.grading.hidden import hidden_cases
from course_lib.grading.reports import COLUMNS
from course_lib.grading.submissions import read_submissions
from tests.grading.conftest import RIGHT, TASKS

ROOT = Path(batch_grading.__file__).resolve().parents[2]
POINTS = {"anna": 8, "berta": 7, "carl": 1, "dora": 0, "emil": 0, "nina": 8}


@pytest.fixture
def grading(tmp_path, hall, sandbox, limits):
    return Grading(TASKS, tmp_path / "solutions", tmp_path / "out", sandbox, limits, jobs=2, seed=7)


@pytest.fixture
def graded(grading, hall):
    submissions = read_submissions([hall], TASKS)
    grades = grading.grade(submissions, progress=False)
    reports.write_all(grading.out, grades, TASKS, submissions, isolated=True)
    return grades


def points_of(grades):
    return {name: sum(verdict.points for verdict in own.values()) for name, own in grades.items()}


class NoScripts(HTMLParser):
    def handle_starttag(self, tag, attrs):
        assert tag != "script" and not any(name.startswith("on") for name, _ in attrs)


def test_a_hall_is_graded_and_reported(graded, grading):
    points = points_of(graded)
    (frieda,) = points.keys() - POINTS.keys()
    assert points == POINTS | {frieda: 8} and frieda.startswith("_frieda-"), "her file's name was no safe one"
    assert graded["berta"]["toy.kept"].scores["argument kept"].points == 0
    assert graded["emil"]["toy.total"].error == "no answer"
    out = grading.out

    rows = list(csv.DictReader((out / "grades.csv").open()))
    assert tuple(rows[0]) == COLUMNS
    assert {row["student_id"]: int(row["score"]) for row in rows} == points
    assert {row["assignment"] for row in rows} == {"90_toys"} and {row["max_score"] for row in rows} == {"8"}
    assert [row["timestamp"] for row in rows if row["timestamp"]] == ["'=HYPERLINK(1)"]

    data = json.loads((out / "grades.json").read_text())
    assert {name: result["points"] for name, result in data.items()} == points
    assert "not a notebook" in data["emil"]["problems"][0]

    pages = [out / "class.html", *(out / "learners").iterdir()]
    assert len(pages) == 8
    for page in pages:
        NoScripts().feed(page.read_text())
    assert "&lt;script&gt;" in (out / "learners" / "dora.html").read_text()
    assert "argument kept" in (out / "class.html").read_text()


def test_no_report_tells_of_hidden_cases(graded, grading):
    drawn = [
        str(hidden_cases(task, random.Random(f"7 {name}"), grading.solutions)[0].inputs["values"][1])
        for name, task in TASKS.items()
    ]
    text = "".join(path.read_text() for path in grading.out.rglob("*") if path.is_file())
    assert [secret for secret in ("271828", "314159", *drawn) if secret in text] == []


def test_a_second_run_grades_only_what_is_new(graded, grading, hall):
    with mock.patch.object(batch_grading, "grade_source", side_effect=AssertionError("graded again")):
        again = grading.grade(read_submissions([hall], TASKS), progress=False)
    assert again == graded
    (hall / "carl.py").write_text(RIGHT)
    with mock.patch.object(batch_grading, "grade_source", wraps=batch_grading.grade_source) as grade:
        again = grading.grade(read_submissions([hall], TASKS), progress=False)
    assert grade.call_count == 2
    assert points_of(again)["carl"] == 8


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_run_that_was_ended_goes_on_and_leaves_nothing(how, tmp_path, hall, grading):
    for i in range(10):
        (hall / f"more{i}.py").write_text(RIGHT)
    folder, *paths = map(str, (grading.sandbox.folders[0], grading.solutions, grading.out, hall))
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {folder!r}]\n"
        "from pathlib import Path\nfrom course_lib.grading.batch_grading import Grading\n"
        "from course_lib.grading.sandbox import Limits, Sandbox\n"
        "from course_lib.grading.submissions import read_submissions\nfrom toy_tasks import KEPT, TOTAL\n"
        "tasks = {task.name: task for task in (TOTAL, KEPT)}\n"
        f"folder, solutions, out, hall = map(Path, {[folder, *paths]})\n"
        "sandbox = Sandbox(tasks='toy_tasks', folders=(folder,))\n"
        "Grading(tasks, solutions, out, sandbox, Limits(seconds=200.0), 2, 7).grade(read_submissions([hall], tasks))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    below = []
    while not below:  # between two submissions there may be none
        assert process.poll() is None
        time.sleep(0.02)
        if len(list(grading.out.glob("verdicts/*/*.json"))) >= 5:
            below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(how)
    assert process.wait() == -how
    assert not psutil.wait_procs(below, timeout=240)[1]

    kept = {path: path.stat().st_mtime_ns for path in grading.out.glob("verdicts/*/*.json")}
    submissions = read_submissions([hall], TASKS)
    assert 5 <= len(kept) < len(submissions) * len(TASKS)
    grades = grading.grade(submissions, progress=False)
    assert len(list(grading.out.glob("verdicts/*/*.json"))) == len(submissions) * len(TASKS) == 34
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert points_of(grades).items() >= POINTS.items()


def test_without_hidden_cases_one_is_told_so(tmp_path, hall, sandbox, limits):
    grading = Grading(TASKS, tmp_path / "absent", tmp_path / "out", sandbox, limits, 1)
    with pytest.raises(CourseError, match="no file .*absent"):
        grading.grade(read_submissions([hall], TASKS), progress=False)
