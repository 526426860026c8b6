"""``course grade`` as an instructor calls it, on the course's own exercises."""

import json

import pytest

from course_lib import cli
from course_lib.commands import grade
from course_lib.errors import ConfigError, CourseError
from course_lib.grading import masters
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.tasks import TASKS


@pytest.fixture
def command(capsys):
    """Run the command; gives exit code and stdout."""

    def call(*arguments):
        parser = cli.Parser(prog="course grade", allow_abbrev=False)
        grade.register(parser)
        code = grade.run(parser.parse_args([cli.underscored(str(argument)) for argument in arguments]))
        return code, capsys.readouterr().out

    return call


def test_a_solution_has_full_points_and_a_stub_none(command, tmp_path):
    task = next(task for task in TASKS.values() if not task.needs_ranks)
    master = solutions_folder() / f"{task.lesson}.ipynb"
    for name, text in {"anna": master.read_text(), "bert": masters.released(master)}.items():
        (tmp_path / "submitted" / name / task.lesson).mkdir(parents=True)
        (tmp_path / "submitted" / name / task.lesson / f"{task.lesson}.ipynb").write_text(text)
    code, out = command(tmp_path / "submitted", "--out", tmp_path / "out", "--tasks", task.name)
    assert code == 0 and "2 learners, 1 tasks" in out
    grades = json.loads((tmp_path / "out" / "grades.json").read_text())
    assert grades["anna"]["points"] == grades["anna"]["maximum"] == sum(task.points.values())
    assert grades["bert"]["points"] == 0


def test_without_a_sandbox_it_says_so(command, tmp_path):
    task = next(task for task in TASKS.values() if not task.needs_ranks)
    (tmp_path / "anna.py").write_text(f"def {task.function}(*args): return None\n")
    code, out = command(tmp_path / "anna.py", "--out", tmp_path / "out", "--tasks", task.name, "--no-sandbox")
    assert code == 0 and "without a sandbox" in out
    for page in ("class.html", "learners/anna.html"):
        assert "without a sandbox" in (tmp_path / "out" / page).read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no submissions"),
        (("x",), "no --out"),
        (("x", "--out", "o", "--tasks", "ddp.bucketin"), "ddp.bucketing"),
        (("x", "--out", "o", "--jobs", "0"), "above 0"),
        (("x", "--out", "o", "--seconds", "-1"), "above 0"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(command, arguments, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        command(*arguments)
    assert not list(tmp_path.iterdir())


def test_an_absent_submission_is_said(command, tmp_path):
    with pytest.raises(CourseError, match="no submission"):
        command(tmp_path / "absent", "--out", tmp_path / "out")
