"""`course release` and `course check`: what learners get, and what they read in a terminal."""

from argparse import Namespace
from pathlib import Path
from unittest import mock

import nbformat
import pytest

from course_lib.commands import check, release
from course_lib.errors import DataError
from course_lib.grading import hidden, masters
from course_lib.grading import release as bundling
from course_lib.grading.masters import answers
from course_lib.grading.tasks import TASKS

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):

    out = tmp_path_factory.mktemp("release") / "course"
    assert release.run(Namespace(out=out)) == 0
    return out


def test_the_bundle_has_the_exercises_and_nothing_of_the_instructors(bundle):
    assert len(list((bundle / "exercises").glob("*.ipynb"))) == 19
    assert (bundle / "exercises" / "README.md").is_file() and (bundle / "course_lib" / "cli.py").is_file()
    assert (bundle / "notebooks" / "02_data_parallel.ipynb").is_file() and not (bundle / "tests").exists()
    checks = {path.read_bytes() for path in (SOLUTIONS / "hidden").glob("*.py")}
    assert len(checks) == 19
    for path in filter(Path.is_file, bundle.rglob("*")):
        assert not path.relative_to(bundle).parts[0].startswith(("solutions", "."))
        assert path.suffix not in (".pyc", ".db") and "planted" not in path.name
        assert path.read_bytes() not in checks
        if path.suffix == ".ipynb":
            text = path.read_text(encoding="utf-8")
            assert "BEGIN SOLUTION" not in text and "BEGIN HIDDEN" not in text


def test_no_solution_is_in_the_exercises(bundle):
    stubs, solved = {}, {}
    for path in (bundle / "exercises").glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        stubs |= {cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source for cell in cells}
        solved |= answers(SOLUTIONS / path.name)
    assert solved.keys() == TASKS.keys()
    for name, source in solved.items():
        stub = stubs[TASKS[name].grade_id]
        assert "raise NotImplementedError" in stub and "NotImplementedError" not in source and stub != source


def test_a_folder_in_use_is_left_alone(course, tmp_path, bundle):
    (tmp_path / "mine.txt").write_text("mine")
    code, out, err = course("release", "--out", tmp_path)
    assert code == 2 and out == "" and err == f"course: {tmp_path} is in use: name a new folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(masters, "released", lambda path: "### BEGIN HIDDEN TESTS")
    with pytest.raises(DataError, match="would give a solution or a hidden check away"):
        bundling.bundle(SOLUTIONS.parent, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_release_wants_a_clone(course, tmp_path, monkeypatch):
    none = mock.Mock(side_effect=DataError("no folder solutions", "use the instructor's copy"))
    monkeypatch.setattr(hidden, "solutions_folder", none)
    said = "course: no folder solutions: use the instructor's copy\n"
    assert course("release", "--out", tmp_path / "out") == (2, "", said)


def test_check_lists_the_exercises(course):
    code, out, _ = course("check")
    assert code == 0 and len(out.splitlines()) == len(TASKS) and "ddp.ring" in out and "ring_all_reduce" in out


def test_check_of_a_notebook_and_of_a_file(course, tmp_path):
    code, out, _ = course("check", SOLUTIONS / "04_distributed_evaluation.ipynb", "--tasks", "evaluation.perplexity")
    assert code == 0 and "evaluation.perplexity: 4 of 4 points" in out
    answer = tmp_path / "mine.py"
    wrong = "import math\n\ndef perplexity(loss_sum, tokens):\n    return math.exp(loss_sum / tokens)\n"
    answer.write_text(answers(SOLUTIONS / "09_plan_and_simulate.ipynb")["plan.all_reduce"] + "\n" + wrong)
    code, out, _ = course("check", answer)
    assert code == 1 and "no   perplexity (3)\n       expected on rank " in out
    assert "plan.all_reduce: 4 of 4 points" in out, "of two answers one is right"
    code, out, _ = course("check", answer, "--tasks", "ddp.ring")
    assert code == 1 and "has no answer to it" in out


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("notes.md", "# notes", "is not a notebook"),
        ("bad.py", "def f(:", "bad.py: line 1 is not Python"),
        ("empty.py", "", "has no answer to any exercise"),
        ("list.ipynb", "[]", "is not a notebook"),
        ("none.ipynb", "", "is not a notebook"),
    ],
)
def test_a_file_that_cannot_be_checked_is_named(course, tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    code, out, err = course("check", tmp_path / name)
    assert code == 2 and out == "" and said in err and len(err.splitlines()) == 1


def test_a_file_that_is_not_there_and_an_unknown_exercise(course, tmp_path):
    assert "No such file" in course("check", tmp_path / "mine.py")[2]
    assert "did you mean `ddp.ring`" in course("check", "mine.py", "--tasks", "ddp.rin")[2]


def test_what_a_cell_raises_is_told(tmp_path, capsys):
    assert not check._check(TASKS["ddp.ring"], "1 / 0", tmp_path)
    assert not check._check(TASKS["ddp.ring"], "other = 1", tmp_path)
    out = capsys.readouterr().out
    assert "the cell raised ZeroDivisionError" in out and "defines no function ring_all_reduce" in out
