"""trackio: an SQLite file on this machine, and a dashboard that needs no account."""

import contextlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.tracking.base import Histogram, Tracker


class TrackioTracker(Tracker):
    """One trackio run. All runs share one database, that of ``TRACKIO_DIR``, so that the dashboard compares them.

    trackio numbers its own rows; ``step`` is the optimizer step, and a resumed run goes on under its name.
    """

    name = "trackio"

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        with _quiet():
            import trackio

            name = self.info.name if self.info.rank == 0 else f"{self.info.name}-rank-{self.info.rank}"
            self.run = trackio.init(self.info.project, name=f"{name}-{self.info.id[:4]}", group=self.info.group,
                                    resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
                                    config={"rank": self.info.rank, "run_id": self.info.id})

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(dict(values), step=step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        import trackio

        self.run.log({name: trackio.Histogram(np_histogram=(each.counts, each.edges)) for name, each in values.items()},
                     step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import pandas as pd
        import trackio

        self.run.log({name: trackio.Table(dataframe=pd.DataFrame([list(row) for row in rows], columns=list(columns)))},
                     step=step)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        self.table(name, ["actual", *labels], [[label, *row] for label, row in zip(labels, counts, strict=True)], step)

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        """Keep a copy of the files in trackio's own folder."""
        with _quiet():
            self.run.log_artifact(folder, name=name, type=kind)

    def finish(self, state: str = "finished") -> None:
        self.run.log({"state": state})
        with _quiet():
            self.run.finish()


def _quiet() -> contextlib.AbstractContextManager[Any]:
    """trackio greets on standard output; the run has its own lines."""
    return contextlib.redirect_stdout(io.StringIO())
