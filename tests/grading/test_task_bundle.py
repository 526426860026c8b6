"""`course release --format tasks`: each exercise for programs, graded where no course is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.errors import ConfigError, DataError
from course_lib.grading import masters, task_bundle, task_check
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.selftest import planted
from course_lib.grading.tasks import TASKS
from tests.grading import hostile

SAMPLE = ("ddp.ring", "evaluation.perplexity")  # one on ranks, and one without


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """All tasks, written once."""
    out = tmp_path_factory.mktemp("tasks") / "all"
    task_bundle.bundle(solutions_folder().parent, out, TASKS)
    return out


def graded(tasks, name, source, tmp_path, **environment):
    """Exit code and result of a task's own checker, in a process of its own."""
    folder = tasks / TASKS[name].grade_id
    (tmp_path / "answer.py").write_text(source)
    command = [sys.executable, "check.py", tmp_path / "answer.py", "--seed", "3", "--out", tmp_path / "r.json"]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=1200, env=os.environ | environment
    )
    assert ended.stderr == "" and json.loads(ended.stdout) == json.loads((tmp_path / "r.json").read_text())
    return ended.returncode, json.loads(ended.stdout)


def full(name):
    return masters.answers(solutions_folder() / f"{TASKS[name].lesson}.ipynb")[name]


def test_every_exercise_is_a_task_and_what_a_program_gets_tells_no_solution(tasks):
    assert {path.name for path in tasks.iterdir() if path.is_dir()} == {
        "grader",
        *(task.grade_id for task in TASKS.values()),
    }
    listed = json.loads((tasks / "tasks.json").read_text())["tasks"]
    assert {task["name"]: task["points"] for task in listed} == {name: task.points for name, task in TASKS.items()}
    hidden = [path.read_text() for path in (solutions_folder() / "hidden").glob("*.py")]
    broken = {each.task: each.new for each in planted(solutions_folder()) if each.name == "as it was released"}
    for name, task in TASKS.items():
        folder = tasks / task.grade_id
        assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == {
            "prompt.md",
            "task.json",
            "check.py",
            "workspace/answer.py",
        }
        prompt, stub = (folder / "prompt.md").read_text(), (folder / "workspace" / "answer.py").read_text()
        lines = {line.strip() for line in full(name).splitlines() if len(line.strip()) > 24}
        given = {line.strip() for line in (stub + broken.get(name, "")).splitlines()}
        assert {line.strip() for line in full(name).splitlines()} - given, f"{name}: nothing is to be written"
        assert f"`{task.function}`" in prompt and stub.strip() in prompt and masters.STUB in stub
        assert not [line for line in lines - given if line in prompt], f"{name}: a line of the solution in its prompt"
        assert "<details>" not in prompt and "](.." not in prompt and not [text for text in hidden if text in prompt]


@pytest.mark.parametrize("name", [SAMPLE[0], *(pytest.param(name, marks=pytest.mark.long) for name in SAMPLE[1:])])
def test_a_stub_scores_0_and_the_solution_1(tasks, tmp_path, name):
    code, result = graded(tasks, name, (tasks / TASKS[name].grade_id / "workspace" / "answer.py").read_text(), tmp_path)
    assert code == 1 and result["score"] == 0 and "write your answer here" in result["error"]
    code, result = graded(tasks, name, full(name), tmp_path, PYTHONPATH="")
    assert code == 0 and result["score"] == 1 and result["error"] is None
    assert result["seed"] == 3 and result["id"] == TASKS[name].grade_id


@pytest.mark.long
def test_planted_wrong_answers_and_attacks_fail_in_this_form_too(tasks, tmp_path):
    name = "evaluation.perplexity"
    folder = tasks / TASKS[name].grade_id
    wrong = [answer for answer in planted(solutions_folder()) if answer.task == name]
    assert len(wrong) >= 3
    for answer in wrong[:2]:
        (tmp_path / "answer.py").write_text(answer.source(full(name)))
        result = task_check.result(folder, tmp_path / "answer.py", seed=1)
        assert result["scores"][answer.loses]["points"] == 0 and result["score"] < 1, answer.name
    attacks = [attack for attack in hostile.ALL if attack in (*hostile.EQUAL, *hostile.INSPECTS)]
    assert len(attacks) >= 10
    for attack in attacks[::8]:
        source = attack.source.replace("def total(values)", f"def {TASKS[name].function}(*values)")
        (tmp_path / "answer.py").write_text(source)
        assert task_check.result(folder, tmp_path / "answer.py", seed=1)["points"] == 0, attack


@pytest.mark.long
@pytest.mark.parametrize("name", TASKS)
def test_all_of_it_for_every_task(tasks, tmp_path, name):
    folder, task = tasks / TASKS[name].grade_id, TASKS[name]
    stub = (folder / "workspace" / "answer.py").read_text()
    nothing = f"def {task.function}(*args, **options):\n    return None\n"
    for source, score in ((stub, 0), (full(name), 1), (nothing, 0)):
        (tmp_path / "answer.py").write_text(source)
        assert task_check.result(folder, tmp_path / "answer.py", seed=2)["score"] == score
    for answer in planted(solutions_folder()):
        if answer.task == name:
            (tmp_path / "answer.py").write_text(answer.source(full(name)))
            result = task_check.result(folder, tmp_path / "answer.py", seed=2)
            assert result["scores"][answer.loses]["points"] < result["scores"][answer.loses]["maximum"], answer.name


def test_an_answer_that_is_not_there_and_one_half_written_leave_one_line(tasks, tmp_path, capsys, monkeypatch):
    folder = tasks / "ddp-ring"
    assert task_check.main(folder, [str(tmp_path / "none.py")]) == 2
    assert (
        capsys.readouterr().err == f"check.py: {tmp_path / 'none.py'} is no file of at most 1 MiB: "
        "give the text of an answer\n"
    )
    monkeypatch.setattr(masters, "answers_of", lambda text: {})
    with pytest.raises(DataError, match="no text or no stub"):
        task_bundle.bundle(solutions_folder().parent, tmp_path / "out", {"ddp.ring": TASKS["ddp.ring"]})
    with pytest.raises(ConfigError, match="lies within"):
        task_bundle.bundle(solutions_folder().parent, Path(task_bundle.__file__).parent / "out", TASKS)
    assert list(tmp_path.iterdir()) == []
