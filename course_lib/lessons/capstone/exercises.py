"""Checks of two exercises of the capstone: another fault, and a damaged checkpoint. What decides is bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path

from course_lib.errors import CheckpointError
from course_lib.lessons.capstone.decisions import Project
from course_lib.lessons.capstone.rehearsal import KillAt, break_run, resume
from course_lib.lessons.capstone.rubric import SAME_END, Criterion, same_end
from course_lib.training.checkpoints import checkpoint


def another_fault(project: Project, kill: KillAt, folder: Path, undisturbed: Path) -> list[Criterion]:
    """Exercise 1: a run with the learner's fault, resumed, has to end with the undisturbed run's bytes.

    Args:
        project: the learner's.
        kill: the fault, of a class derived from :class:`KillAt`.
        folder: for the run; must not exist.
        undisturbed: folder of the run that nothing happened to.
    """
    broken = break_run(project, folder, kill)
    own = any(getattr(type(kill), name) is not getattr(KillAt, name) for name in ("on_save", "on_step_end"))
    return [
        Criterion(
            "The fault is your own",
            own,
            type(kill).__name__,
            "" if own else "derive a class from KillAt, and override on_save or on_step_end",
        ),
        Criterion(
            "It killed a rank, and left a whole checkpoint",
            broken.killed and bool(broken.checkpoint),
            f"{broken.lost} of {broken.step} steps lost",
            broken.how,
        ),
        _ends_alike(project, folder, undisturbed),
    ]


def damaged(project: Project, damage: Callable[[Path], None], folder: Path, undisturbed: Path) -> list[Criterion]:
    """Exercise 2: one byte of the newest checkpoint is changed; the resume has to notice, and to end with equal bytes.

    Args:
        project: the learner's; it has to leave two checkpoints before its kill.
        damage: called with the newest checkpoint's folder; changes one byte of one file in it.
        folder: for the run; must not exist.
        undisturbed: folder of the run that nothing happened to.
    """
    broken = break_run(project, folder)
    newest, before = checkpoint.latest(folder), folder / "as it was"
    shutil.copytree(newest, before)
    damage(newest)
    changed = _changed_bytes(before, newest)
    shutil.rmtree(before)
    try:
        whole = checkpoint.latest(folder).name
    except CheckpointError:
        whole = "no checkpoint"
    return [
        Criterion(
            "One byte of one file is different",
            list(changed.values()) == [1],
            ", ".join(f"{number} in {name}" for name, number in changed.items()) or "nothing changed",
            "open the file in mode r+b, seek, and write one other byte",
        ),
        Criterion(
            "The checks notice it",
            whole != newest.name,
            f"{whole} is now the newest that is whole",
            f"{broken.checkpoint} was, before",
        ),
        _ends_alike(project, folder, undisturbed),
    ]


def _changed_bytes(before: Path, after: Path) -> dict[str, int]:
    """By file, how many bytes differ; of a file that is longer, shorter or gone, the difference in length."""
    changed = {}
    for path in sorted(path for path in before.rglob("*") if path.is_file()):
        name = path.relative_to(before)
        old, new = path.read_bytes(), (after / name).read_bytes() if (after / name).is_file() else b""
        number = sum(a != b for a, b in zip(old, new, strict=False)) if old != new else 0
        if number + abs(len(old) - len(new)):
            changed[name.as_posix()] = number + abs(len(old) - len(new))
    return changed


def _ends_alike(project: Project, folder: Path, undisturbed: Path) -> Criterion:
    return Criterion(SAME_END, *same_end(project, resume(project, folder, undisturbed)))
