"""The interface of a tracker, and the guard that keeps its failures out of the training.

A tracker is an Accelerate ``GeneralTracker``: ``Accelerator(log_with=[tracker])`` takes it as it is, and a
trainer without Accelerate makes the same calls.
"""

import json
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import GeneralTracker

from course_lib.tracking.redact import redact, redacted
from course_lib.writing import write_text

FOLDER, IDENTITY = "tracking", "run.json"


@dataclass(frozen=True)
class RunInfo:
    """Identity of a tracked run, and its origin."""

    id: str
    """Stays the same when the run is resumed."""
    name: str
    project: str
    group: str | None
    folder: Path
    """Where trackers keep their files."""
    rank: int = 0
    resumed_at: int | None = None
    """Step of the checkpoint that the run goes on from; None at a first start."""


@dataclass(frozen=True)
class Histogram:
    """Number of a tensor's elements in each of B bins of equal width between ``low`` and ``high``."""

    counts: Sequence[int]
    low: float
    high: float

    @property
    def edges(self) -> list[float]:
        """Edges of the bins, [B + 1]."""
        return np.linspace(self.low, self.high, len(self.counts) + 1).tolist()


class Tracker(GeneralTracker):
    """Keeps one run. Subclass it and say how; steps are optimizer steps, and go on where a run is resumed."""

    requires_logging_directory = False
    main_process_only = False  # whoever makes trackers decides on which ranks

    def __init__(self, info: RunInfo):
        self.info = info
        super().__init__(_blank=True)

    @property
    def tracker(self) -> Any:
        """Run object of the tracker's own library."""
        return self

    def start(self) -> None:
        """Open the run."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the config, as plain values by field."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep metrics of one step; without a step, those of the run."""

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        """Keep the distribution of tensors' elements."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Keep a table of plain values."""

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        """Keep a confusion matrix: ``counts[actual][predicted]``, [C, C]."""

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        """Keep the files of a folder, for example the trained model."""

    def finish(self, state: str = "finished") -> None:
        """Close the run as ``finished``, ``interrupted`` or ``failed``."""


class Guarded(Tracker):
    """A tracker that works in a thread of its own, and whose failure ends the tracking and never the training.

    A step pays only for handing its numbers over. Strings are redacted in the thread, once for all trackers.
    """

    def __init__(self, inner: Tracker, say: Callable[[str], None] = print):
        self.inner, self.say, self.name = inner, say, inner.name
        self.open = True
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None
        super().__init__(inner.info)

    @property
    def tracker(self) -> Any:
        return self.inner.tracker

    def _attempt(self, method: str, *arguments: Any) -> None:
        if not self.open:
            return
        try:
            getattr(self.inner, method)(*redacted(arguments))
        except Exception as error:
            self.open = False
            reason = redact(" ".join(str(error).split()))[:300]
            self.say(
                f"tracker {self.name} failed in {method} ({type(error).__name__}: {reason}): "
                "the training goes on, and this tracker keeps nothing more of it"
            )

    def _write(self) -> None:
        while call := self._calls.get():
            self._attempt(*call)

    def start(self) -> None:
        """Open the run, and wait until it is: what it says about itself comes before the training's lines."""
        self._attempt("start")
        self._writer = threading.Thread(target=self._write, name=f"tracker {self.name}", daemon=True)
        self._writer.start()

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._calls.put(("store_init_configuration", dict(values)))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._calls.put(("log", dict(values), step))

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        self._calls.put(("histograms", dict(values), step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self._calls.put(("table", name, columns, rows, step))

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        self._calls.put(("confusion", name, labels, counts, step))

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        self._calls.put(("artifact", artifact_name(name), folder, kind))

    def finish(self, state: str = "finished") -> None:
        """Close the run once all that was handed over is kept; a second call does nothing."""
        if self._writer is None:
            return
        self._calls.put(("finish", state))
        self._calls.put(None)
        self._writer.join()
        self._writer, self.open = None, False


def identity(folder: Path, name: str, project: str, group: str | None) -> dict[str, Any]:
    """The run's id, name, project and group: those in the folder where a run is resumed, else new ones, kept there."""
    path = folder / IDENTITY
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    run = {"id": uuid.uuid4().hex[:12], "name": name, "project": project, "group": group}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(redacted(run), indent=1) + "\n")
    return run


def artifact_name(name: str) -> str:
    """A name as every tracker takes it for an artifact, such as a model's with a `/`: letters, digits and ``._-``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:128]


def ends_by_name(intervals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The ends of intervals as numbers of their own, for logs and trackers: ``accuracy_low``, ``accuracy_high``."""
    return {
        f"{name}_{side}": end
        for name, ends in intervals.items()
        for side, end in zip(("low", "high"), ends, strict=True)
    }
