"""Checkpoints: a new directory a step, written beside its place, summed, flushed, then renamed.

A directory called ``checkpoint-000120`` is therefore whole, or was damaged later, which its
checksums show. Nothing in it is ever unpickled.
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

from course_lib.errors import CheckpointError

MANIFEST = "manifest.json"
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
        CheckpointError: a file could not be written; no checkpoint of this step is left.
    """
    with saving(f"{run_dir / name(step)}"):
        try:
            if is_main:
                begin(run_dir, step)
            barrier()
            beside(run_dir, step).mkdir(parents=True, exist_ok=True)  # machines that share no disk have each their own
            write_files(beside(run_dir, step))
            barrier()
            if is_main:
                finish(run_dir, step)
        except BaseException:
            if is_main:
                shutil.rmtree(beside(run_dir, step), ignore_errors=True)
            raise
    barrier()
    if os.environ.get("LOCAL_RANK", "0") == "0" and beside(run_dir, step).exists():
        with saving(f"this machine's part of {run_dir / name(step)}"):
            put_in_place(run_dir, step)
    return run_dir / name(step)


def beside(run_dir: Path, step: int) -> Path:
    """Where a checkpoint is written before it is put in its place."""
    return run_dir / f".{name(step)}.writing"


def begin(run_dir: Path, step: int) -> None:
    """Make the empty folder to write into."""
    shutil.rmtree(beside(run_dir, step), ignore_errors=True)
    beside(run_dir, step).mkdir(parents=True)


def finish(run_dir: Path, step: int) -> None:
    """Sum and flush what was written, and put it in its place."""
    seal(beside(run_dir, step))
    put_in_place(run_dir, step)


def put_in_place(run_dir: Path, step: int) -> None:
    """Give what was written its name.

    On a machine that does not share the main rank's disk it is a part without a manifest, of use once it lies with
    the others again, as SageMaker and copying to a bucket bring them together.
    """
    final = run_dir / name(step)
    if final.exists():
        shutil.rmtree(final)  # a damaged one, or the same step of an earlier attempt
    os.replace(beside(run_dir, step), final)
    _flush(run_dir)


def seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest of sizes and SHA-256 sums."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": digest}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump({"files": files, "sha256": _digest(files)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    _flush(folder)


def _digest(files: dict[str, Any]) -> str:
    """Sum of the manifest's own entries, which guards the guard."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _flush(folder: Path) -> None:
    """Flush a directory's own entries."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: no checkpoint there, or a file is missing, cut short or changed; it is named.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["sha256"] != _digest(manifest["files"]):
            raise ValueError("its sum is wrong")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no checkpoint (it has no {MANIFEST})",
                              f"name a folder such as {name(120)}, or `latest`") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})", "resume from another checkpoint") from None
    for relative, known in manifest["files"].items():
        path = folder / relative
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} lacks {relative}", "resume from another checkpoint")
        size = path.stat().st_size
        if size != known["bytes"]:
            raise CheckpointError(f"checkpoint {folder} is damaged: {relative} has {size} bytes, not {known['bytes']}",
                                  "resume from another checkpoint, or from `latest`, which skips it")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != known["sha256"]:
                raise CheckpointError(f"checkpoint {folder} is damaged: the contents of {relative} have changed",
                                      "resume from another checkpoint, or from `latest`, which skips it")


def in_order(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest step first."""
    if not run_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(run_dir: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The newest whole checkpoint of a run; damaged ones are named through ``say`` and passed over.

    Raises:
        CheckpointError: the run has no whole checkpoint.
    """
    for folder in reversed(in_order(run_dir)):
        try:
            verify(folder)
        except CheckpointError as error:
            say(f"{error.what}; trying the one before")
        else:
            return folder
    raise CheckpointError(f"no whole checkpoint in {run_dir}", "leave out --resume_from_checkpoint to begin anew")


def prune(run_dir: Path, limit: int | None) -> None:
    """Delete the oldest checkpoints beyond ``limit``, and never the newest."""
    if limit is not None:
        for folder in in_order(run_dir)[:-max(limit, 1)]:
            shutil.rmtree(folder)
