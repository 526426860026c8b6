"""The tracker that needs nothing: JSON lines in the run's folder, whole after every line."""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.tracking.base import Histogram, RunInfo, Tracker
from course_lib.writing import JsonLines


class JsonLinesTracker(Tracker):
    """One object per line in ``rank-R.jsonl``; its ``kind`` is one of run, config, metrics, histograms, table,
    confusion, artifact, end.

    A resumed run goes on in the same file: what stands there beyond its checkpoint is dropped, so that no step
    stands twice. A number that is not finite is kept as null, which JSON can say.
    """

    name = "jsonl"

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.path = info.folder / f"rank-{info.rank}.jsonl"
        self.lines = JsonLines(self.path)

    def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.info.resumed_at is None:
            self.path.unlink(missing_ok=True)
        else:
            self.lines.cut(self.info.resumed_at)
        self._write(
            "run",
            id=self.info.id,
            name=self.info.name,
            project=self.info.project,
            group=self.info.group,
            rank=self.info.rank,
            resumed_at=self.info.resumed_at,
        )

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._write("config", values=dict(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write("metrics", step=step, values=dict(values))

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        self._write(
            "histograms",
            step=step,
            values={name: {"counts": histogram.counts, "edges": histogram.edges} for name, histogram in values.items()},
        )

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self._write("table", step=step, name=name, columns=columns, rows=rows)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        self._write("confusion", step=step, name=name, labels=labels, counts=counts)

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        """Keep what tells whether the files are still the same: their sizes and SHA-256 sums."""
        files = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sum_of(path)}
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        self._write("artifact", name=name, type=kind, files=files)

    def finish(self, state: str = "finished") -> None:
        self._write("end", state=state)

    def _write(self, kind: str, **fields: Any) -> None:
        self.lines.append(_plain({"kind": kind, "time": round(time.time(), 3), **fields}))


def _plain(value: Any) -> Any:
    """What JSON can say: a number that is not finite becomes null, whatever else is unknown becomes text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value)


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
