"""Reads runs of any tracker into pandas frames with the same columns.

Reads what lies on this machine: JSON lines, trackio's databases, and the ``.wandb`` files of Weights & Biases, online
or offline, through wandb's own reader. Nothing is asked of a network, and no torch is imported.
"""

import datetime
import functools
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from course_lib.errors import DataError

METRIC_COLUMNS = ("run", "name", "group", "rank", "tracker", "step", "time", "metric", "value")
RUN_COLUMNS = ("run", "name", "project", "group", "rank", "tracker", "state", "started", "steps", "folder")


@dataclass(frozen=True, eq=False)
class TrackedRun:
    """One run as one tracker kept it."""

    id: str
    name: str
    project: str
    group: str | None
    rank: int
    tracker: str
    state: str
    """`finished`, `interrupted`, `failed`, or `unfinished` where its end was never written."""
    started: float
    """Seconds since 1970."""
    folder: Path
    resumed_at: int | None = None
    """Step of the checkpoint that its last part went on from."""
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[tuple[int, float, str, float], ...] = ()
    """Step, seconds since 1970, metric, value."""
    tables: Mapping[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    """Columns and rows by name, such as wrong predictions."""


def read_runs(*places: str | Path) -> list[TrackedRun]:
    """Every run under the given folders, the earliest first.

    Raises:
        DataError: no such folder, or a file that is no record of a run.
    """
    lines, wandb, databases = [], [], []
    for place in map(Path, places):
        if not place.is_dir():
            raise DataError(f"no folder {place} of runs", "give the output_dir of a run, or a folder of such")
        lines += sorted(place.rglob("tracking/rank-*.jsonl"))
        databases += trackio_databases(place)
        wandb += sorted(path.parent for path in place.rglob("wandb/*run-*/run-*.wandb"))
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(read_wandb, dict.fromkeys(wandb)))
    runs = [read_json_lines(path) for path in dict.fromkeys(lines)] + _joined(parts)
    runs += [run for path in dict.fromkeys(databases) for run in read_trackio(path)]
    return sorted(runs, key=lambda run: (run.started, run.rank))


def read_json_lines(path: Path) -> TrackedRun:
    """A run that ``JsonLinesTracker`` kept; what it was cut off in writing is left out."""
    about: dict[str, Any] = {}
    config: dict[str, Any] = {}
    rows: list[tuple[int, float, str, float]] = []
    tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
    started, state = None, "unfinished"
    for entry in _objects(path):
        kind = entry["kind"]
        if kind == "run":
            about, state = entry, "unfinished"
            started = entry["time"] if started is None else started
        elif kind == "config":
            config = entry["values"]
        elif kind == "metrics":
            rows += _numbers(entry["step"] or 0, entry["time"], entry["values"])
        elif kind == "table":
            tables[entry["name"]] = (entry["columns"], entry["rows"])
        elif kind == "confusion":
            tables[entry["name"]] = (
                ["actual", *entry["labels"]],
                [[label, *counts] for label, counts in zip(entry["labels"], entry["counts"], strict=True)],
            )
        elif kind == "end":
            state = entry["state"]
    if started is None:
        raise DataError(f"{path} does not begin with a run", "leave it out, or delete it")
    return TrackedRun(
        about["id"],
        about["name"],
        about["project"],
        about["group"],
        about["rank"],
        "jsonl",
        state,
        started,
        path.parent,
        about["resumed_at"],
        config,
        tuple(rows),
        tables,
    )


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return  # the writer was cut off, or is at it now
        try:
            yield json.loads(line)
        except ValueError:
            raise DataError(f"line {number} of {path} is not JSON", "delete the line") from None


def trackio_databases(place: Path) -> list[Path]:
    """trackio's databases in a folder; each holds a project."""
    return sorted(path for path in place.rglob("*.db") if _is_trackio(path))


