"""A run's folder: whose it is and what goes in. Light to import: `course train` looks here before it starts ranks."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from course_lib.config import Config
from course_lib.config_files import to_yaml
from course_lib.errors import ConfigError
from course_lib.training.checkpoints import checkpoint
from course_lib.writing import write_text

CONFIG, SUMMARY, METRICS, MODEL, BEST = "config.yaml", "summary.json", "metrics.jsonl", "model", "best.safetensors"
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
        raise ConfigError(f"output_dir {folder} cannot be written (no permission in {existing})",
                          "choose another --output_dir")
    asked = config.output.resume_from_checkpoint
    # A run that was killed before its config stood has left a hidden file at most.
    if not folder.exists() or not any(folder.glob("[!.]*")) or asked not in (None, "auto"):
        return
    if not (folder / CONFIG).exists() and not (asked and checkpoint.in_order(folder)):
        raise ConfigError(f"output_dir {folder} holds files that are no run of this course",
                          "choose another --output_dir")
    if not config.output.overwrite_output_dir and not asked:
        raise ConfigError(f"output_dir {folder} already holds a run",
                          "give --overwrite_output_dir, --resume_from_checkpoint latest, or another --output_dir")


def _writable(folder: Path) -> bool:
    """Whether a file can be made there; the permission bits alone do not tell of a read-only disk."""
    probe = folder / ".writable"
    try:
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def claim(config: Config) -> None:
    """Make the folder this run's: an earlier run's files go, the resolved config comes."""
    folder = config.output_dir
    with checkpoint.saving(f"the config of the run in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if config.output.overwrite_output_dir:
            for path in [*checkpoint.in_order(folder), folder / MODEL, folder / MONITOR]:
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
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True,
                           check=False) if shutil.which("git") else None
    return found.stdout.strip() or None if found else None
