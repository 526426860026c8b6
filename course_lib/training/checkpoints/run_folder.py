"""A run's folder: whose it is and what goes in. Light to import: `course train` looks here before it starts ranks."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from course_lib.config import Config
from course_lib.config.files import to_yaml
from course_lib.errors import ConfigError
from course_lib.training.checkpoints import checkpoint
from course_lib.writing import write_text

CONFIG, SUMMARY, METRICS, MODEL, BEST = "config.yaml", "summary.json", "metrics.jsonl", "model", "best.safetensors"
BASE = "base"  # the model beside whose weights adapters were trained, where it is nowhere else
LOCK = ".lock"
MONITOR = "monitor"  # what the monitors of a run keep


def check(config: Config) -> None:
    """Refuse a folder that cannot be written, or that holds something the run would overwrite.

    Raises:
        ConfigError: with what to give instead.
    """
    folder = config.output_dir
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir():
        raise ConfigError(f"output_dir {folder}: {existing} is not a folder", "choose another --output_dir")
    if not _writable(existing):
        raise ConfigError(
            f"output_dir {folder} cannot be written ({_why_not_writable(existing)})", "choose another --output_dir"
        )
    asked = config.output.resume_from_checkpoint
    refuse_live(folder)
    # A run that was killed before its config stood has left a hidden file at most.
    if not folder.exists() or not any(folder.glob("[!.]*")) or asked not in (None, "auto"):
        return
    if not (folder / CONFIG).exists() and not (asked and checkpoint.in_order(folder)):
        raise ConfigError(
            f"output_dir {folder} holds files that are no run of this course", "choose another --output_dir"
        )
    if not config.output.overwrite_output_dir and not asked:
        raise ConfigError(
            f"output_dir {folder} already holds a run",
            "go on with --resume_from_checkpoint auto, replace it with --overwrite_output_dir, "
            "or choose another --output_dir",
            cure={"resume_from_checkpoint": "auto"},
        )


def _why_not_writable(folder: Path) -> str:
    """Whether the file system is read-only, as a mounted one often is, or this user has no right to write there."""
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return f"{folder} is on a read-only file system" if read_only else f"no permission in {folder}"


def refuse_live(folder: Path) -> None:
    """Refuse a folder in which another process trains at this moment.

    Raises:
        ConfigError: naming the process.
    """
    try:
        with (folder / LOCK).open("r+", encoding="utf-8") as lock:
            if not _locked(lock):
                raise ConfigError(
                    f"output_dir {folder} belongs to a run that is alive ({lock.read().strip()})",
                    "wait for its end, stop it, or choose another --output_dir",
                )
    except FileNotFoundError:
        pass  # nobody has trained there
    except PermissionError:
        raise ConfigError(
            f"output_dir {folder} belongs to another user (no permission for {folder / LOCK})",
            "choose another --output_dir",
        ) from None


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder from other runs while the block runs, or to the end of this process, however it ends.

    The lock is the kernel's (fcntl, POSIX record locks): a process that was killed holds none, and forked workers
    inherit none.

    Raises:
        ConfigError: another run holds it.
    """
    with checkpoint.saving(f"the lock of the run in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", encoding="utf-8")
    with lock:
        if not _locked(lock):
            refuse_live(folder)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        lock.flush()
        yield  # the file stays: who deleted it might delete the lock of the next one


def _locked(lock: IO[str]) -> bool:
    """Lock a file that is open for writing; whether nobody else has."""
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _writable(folder: Path) -> bool:
    """Whether a file can be made there; the permission bits alone do not tell of a read-only disk."""
    try:
        tempfile.TemporaryFile(dir=folder).close()  # of nobody's name: other runs may look at the same moment
    except OSError:
        return False
    return True


def claim(config: Config) -> None:
    """Make the folder this run's: an earlier run's files go, the resolved config comes."""
    folder = config.output_dir
    with checkpoint.saving(f"the config of the run in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if config.output.overwrite_output_dir:
            for path in [*checkpoint.in_order(folder), folder / MODEL, folder / BASE, folder / MONITOR]:
                if path.exists():
                    shutil.rmtree(path)  # or a later run might go on from what is left of it
            for name in (CONFIG, SUMMARY, METRICS, BEST, checkpoint.LATEST):
                (folder / name).unlink(missing_ok=True)
        checkpoint.tidy(folder)
        write_text(folder / CONFIG, to_yaml(config))


def write_summary(config: Config, summary: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    with checkpoint.saving(f"the summary in {config.output_dir}"):
        write_text(config.output_dir / SUMMARY, json.dumps(summary, indent=1) + "\n")


def git_revision() -> str | None:
    """Commit of the checkout that this code runs from; None where there is none."""
    head = (
        subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        if shutil.which("git")
        else None
    )
    return head.stdout.strip() or None if head else None
