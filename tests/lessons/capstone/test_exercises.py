"""The checks of the capstone's exercises pass what was asked for, and say what is missing of what was not."""

import os
import shutil
import signal

import pytest

from course_lib.launching.launch import launch
from course_lib.lessons.capstone import exercises
from course_lib.lessons.capstone.decisions import Project
from course_lib.lessons.capstone.rehearsal import KillAt, break_run
from course_lib.lessons.capstone.rubric import Criterion
from course_lib.training.run import train
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.notebooks.test_13_capstone import DECISIONS


class KillAtSave(KillAt):
    """Dies just after a checkpoint of its step was written."""

    def on_step_end(self, trainer):
        pass

    def on_save(self, trainer, checkpoint):
        if (trainer.rank, trainer.state.step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def project():
    return Project.of(
        DECISIONS | {"strategy": "ddp", "steps": 6, "save_steps": 2, "kill_step": 5, "other": {"strategy": "fsdp"}}
    )


@pytest.fixture(scope="module")
def folder(project, tmp_path_factory):
    """Two runs: `whole`, and `broken` with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("capstone")
    launch(
        train, project.config(folder / "whole", save_steps=0), num_processes=2, device="cpu", timeout=400, stream=False
    )
    assert break_run(project, folder / "broken").checkpoint == "checkpoint-000004"
    return folder


@pytest.fixture
def breaks_quickly(monkeypatch, folder):
    """The broken run is copied, not run anew."""

    def copied(project, target, kill=None):
        shutil.copytree(folder / "broken", target)
        return exercises.break_run.broken

    copied.broken = type(
        "Broken",
        (),
        {
            "killed": True,
            "checkpoint": "checkpoint-000004",
            "lost": 1,
            "step": 5,
            "how": "rank 1 was killed by SIGKILL",
        },
    )()
    monkeypatch.setattr(exercises, "break_run", copied)


def flip(checkpoint):
    path = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_serves(project, folder, tmp_path, breaks_quickly):
    lines = exercises.damaged(project, flip, tmp_path / "damaged", folder / "whole")
    assert [line.passed for line in lines] == [True] * 3, lines
    assert lines[1].number.startswith("checkpoint-000002 is now") and lines[2].number.startswith("0 of ")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda checkpoint: None, "nothing changed"),
        (lambda checkpoint: shutil.rmtree(checkpoint), " in "),
        (lambda checkpoint: (checkpoint / "beside.txt").write_text("x"), "nothing changed"),
    ],
)
def test_what_is_no_damage_of_one_byte_is_said(project, folder, tmp_path, breaks_quickly, monkeypatch, damage, said):
    monkeypatch.setattr(exercises, "_ends_alike", lambda *args: Criterion("ends alike", True, "", ""))
    first, second, _ = exercises.damaged(project, damage, tmp_path / "damaged", folder / "whole")
    assert not first.passed and said in first.number and second.passed == (said == " in ")


def test_a_fault_of_ones_own_is_survived(project, folder, tmp_path):
    lines = exercises.another_fault(project, KillAtSave(0, 4), tmp_path / "fault", folder / "whole")
    assert [line.passed for line in lines] == [True] * 3, lines
    assert lines[1].number == "0 of 4 steps lost"


def test_the_lessons_own_fault_is_not_ones_own_and_a_step_too_late_kills_nobody(
    project, folder, tmp_path, monkeypatch, breaks_quickly
):
    monkeypatch.setattr(exercises, "_ends_alike", lambda *args: Criterion("ends alike", True, "", ""))
    own, _, _ = exercises.another_fault(project, KillAt(1, 5), tmp_path / "copied", folder / "whole")
    assert not own.passed and "derive a class" in own.why
    exercises.break_run.broken.killed = False
    _, killed, _ = exercises.another_fault(project, KillAtSave(1, 99), tmp_path / "alive", folder / "whole")
    assert not killed.passed
