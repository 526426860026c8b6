"""trackio: an SQLite file on this machine, and a dashboard that needs no account."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.replacing import environment, replaced
from course_lib.tracking.base import Histogram, RunInfo, Tracker

FOLDER_VARIABLE = "TRACKIO_DIR"
"""Environment variable: where all runs share one database. Without it a run keeps its own, in ``trackio/``."""


class TrackioTracker(Tracker):
    """One trackio run, in a database of its own in the run's tracking folder, or in that of ``TRACKIO_DIR``.

    trackio numbers its own rows; ``step`` is the optimizer step, and a resumed run goes on under its name.
    """

    name = "trackio"

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.folder = Path(os.environ.get(FOLDER_VARIABLE) or info.folder / "trackio")

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        trackio = trackio_in(self.folder)
        # It would ask the Hub for the user's name wherever there is a token.
        with replaced(trackio.run, "_get_default_namespace", lambda: None):
            self.run = trackio.init(
                self.info.project,
                name=f"{self.info.name}-{self.info.id[:4]}",
                group=self.info.group,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                config={"name": self.info.name, "rank": self.info.rank, "run_id": self.info.id},
            )

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(dict(values), step=step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        import trackio

        self.run.log(
            {name: trackio.Histogram(np_histogram=(h.counts, h.edges)) for name, h in values.items()}, step=step
        )

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import trackio

        self.run.log({name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        self.table(name, ["actual", *labels], [[label, *row] for label, row in zip(labels, counts, strict=True)], step)

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        """Keep a copy of the files in trackio's own folder."""
        self.run.log_artifact(folder, name=name, type=kind)

    def finish(self, state: str = "finished") -> None:
        self.run.log({"state": state})
        self.run.finish()


def trackio_in(folder: Path) -> ModuleType:
    """trackio, keeping its files in a folder from here on, and quiet: it prints where a run has its own lines.

    It reads ``TRACKIO_DIR`` once, when it is imported; a process may train several runs, one after another.
    """
    with environment({FOLDER_VARIABLE: str(folder)}):
        import trackio
        from trackio import run, sqlite_storage, table, utils
        from trackio.media import media

    places = {"TRACKIO_DIR": folder, "MEDIA_DIR": folder / "media", "ARTIFACTS_DIR": folder / "artifacts"}
    for module in (trackio, utils, sqlite_storage, run, table, media):
        for name, path in places.items():
            if hasattr(module, name):
                setattr(module, name, path)
    for module in (trackio, run, utils):
        vars(module)["print"] = lambda *_, **__: None
    return trackio
