"""TensorBoard event files, in ``tensorboard/`` of the run's tracking folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.tracking.base import Histogram, RunInfo, Tracker


class TensorBoardTracker(Tracker):
    """One run's event files; look at them with ``tensorboard --logdir``, which binds to localhost.

    A resumed run drops, by TensorBoard's own rule (``purge_step``), what was written beyond its checkpoint.
    """

    name = "tensorboard"

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.folder = info.folder / "tensorboard" / f"{info.name}-rank-{info.rank}"

    @property
    def tracker(self) -> Any:
        return self.writer

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed_at = self.info.resumed_at
        self.writer = SummaryWriter(str(self.folder), purge_step=None if resumed_at is None else resumed_at + 1)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.writer.add_text("config", _table(("field", "value"), list(values.items())))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)
            else:
                self.writer.add_text(name, str(value), step)

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        for name, histogram in values.items():
            counts, edges = np.asarray(histogram.counts, dtype=float), np.asarray(histogram.edges)
            middles = (edges[:-1] + edges[1:]) / 2
            self.writer.add_histogram_raw(
                name,
                min=edges[0],
                max=edges[-1],
                num=int(counts.sum()),
                sum=float((counts * middles).sum()),
                sum_squares=float((counts * middles**2).sum()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.writer.add_text(name, _table(columns, rows), step)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        rows = [[actual, *row] for actual, row in zip(labels, counts, strict=True)]
        self.writer.add_text(name, _table(["actual \\ predicted", *labels], rows), step)

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        """Note where the files lie: event files hold no files."""
        self.writer.add_text(name, f"{kind}: {folder}")

    def finish(self, state: str = "finished") -> None:
        self.writer.add_text("state", state)
        self.writer.close()


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, as TensorBoard's text panel shows it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
