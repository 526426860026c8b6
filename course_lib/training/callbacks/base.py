"""Hooks into the training loop: the trainer's own logging, and users' code.

A callback is called on every rank; ``trainer.is_main`` is True on one. It reads ``trainer.state``
and may set ``trainer.state.stop``, on every rank alike.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from course_lib import learner_files
from course_lib.config import Config
from course_lib.training.checkpoints import checkpoint
from course_lib.training.session import Session
from course_lib.writing import JsonLines


class Callback:
    """Subclass it and override what you need."""

    def on_connect(self, trainer: Session) -> None:
        """Once the ranks have joined and the model stands, before an engine wraps it."""

    def on_train_begin(self, trainer: Session) -> None:
        """Before the first step; after a checkpoint has been read, if there was one."""

    def on_step_end(self, trainer: Session) -> None:
        """After each optimizer step."""

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        """After every ``logging_steps`` steps and each evaluation, with the numbers."""

    def on_evaluate(self, trainer: Session, metrics: dict[str, float]) -> None:
        """After each evaluation on the validation split."""

    def on_save(self, trainer: Session, checkpoint: Path) -> None:
        """After each checkpoint."""

    def on_train_end(self, trainer: Session) -> None:
        """After the last step, also when the run was interrupted."""


class FunctionCallback(Callback):
    """A plain function, called after each step with the trainer."""

    def __init__(self, function: Callable[[Session], None]):
        self.function = function

    def on_step_end(self, trainer: Session) -> None:
        self.function(trainer)


def evaluated(line: Mapping[str, Any]) -> str:
    """A logged evaluation as text, with 95 % intervals: ``step 48: validation accuracy 0.8021 [0.7610, 0.8381]``."""
    scores = {
        name.removeprefix("eval."): value
        for name, value in line.items()
        if name.startswith("eval.") and isinstance(value, float)
    }

    def told(name: str) -> str:
        ends = [f"{scores[end]:.4f}" for end in (f"{name}_low", f"{name}_high") if end in scores]
        return f"{name} {scores[name]:.4f}" + (f" [{', '.join(ends)}]" if ends else "")

    shown = ", ".join(told(name) for name in scores if not name.endswith(("_low", "_high")))
    return f"step {line['step']}: validation {shown}"


def shows_bar(config: Config) -> bool:
    """Whether a progress bar is wanted and there is somebody to see it: a terminal, or a notebook's own process."""
    in_notebook = learner_files.is_live() and "RANK" not in os.environ
    return config.run.progress_bar and (sys.stderr.isatty() or in_notebook)


class ProgressBar(Callback):
    """Steps done, loss, learning rate, samples and tokens per second, and MFU where it is known, on the main rank."""

    def on_train_begin(self, trainer: Session) -> None:
        self.bar = tqdm(
            total=trainer.state.max_steps,
            initial=trainer.state.step,
            desc="train",
            unit="step",
            disable=not (trainer.is_main and shows_bar(trainer.config)),
            mininterval=0.5,
        )

    def on_step_end(self, trainer: Session) -> None:
        self.bar.update()

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if "loss" in line:
            mfu = f", MFU {line['mfu']:.1%}" if "mfu" in line else ""
            self.bar.set_postfix_str(
                f"loss {line['loss']:.4f}, lr {line['learning_rate']:.1e}, "
                f"{line['samples_per_second']:.0f} samples/s, "
                f"{line['tokens_per_second']:,.0f} tokens/s{mfu}",
                refresh=False,
            )
        elif not self.bar.disable:
            self.bar.write(evaluated(line))

    def on_train_end(self, trainer: Session) -> None:
        self.bar.close()


class JsonLinesLog(Callback):
    """One JSON object per logged line, in ``metrics.jsonl``; a resumed run continues the file.

    Lines beyond the checkpoint that is resumed from are dropped, so that no step stands twice.
    """

    def __init__(self, path: Path):
        self.path, self.lines = path, JsonLines(path)

    def on_train_begin(self, trainer: Session) -> None:
        if trainer.is_main:
            with checkpoint.saving(str(self.path)):
                self.lines.cut(trainer.state.step)

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if trainer.is_main:
            with checkpoint.saving(f"a line of {self.path}"):
                self.lines.append(line)


class EarlyStopping(Callback):
    """End the run after so many evaluations without a better one."""

    def __init__(self, patience: int):
        self.patience = patience

    def on_evaluate(self, trainer: Session, metrics: dict[str, float]) -> None:
        if trainer.state.evaluations_since_best >= self.patience:
            trainer.state.stop = True
