"""Checkpoints: a new directory per step, written beside its place, summed, flushed, renamed, then named as the latest.

A directory called ``checkpoint-000120`` is therefore whole, or was damaged later, which its
checksums show. Nothing in it is ever unpickled. What a killed run leaves unfinished has another
name, and the next run clears it (:func:`tidy`).
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from course_lib.errors import CheckpointError
from course_lib.training.checkpoints.manifest import flush, number_of, seal, verify
from course_lib.writing import write_text

LATEST = "latest"
"""File in the run's folder with the name of the checkpoint written last, for people and scripts."""
_NAME = re.compile(r"checkpoint-(\d{6,})")


def name(step: int) -> str:
    """Directory name of the checkpoint after that optimizer step."""
    return f"checkpoint-{step:06d}"


def step_of(folder: Path) -> int:
    """The optimizer step after which a checkpoint of that name was written."""
    return int(folder.name.rpartition("-")[2])


@contextlib.contextmanager
def saving(what: str) -> Iterator[None]:
    """Turn a failed write into one line that says what was being saved and that nothing is half-written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors names the operating system's error number in its text only.
        told = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(told[1]) if told else 0
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = os.strerror(number) if number else str(error)
        raise CheckpointError(
            f"could not save {what} ({reason}); what was saved before is untouched",
            f"{'free some space' if full else 'make it writable'}, or choose another --output_dir",
        ) from error


def write(
    run_dir: Path,
    step: int,
    write_files: Callable[[Path], None],
    *,
    is_main: bool = True,
    barrier: Callable[[], None] = lambda: None,
) -> Path:
    """Write one checkpoint; called by every rank of the run.

    Args:
        run_dir: the run's folder, shared by all ranks.
        step: optimizer steps done.
        write_files: writes this rank's files into the folder that it is given.
        is_main: True on the one rank that makes the folder, sums it and puts it in place.
        barrier: waits for all ranks.
    Returns:
        The checkpoint's folder.
    Raises:
        CheckpointError: a file could not be written; the checkpoints before it are as they were.
    """
    with saving(f"{run_dir / name(step)}"):
        try:
            if is_main:
                begin(run_dir, step)
            barrier()
            write_files(open_part(run_dir, step))
            barrier()
            if is_main:
                finish(run_dir, step)
        except BaseException:
            if is_main:
                abandon(run_dir, step)
            raise
    barrier()
    keep_part(run_dir, step)
    return run_dir / name(step)


def beside(run_dir: Path, step: int, what: str = "writing") -> Path:
    """Folder of a checkpoint before it is put in its place, or after it was taken from there."""
    return run_dir / f".{name(step)}.{what}"


def begin(run_dir: Path, step: int) -> None:
    """Make the empty folder to write into."""
    shutil.rmtree(beside(run_dir, step), ignore_errors=True)
    beside(run_dir, step).mkdir(parents=True)


def open_part(run_dir: Path, step: int) -> Path:
    """The folder that this rank writes into, once the main rank has begun; a machine's own where no disk is shared."""
    beside(run_dir, step).mkdir(parents=True, exist_ok=True)
    return beside(run_dir, step)


def keep_part(run_dir: Path, step: int) -> None:
    """Put a machine's own part in its place; called by every rank once the main rank has finished.

    Raises:
        CheckpointError: it could not be put there.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0" and beside(run_dir, step).exists():
        with saving(f"this machine's part of {run_dir / name(step)}"):
            put_in_place(run_dir, step)


def finish(run_dir: Path, step: int) -> None:
    """Sum and flush what was written, put it in its place, and name it as the latest."""
    before = [number_of(folder) or 0 for folder in in_order(run_dir)]
    seal(beside(run_dir, step), 1 + max(before, default=0))
    put_in_place(run_dir, step)
    write_text(run_dir / LATEST, f"{name(step)}\n")
    flush(run_dir)


def abandon(run_dir: Path, step: int) -> None:
    """Leave nothing of a checkpoint that could not be written, and everything of one that stood in its place."""
    shutil.rmtree(beside(run_dir, step), ignore_errors=True)
    tidy(run_dir)


def put_in_place(run_dir: Path, step: int) -> None:
    """Give what was written its name.

    On a machine that does not share the main rank's disk it is a part without a manifest, of use once it lies with
    the others again, as SageMaker and copying to a bucket bring them together.
    """
    final, replaced = run_dir / name(step), beside(run_dir, step, "replaced")
    if final.exists():  # a damaged one, or the same step of an earlier attempt: aside, since it may be the only one
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(beside(run_dir, step), final)
    flush(run_dir)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Clear what a killed run left unfinished; called on the main rank while nothing is being saved."""
    for replaced in run_dir.glob(".checkpoint-*.replaced"):
        final = run_dir / replaced.name[1:].removesuffix(".replaced")
        if not final.exists():  # killed between the two renames
            new = replaced.with_suffix(".writing")
            os.replace(new if _stands(new) else replaced, final)
    for left in run_dir.glob(".checkpoint-*"):
        shutil.rmtree(left, ignore_errors=True)
    for left in run_dir.glob(f".{LATEST}.*"):
        left.unlink(missing_ok=True)


def _stands(folder: Path) -> bool:
    """Whether a checkpoint is whole."""
    try:
        verify(folder, trust_untouched=True)
    except CheckpointError:
        return False
    return True


def in_order(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    if not run_dir.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def newest_first(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the one written last first: after going back that is not the one of the last step."""
    number = 0
    numbered: list[tuple[int, int, Path]] = []  # number, place in the order of steps, folder
    for folder in in_order(run_dir):
        number = number_of(folder) or number  # with a damaged manifest it stays behind the step before it
        numbered.append((number, len(numbered), folder))
    return [folder for *_, folder in sorted(numbered, reverse=True)]


def latest(run_dir: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The newest whole checkpoint of a run; damaged ones are named through ``say`` and passed over.

    Raises:
        CheckpointError: the run has no whole checkpoint.
    """
    for folder in newest_first(run_dir):
        try:
            verify(folder)
        except CheckpointError as error:
            say(f"{error.what}; trying the one before")
        else:
            return folder
    raise CheckpointError(
        f"no whole checkpoint in {run_dir}",
        "begin anew with --resume_from_checkpoint auto",
        cure={"resume_from_checkpoint": "auto"},
    )


def prune(run_dir: Path, limit: int | None) -> None:
    """Delete the checkpoints that are older than the ``limit`` newest good ones; damaged ones do not count.

    Raises:
        CheckpointError: one could not be deleted.
    """
    good = 0
    for folder in newest_first(run_dir) if limit else []:
        if good < (limit or 0):
            good += _stands(folder)
            continue
        deleted = folder.with_name(f".{folder.name}.deleted")
        try:
            os.replace(folder, deleted)  # so that one deleted by half is never taken for a damaged one
            shutil.rmtree(deleted)
        except OSError as error:
            raise CheckpointError(
                f"could not delete {folder} ({error.strerror}), beyond --save_total_limit {limit}",
                "delete it by hand, and go on with --resume_from_checkpoint latest",
            ) from error
