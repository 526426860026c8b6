"""What a tracker does, whichever it is, and the guard that keeps its failures out of the training.

A tracker is an Accelerate ``GeneralTracker``: ``Accelerator(log_with=[tracker])`` takes it as it is, and a
trainer without Accelerate makes the same calls.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from course_lib.config_files import write_text
from course_lib.tracking.redact import redact, redacted

FOLDER, IDENTITY = "tracking", "run.json"


@dataclass(frozen=True)
class RunInfo:
    """Which run is tracked, and from where."""

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
    """How often the values of a tensor fall into bins of equal width: ``counts`` [B] and ``edges`` [B + 1]."""

    counts: Sequence[int]
    edges: Sequence[float]


class Tracker(GeneralTracker):
    """Keeps one run. Subclass it and say how; steps are optimizer steps, and go on where a run is resumed."""

    requires_logging_directory = False
    main_process_only = False  # whoever makes trackers decides on which ranks

    def __init__(self, info: RunInfo):
        self.info = info
        super().__init__(_blank=True)

    @property
    def tracker(self) -> Any:
        """What the tracker's own library calls the run."""
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
    """A tracker whose failure ends the tracking, with one line that says so, and never the training.

    Strings are redacted here, once for all trackers.
    """

    def __init__(self, inner: Tracker, say: Callable[[str], None] = print):
        self.inner, self.say, self.name = inner, say, inner.name
        self.open = True
        super().__init__(inner.info)

    @property
    def tracker(self) -> Any:
        return self.inner.tracker

    def _call(self, method: str, *arguments: Any) -> None:
        if not self.open:
            return
        try:
            getattr(self.inner, method)(*arguments)
        except Exception as error:
            self.open = False
            reason = redact(" ".join(str(error).split()))[:300]
            self.say(f"tracker {self.name} failed in {method} ({type(error).__name__}: {reason}): "
                     "the training goes on, and this tracker keeps nothing more of it")

    def start(self) -> None:
        self._call("start")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self._call("store_init_configuration", redacted(values))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", redacted(values), step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        self._call("histograms", values, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self._call("table", name, columns, redacted(rows), step)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        self._call("confusion", name, labels, counts, step)

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        self._call("artifact", name, folder, kind)

    def finish(self, state: str = "finished") -> None:
        """Close the run; a second call does nothing."""
        self._call("finish", state)
        self.open = False


def identity(folder: Path, name: str, project: str, group: str | None) -> dict[str, Any]:
    """The run's id, name, project and group: those in the folder where a run is resumed, else new ones, kept there."""
    path = folder / IDENTITY
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    found = {"id": uuid.uuid4().hex[:12], "name": name, "project": project, "group": group}
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(redacted(found), indent=1) + "\n")
    return found