def _is_trackio(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(16) != b"SQLite format 3\0":
            return False
    with closing(_opened(path)) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return {"metrics", "configs", "project_metadata"} <= names


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def read_trackio(path: Path) -> list[TrackedRun]:
    """The runs in one of trackio's databases, which holds a project.

    Where a run's step goes back, it was resumed, and what stood beyond that step is left out.
    """
    with closing(_opened(path)) as database:
        configs = list(database.execute("SELECT run_id, run_name, config, created_at FROM configs"))
        logged = list(database.execute("SELECT run_id, step, timestamp, metrics FROM metrics ORDER BY id"))
    runs = []
    for key, name, config_text, created in configs:
        config, state, last = json.loads(config_text), "unfinished", 0
        rows: list[tuple[int, float, str, float]] = []
        tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        for step, time, text in (entry[1:] for entry in logged if entry[0] == key):
            values = json.loads(text)
            if step < last:
                rows, state = [row for row in rows if row[0] < step], "unfinished"
            last, state = step, values.get("state", state)
            rows += _numbers(step, datetime.datetime.fromisoformat(time).timestamp(), values)
            tables |= {
                name: (list(value["_value"][0]), [list(row.values()) for row in value["_value"]])
                for name, value in values.items()
                if isinstance(value, dict) and value.get("_type") == "trackio.table" and value["_value"]
            }
        started = min([time for _, time, *_ in rows], default=datetime.datetime.fromisoformat(created).timestamp())
        runs.append(
            TrackedRun(
                config.get("run_id", key),
                config.get("name", name),
                path.stem,
                config.get("_Group"),
                int(config.get("rank") or 0),
                "trackio",
                state,
                started,
                path.parent,
                None,
                {k: v for k, v in config.items() if not k.startswith("_")},
                tuple(rows),
                tables,
            )
        )
    return runs


def read_wandb(folder: Path) -> TrackedRun:
    """A W&B run in its folder ``run-…`` or ``offline-run-…``, read by ``wandb leet inspect``.

    Raises:
        DataError: wandb cannot read it.
    """
    about: dict[str, Any] = {}
    config: dict[str, Any] = {}
    rows: list[tuple[int, float, str, float]] = []
    tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
    state = "unfinished"
    record_file = next(folder.glob("run-*.wandb"))
    for record in map(json.loads, _inspect(folder, hashlib.sha256(record_file.read_bytes()).hexdigest()).splitlines()):
        kind = record["type"]
        content = record.get(kind, {})
        if kind == "run":
            about = about or content
            config |= content.get("config", {}).get("update", {})
        elif kind == "config":
            config |= content.get("update", {})
        elif kind == "history":
            item = content["item"]
            values = {
                name: value
                for name, value in item.items()
                if not name.startswith("_") and name != "step" and f"{name.rpartition('.')[0]}._type" not in item
            }
            rows += _numbers(int(item.get("step", 0)), item["_timestamp"], values)
            for key in (key for key, value in item.items() if value == "table-file" and key.endswith("._type")):
                name = key.removesuffix("._type")
                kept = json.loads((folder / "files" / item[f"{name}.path"]).read_text(encoding="utf-8"))
                tables[name] = (kept["columns"], kept["data"])
        elif kind == "summary":
            state = content.get("update", {}).get("state", state)
    if not about:
        raise DataError(f"the W&B run in {folder} was cut off at its start", "delete the folder")
    return TrackedRun(
        about["run_id"],
        about.get("display_name", about["run_id"]),
        about.get("project", ""),
        about.get("run_group"),
        int(config.get("rank") or 0),
        "wandb",
        state,
        datetime.datetime.fromisoformat(about["start_time"]).timestamp(),
        folder,
        config.get("resumed_at"),
        {k: v for k, v in config.items() if not k.startswith("_")},
        tuple(rows),
        tables,
    )


@functools.lru_cache
def _inspect(folder: Path, contents: str) -> str:
    """What wandb's reader prints, kept for a file's contents: it takes a second."""
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"},
    )
    if done.returncode:
        raise DataError(
            f"wandb cannot read the run in {folder} ({done.stderr.strip()[-200:]})",
            "delete it, if its run was cut off at its start",
        )
    return done.stdout


