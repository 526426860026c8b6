"""Checkpoints: a new directory a step, written beside its place, summed, flushed, renamed, then named as the latest.

A directory called ``checkpoint-000120`` is therefore whole, or was damaged later, which its
checksums show. Nothing in it is ever unpickled. What a killed run leaves unfinished has another
name, and the next run clears it (:func:`tidy`).
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from course_lib.config_files import write_text
from course_lib.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
"""File in the run's folder with the name of the checkpoint written last, for people and scripts."""
_NAME = re.compile(r"checkpoint-(\d{6,})")


def name(step: int) -> str:
    """Directory name of the checkpoint after that optimizer step."""
    return f"checkpoint-{step:06d}"


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
        raise CheckpointError(f"could not save {what} ({reason}); what was saved before is untouched",
                              f"{'free some space' if full else 'make it writable'}, or choose another --output_dir"
                              ) from error


def write(run_dir: Path, step: int, write_files: Callable[[Path], None], *, is_main: bool = True,
          barrier: Callable[[], None] = lambda: None) -> Path:
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
    """Where a checkpoint lies before it is put in its place, or after it was taken from there."""
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
    before = [_number(folder) or 0 for folder in in_order(run_dir)]
    seal(beside(run_dir, step), 1 + max(before, default=0))
    put_in_place(run_dir, step)
    write_text(run_dir / LATEST, f"{name(step)}\n")
    _flush(run_dir)


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
    _flush(run_dir)
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


def seal(folder: Path, number: int = 1) -> None:
    """Flush every file to disk and write the manifest of sizes and SHA-256 sums.

    Args:
        folder: what was written.
        number: the how-manieth checkpoint of the run it is; the largest is the newest, also where a run went back.
    """
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        stat = path.stat()
        files[str(path.relative_to(folder))] = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}
    about = {"number": number, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump(about | {"sha256": _digest(about)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    for each in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _flush(each)


def _digest(about: dict[str, Any]) -> str:
    """Sum of the manifest's own entries, which guards the guard."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _flush(folder: Path) -> None:
    """Flush a directory's own entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_of(folder: Path) -> str:
    """The SHA-256 sum over all that a checkpoint's manifest says; the same for copies."""
    return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"])


def verify(folder: Path, *, trust_untouched: bool = False) -> None:
    """Compare every file with the manifest.

    Args:
        folder: the checkpoint.
        trust_untouched: do not read a file again that has not been written to since it was summed.
    Raises:
        CheckpointError: no checkpoint there, or a file is missing, cut short or changed; it is named.
    """
    try:
        about = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if about.pop("sha256") != _digest(about):
            raise ValueError("its sum is wrong")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint (it has no {MANIFEST})",
                              f"name a folder such as {name(120)}, or `latest`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})", "resume from another checkpoint") from None
    for relative, known in about["files"].items():
        if problem := _problem(folder, relative, known, trust_untouched):
            raise CheckpointError(f"checkpoint {folder} is damaged: {problem}",
                                  "resume from another checkpoint, or from `latest`, which skips it")


def _problem(folder: Path, relative: str, known: dict[str, Any], trust_untouched: bool) -> str:
    """What is wrong with one file; nothing where it is as it was summed."""
    path = folder / relative
    try:
        stat = path.stat()
        if stat.st_size != known["bytes"]:
            return f"{relative} has {stat.st_size} bytes, not {known['bytes']}"
        if trust_untouched and stat.st_mtime_ns == known["mtime_ns"]:
            return ""
        with path.open("rb") as file:
            unchanged = hashlib.file_digest(file, "sha256").hexdigest() == known["sha256"]
    except FileNotFoundError:
        return f"it lacks {relative}"
    except OSError as error:
        return f"{relative} cannot be read ({error.strerror})"
    return "" if unchanged else f"the contents of {relative} have changed"


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
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest_first(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, the one written last first: after going back that is not the one of the last step."""
    number = 0
    found: list[tuple[int, int, Path]] = []  # number, place in the order of steps, folder
    for folder in in_order(run_dir):
        number = _number(folder) or number  # with a damaged manifest it stays behind the step before it
        found.append((number, len(found), folder))
    return [folder for *_, folder in sorted(found, reverse=True)]


def _number(folder: Path) -> int | None:
    """The how-manieth checkpoint of its run it is; None where its manifest does not say."""
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
    raise CheckpointError(f"no whole checkpoint in {run_dir}", "leave out --resume_from_checkpoint to begin anew")


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
            raise CheckpointError(f"could not delete {folder} ({error.strerror}), beyond --save_total_limit {limit}",
                                  "delete it by hand, and go on with --resume_from_checkpoint latest") from error
