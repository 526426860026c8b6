"""The manifest of a checkpoint: size and SHA-256 sum of each of its files, so that none is missing, cut or changed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from course_lib.errors import CheckpointError

MANIFEST = "manifest.json"


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
    for directory in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        flush(directory)


def _digest(about: dict[str, Any]) -> str:
    """Sum of the manifest's own entries, which guards the guard."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def flush(folder: Path) -> None:
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
        raise CheckpointError(
            f"{folder} is no checkpoint (it has no {MANIFEST})", "name a folder such as checkpoint-000120, or `latest`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})", "resume from another checkpoint") from None
    for relative, known in about["files"].items():
        if problem := _problem(folder, relative, known, trust_untouched):
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {problem}",
                "resume from another checkpoint, or from `latest`, which skips it",
            )


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


def number_of(folder: Path) -> int | None:
    """The how-manieth checkpoint of its run it is; None where its manifest does not say."""
    try:
        return int(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
