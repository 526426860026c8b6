"""Weights & Biases: online where there is a key, else offline, to be uploaded later or never."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.tracking.base import Histogram, RunInfo, Tracker
from course_lib.tracking.redact import redact

KEY, MODE = "WANDB_API_KEY", "WANDB_MODE"
INIT_TIMEOUT = 20
"""Seconds to wait for the service at the start, where ``WANDB_INIT_TIMEOUT`` says nothing else."""
LOCAL_TIMEOUT = 90
"""Seconds to wait for wandb's own process, which a busy machine may start slowly."""


def mode() -> str:
    """``WANDB_MODE`` where it is set; else ``online`` with a key in the environment and ``offline`` without."""
    return os.environ.get(MODE) or ("online" if os.environ.get(KEY) else "offline")


class WandbTracker(Tracker):
    """One W&B run; its files are in ``wandb/`` of the run's tracking folder.

    Each row carries ``step``, the optimizer step, which is every chart's x axis: W&B's own counter begins anew in
    an offline run that is resumed, and refuses steps that were logged before in one that is online.
    """

    name = "wandb"

    def __init__(self, info: RunInfo):
        super().__init__(info)
        self.mode = mode()

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self) -> None:
        if self.mode == "offline":
            # Nothing is to leave the machine; wandb would also report its own errors.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.info.folder.mkdir(parents=True, exist_ok=True)
        why = f"{MODE} is offline" if os.environ.get(MODE) else f"{KEY} is not set"
        try:
            self._open()
        except wandb.errors.CommError as error:
            if self.mode != "online":
                raise
            self.mode, why = "offline", " ".join(redact(f"the service did not take the run ({error})").split())
            wandb.teardown()  # its background process would hold the run's id
            self._open()
        if self.mode == "offline" and self.info.rank == 0:
            print(f"W&B: offline, as {why}; the run is kept in {self.folder}", flush=True)

    def _open(self) -> None:
        import wandb

        # No metadata: it holds the command line and the environment's description, not all of which is ours to keep.
        settings = wandb.Settings(silent=True, console="off", x_disable_meta=True, disable_git=True, save_code=False)
        if self.mode == "online":
            settings.init_timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT))
        else:
            settings.init_timeout = LOCAL_TIMEOUT
        self.run = wandb.init(
            project=self.info.project,
            name=self.info.name,
            id=self.info.id,
            group=self.info.group,
            job_type="train",
            dir=self.info.folder,
            mode=self.mode,  # type: ignore[arg-type]
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            settings=settings,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.config.update({"rank": self.info.rank, "resumed_at": self.info.resumed_at}, allow_val_change=True)

    @property
    def folder(self) -> Path:
        """This run's own folder."""
        return Path(self.run.dir).parent

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(dict(values) if step is None else {**values, "step": step})

    def histograms(self, values: Mapping[str, Histogram], step: int) -> None:
        import wandb

        self.log(
            {
                name: wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))
                for name, histogram in values.items()
            },
            step,
        )

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        import wandb

        self.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step)

    def confusion(self, name: str, labels: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        import wandb

        fields = ("Actual", "Predicted", "nPredictions")
        cells = [
            [actual, predicted, count]
            for actual, row in zip(labels, counts, strict=True)
            for predicted, count in zip(labels, row, strict=True)
        ]
        self.log(
            {
                name: wandb.plot_table(
                    "wandb/confusion_matrix/v1",
                    wandb.Table(columns=list(fields), data=cells),
                    {field: field for field in fields},
                    {"title": name},
                )
            },
            step,
        )

    def artifact(self, name: str, folder: Path, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(name, type=kind)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            artifact.add_file(str(path), name=path.relative_to(folder).as_posix())
        self.run.log_artifact(artifact)

    def finish(self, state: str = "finished") -> None:
        self.run.summary["state"] = state
        folder = self.folder
        self.run.finish(exit_code=0 if state == "finished" else 1)
        if self.mode == "offline":
            print(f"W&B: to upload the run, with an account: wandb sync {folder}", flush=True)
