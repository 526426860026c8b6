"""nbgrader's own commands on the course's folders, from the masters to the grades."""

import csv
import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbgrader.apps.nbgraderapp import NbGraderApp

from course_lib.grading.masters import answers
from course_lib.grading.tasks import TASKS
from tests.forked_process import Forked
from tests.notebooks.forked_kernel import forked_kernels

ROOT = Path(__file__).resolve().parents[2]
LESSON = "04_distributed_evaluation"
WRONG = {"    dist.all_reduce(both)\n": "", ".flatten(0, 1)[:total]": ".flatten(0, 1)"}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A course folder in which nbgrader has released a lesson and graded two learners' answers."""
    course = tmp_path_factory.mktemp("nbgrader") / "spring"
    shutil.copytree(ROOT / "solutions", course / "solutions", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "nbgrader_config.py", course)
    (course / "exercises").mkdir()

    environment = os.environ | {  # nbgrader calls alembic by its name
        "PYTHONPATH": str(ROOT),
        "JUPYTER_CONFIG_DIR": str(course / "jupyter"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }

    def nbgrader(*arguments):
        def main():
            with forked_kernels():
                NbGraderApp.launch_instance(list(arguments))

        with open(course / "log", "w") as log:
            code = Forked(main, environment, course, (log.fileno(), log.fileno())).wait()
        assert code == 0, (course / "log").read_text()

    nbgrader("generate_assignment", "--force", "--notebook", LESSON)
    for learner in ("right", "wrong"):
        hand_in(course, learner)
    nbgrader("autograde", "--notebook", LESSON)
    nbgrader("generate_feedback", "--notebook", LESSON)
    nbgrader("export")
    return course


def hand_in(course, learner):
    """A released notebook with its answer cells filled in."""
    notebook = nbformat.read(course / "exercises" / f"{LESSON}.ipynb", as_version=4)
    full = {TASKS[name].grade_id: source for name, source in answers(ROOT / "solutions" / f"{LESSON}.ipynb").items()}
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            cell.source = full[cell.metadata["nbgrader"]["grade_id"]]
            for old, new in WRONG.items() if learner == "wrong" else ():
                cell.source = cell.source.replace(old, new)
    (course / "submitted" / learner).mkdir(parents=True)
    nbformat.write(notebook, course / "submitted" / learner / f"{LESSON}.ipynb")


def test_nbgrader_releases_what_the_course_releases(graded):
    made = sorted(path.relative_to(graded / "exercises").as_posix() for path in (graded / "exercises").rglob("*"))
    assert made == [f"{LESSON}.ipynb"], "neither hidden checks nor planted answers"
    assert (graded / "exercises" / made[0]).read_text() == (ROOT / "exercises" / made[0]).read_text()


def test_grades_with_partial_credit(graded):
    with open(graded / "grades.csv", newline="") as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    most = sum(sum(task.points.values()) for task in TASKS.values() if task.lesson == LESSON)
    assert set(rows) == {"right", "wrong"} and {row["assignment"] for row in rows.values()} == {"spring"}
    assert float(rows["right"]["score"]) == float(rows["right"]["max_score"]) == most
    assert 0 < float(rows["wrong"]["score"]) < most, "points for the properties that hold"


def test_feedback_is_written_and_shows_no_hidden_case(graded):
    for learner in ("right", "wrong"):
        page = (graded / "feedback" / learner / f"{LESSON}.html").read_text(encoding="utf-8")
        assert "evaluation.gather" in page and "DRAW" not in page and "rng" not in page
    assert "no   rows (4)" in page and (graded / "gradebook.db").is_file()