def _joined(parts: Iterable[TrackedRun]) -> list[TrackedRun]:
    """The parts of runs that were resumed, as one run each: steps beyond a checkpoint are those of the later part."""
    runs: dict[str, TrackedRun] = {}
    for part in sorted(parts, key=lambda p: p.started):
        if earlier := runs.get(part.id):
            kept = tuple(row for row in earlier.rows if part.resumed_at is None or row[0] <= part.resumed_at)
            part = replace(part, started=earlier.started, rows=kept + part.rows)
        runs[part.id] = part
    return list(runs.values())


def _numbers(step: int, time: float, values: Mapping[str, Any]) -> list[tuple[int, float, str, float]]:
    return [(step, time, name, float(value)) for name, value in values.items() if isinstance(value, int | float)]


def metrics_frame(runs: Iterable[TrackedRun]) -> pd.DataFrame:
    """One row per number: columns :data:`METRIC_COLUMNS`, whichever tracker kept the run; ``time`` is UTC."""
    rows = [
        (run.id, run.name, run.group, run.rank, run.tracker, step, time, metric, value)
        for run in runs
        for step, time, metric, value in run.rows
    ]
    frame = pd.DataFrame(rows, columns=list(METRIC_COLUMNS))
    return frame.assign(time=pd.to_datetime(frame["time"], unit="s", utc=True), group=frame["group"].astype("str"))


def runs_frame(runs: Iterable[TrackedRun]) -> pd.DataFrame:
    """One row per run: :data:`RUN_COLUMNS`, then the config's fields, then the last value of each metric."""
    runs = list(runs)
    rows = []
    for run in runs:
        last = {metric: value for _, _, metric, value in run.rows}
        steps = max((step for step, *_ in run.rows), default=0)
        rows.append(
            dict(
                zip(
                    RUN_COLUMNS,
                    (
                        run.id,
                        run.name,
                        run.project,
                        run.group,
                        run.rank,
                        run.tracker,
                        run.state,
                        run.started,
                        steps,
                        str(run.folder),
                    ),
                    strict=True,
                )
            )
            | {f"config.{name}": value for name, value in run.config.items()}
            | last
        )
    frame = pd.DataFrame(rows, columns=None if rows else list(RUN_COLUMNS))
    started = pd.to_datetime(frame["started"], unit="s", utc=True)
    return frame.assign(started=started, group=frame["group"].astype("str"))


def differing_options(runs: Iterable[TrackedRun]) -> list[str]:
    """Names of config fields in which runs that have them differ, except for those that only say where a run stands."""
    runs = list(runs)
    names = dict.fromkeys(name for run in runs for name in run.config)
    where = {
        "output_dir",
        "name",
        "run_name",
        "run_id",
        "run_group",
        "rank",
        "resumed_at",
        "resume_from_checkpoint",
        "tracker",
        "overwrite_output_dir",
        "env_file",
    }
    return [
        name
        for name in names
        if name not in where and len({_comparable(run.config[name]) for run in runs if name in run.config}) > 1
    ]


def _comparable(value: Any) -> Any:
    """Numbers as they are, since W&B keeps 1.0 as 1."""
    return value if isinstance(value, int | float) else json.dumps(value, sort_keys=True, default=str)


def distinct(runs: Iterable[TrackedRun]) -> list[TrackedRun]:
    """Each run once, where several trackers kept it: the JSON lines where there are some, as they are whole first."""
    by_id: dict[str, TrackedRun] = {}
    for run in runs:
        if run.id not in by_id or run.tracker == "jsonl":
            by_id[run.id] = run
    return list(by_id.values())
