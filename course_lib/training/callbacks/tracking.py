"""Feeds trackers from any trainer: what it logs, what each rank takes of its machine, tensors, predictions, model."""

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from course_lib.config import Config, flatten, service_names
from course_lib.errors import TrainingInterrupted
from course_lib.tracking.base import FOLDER, Guarded, RunInfo, ends_by_name, identity
from course_lib.tracking.choose import make_trackers
from course_lib.tracking.redact import read_env_file
from course_lib.tracking.system import METRICS, SystemSampler
from course_lib.training.callbacks.base import Callback
from course_lib.training.callbacks.histograms import TensorWatch
from course_lib.training.callbacks.monitoring import from_every_rank
from course_lib.training.callbacks.predictions import predict
from course_lib.training.checkpoints import checkpoint
from course_lib.training.session import Session

SYSTEM_STEPS = 10
"""Least optimizer steps between two samples of the ranks' machines: the ranks wait for each other there."""


class TrackingCallback(Callback):
    """Tracks a run as ``config.tracking`` says: on rank 0, or a run on every rank.

    A failing tracker is reported in one line and dropped; the training goes on. Call :meth:`conclude` and then
    :meth:`finish` after whatever follows the training; a run that fails or is interrupted is closed as such by itself.

    Args:
        config: of the run.

    Attributes:
        trackers: those of this rank; empty where it tracks nothing.
    """

    def __init__(self, config: Config):
        self.config = config
        self.trackers: list[Guarded] = []
        if config.tracking.env_file:
            # What the environment already says wins, as in every tool that reads such files.
            for name, value in read_env_file(config.tracking.env_file).items():
                os.environ.setdefault(name, value)
        service_names.check_environment(config.tracking.trackers, os.environ)

    @property
    def enabled(self) -> bool:
        """Whether any rank tracks anything; the same on all."""
        return bool(self.config.tracking.trackers)

    # --- the run's beginning ---

    def on_train_begin(self, trainer: Session) -> None:
        self.already_raised = sys.exception()  # by code that called us from its own except clause
        if not self.enabled:
            return
        info = self._info(trainer)
        if self._tracks(trainer):
            self.trackers = make_trackers(self.config.tracking.trackers, info)
        self._start(trainer)
        self.sampler, self.system_due = SystemSampler(trainer.device), 0
        settings = self.config.tracking
        self.watch = TensorWatch(trainer, settings.watch if self.trackers else "none", settings.watch_steps)

    def _tracks(self, trainer: Session) -> bool:
        return trainer.is_main or self.config.tracking.track_every_rank

    def _info(self, trainer: Session) -> RunInfo:
        """Rank 0 makes the run's identity, or reads that of the run that is resumed, and the others hear of it."""
        settings, folder = self.config.tracking, self.config.output_dir / FOLDER
        resumes = bool(self.config.output.resume_from_checkpoint)
        name = settings.run_name or self.config.output_dir.name
        known: dict[str, Any] = {}
        if trainer.is_main:
            with checkpoint.saving(f"what is tracked in {folder}"):
                if not resumes:
                    shutil.rmtree(folder, ignore_errors=True)
                known = identity(folder, name, settings.project, settings.run_group)
        known = trainer.ranks.gather_objects(known)[0]
        step = trainer.state.step if resumes else None
        info = RunInfo(**known, folder=folder, rank=trainer.rank, resumed_at=step)
        if not settings.track_every_rank:
            return info
        return dataclasses.replace(
            info, id=f"{info.id}-{trainer.rank}", name=f"{info.name}-rank{trainer.rank}", group=info.group or info.name
        )

    def _start(self, trainer: Session) -> None:
        config = flatten(self.config) | {"world_size": trainer.num_processes, "device_type": trainer.device.type}
        if self.config.run.training_type != "basic" and trainer.is_main:
            # Accelerate starts them, on the main rank alone, and hands them what users pass to accelerator.log.
            trainer.ranks.accelerator.log_with = list(self.trackers)  # type: ignore[arg-type]
            trainer.ranks.accelerator.init_trackers(self.config.tracking.project, config)
            return
        for tracker in self.trackers:
            tracker.start()
            tracker.store_init_configuration(config)

    # --- while it trains ---

    def on_step_end(self, trainer: Session) -> None:
        if self.enabled and self.watch.is_due(trainer.state.step):
            collected = self.watch.collect()
            for tracker in self.trackers:
                tracker.histograms(collected, trainer.state.step)

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if not self.enabled:
            return
        values = {_full_name(name): value for name, value in line.items() if name != "step"}
        if "loss" in line and trainer.state.step >= self.system_due:
            values |= self._system(trainer)
            self.system_due = trainer.state.step + SYSTEM_STEPS
        for tracker in self.trackers:
            tracker.log(values, trainer.state.step)

    def _system(self, trainer: Session) -> dict[str, float]:
        """Every rank's sample, brought together by one sum; only a rank's own where each has a run of its own."""
        own = self.sampler.sample()
        if self.config.tracking.track_every_rank:
            return dict(zip((f"system/{metric}" for metric in METRICS), own, strict=True))
        rows = from_every_rank(trainer, own)
        return {
            f"system/rank{rank}/{metric}": value
            for rank, row in enumerate(rows)
            for metric, value in zip(METRICS, row, strict=True)
        }

    def on_train_end(self, trainer: Session) -> None:
        if not self.enabled:
            return
        self.watch.close()
        raised = sys.exception()
        if raised is not self.already_raised:
            self._close("interrupted" if isinstance(raised, TrainingInterrupted | KeyboardInterrupt) else "failed")

    # --- after the training ---

    def conclude(
        self, trainer: Session, scores: Mapping[str, Any], split: str, texts: Sequence[str] | None = None
    ) -> None:
        """Track the final evaluation and wrong predictions. A collective call.

        Args:
            trainer: has trained.
            scores: final metrics.
            split: that they are of.
            texts: of the split's rows, in order; needed where predictions are tracked.
        """
        step, settings = trainer.state.step, self.config.tracking
        for tracker in self.trackers:
            tracker.log(_flat(scores, split), step)
        if self.enabled and settings.log_predictions and texts is not None:
            predicted = predict(trainer, split)
            names = trainer.data.label_names or ()
            for tracker in self.trackers:
                tracker.table(
                    f"{split}/wrong_predictions",
                    ("row", "text", "label", "predicted", "loss"),
                    predicted.wrong(texts, names, settings.log_predictions),
                    step,
                )
                tracker.confusion(f"{split}/confusion_matrix", names, predicted.confusion(len(names)), step)

    def finish(self, trainer: Session, model_dir: Path | None = None) -> None:
        """Track the model, and close the run. Called by every rank; none waits for another.

        Args:
            trainer: has trained.
            model_dir: where the trained model's files are, for the artifact.
        """
        if self.config.tracking.log_model and model_dir and trainer.is_main:
            for tracker in self.trackers:
                tracker.artifact(f"model-{tracker.info.id}", model_dir, "model")
        self._close("finished")

    def _close(self, state: str) -> None:
        for tracker in self.trackers:
            tracker.finish(state)


def _flat(scores: Mapping[str, Any], split: str) -> dict[str, float]:
    """Final scores by full name; the ends of a 95 % interval are ``test/accuracy_low`` and ``test/accuracy_high``."""
    ends = ends_by_name(scores.get("interval95", {}))
    return {f"{split}/{name}": value for name, value in {**scores, **ends}.items() if name != "interval95"}


def _full_name(name: str) -> str:
    """``loss`` as ``train/loss`` and ``eval.loss`` as ``eval/loss``: trackers make a panel of what stands first."""
    return name.replace("eval.", "eval/", 1) if name.startswith("eval.") else f"train/{name}"
