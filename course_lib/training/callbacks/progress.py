"""What a run says of itself on the terminal: its first lines, and a line per logged step where no bar is shown."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from course_lib.config import Config
from course_lib.data.cache import batches
from course_lib.training.callbacks.base import Callback, evaluated, shows_bar

if TYPE_CHECKING:
    from course_lib.training.trainer import Trainer

SHOWN_CLASSES = 8
"""Classes whose counts are shown; of more, the most frequent ones."""


def terminal_lines(config: Config) -> list[Callback]:
    """What a command shows of its run: the first lines, and a line per logged step where there is no bar."""
    return [Opening(), *([] if shows_bar(config) else [LogLines()])]


class Opening(Callback):
    """Before the first step: data, model, ranks, precision, steps, and where the run writes."""

    def on_train_begin(self, trainer: "Trainer") -> None:
        if trainer.is_main:
            for line in opening(trainer):
                trainer.say(line)


def opening(trainer: "Trainer") -> list[str]:
    """The first lines of a run."""
    config, state = trainer.config, trainer.state
    rows = ", ".join(f"{len(split)} {name}" for name, split in trainer.data.splits.items())
    lines = [f"data       {config.data.dataset}: {rows} rows", *(f"           {note}" for note in trainer.data.notes)]
    if names := trainer.data.label_names:
        lines.append(f"classes    {classes(trainer, names)}")
    parameters = sum(_count(shape) for name, shape in trainer.engine.shapes().items())
    lines.append(f"model      {config.model.model}, {parameters / 1e6:.1f} million weights, {config.data.task}")
    strategy = config.parallel.strategy
    how = config.run.training_type if config.run.training_type != "accelerated" else (
        f"{strategy} by {config.parallel.chosen_engine}")
    kernels = ", fast CPU kernels" if trainer.cpu_kernels == "fast" else ""
    lines.append(f"ranks      {trainer.num_processes} ({trainer.device.type}, precision {trainer.precision}{kernels}), "
                 f"{how}")
    begun = f", from step {state.step}" if state.step else ""
    lines.append(f"steps      {state.max_steps} of {trainer.sampler.global_batch_size} rows, "
                 f"{state.steps_per_epoch} per epoch{begun}")
    return [*lines, f"writes to  {trainer.output_dir}"]


def classes(trainer: "Trainer", names: tuple[str, ...]) -> str:
    """The classes of the training rows with their counts, the most frequent first where there are many."""
    counts: Counter[int] = Counter()
    for labels in batches(trainer.data.splits["train"], "labels"):
        counts.update(labels.to_pylist())
    if len(names) <= SHOWN_CLASSES:
        return ", ".join(f"{name} {counts[number]}" for number, name in enumerate(names))
    shown = ", ".join(f"{names[number]} {count}" for number, count in counts.most_common(SHOWN_CLASSES))
    return f"{len(names)}: {shown}, …"


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


class LogLines(Callback):
    """A line per logged step, with the time left, and one per evaluation, on the main rank: for logs."""

    def on_log(self, trainer: "Trainer", line: dict[str, Any]) -> None:
        if trainer.is_main:
            trainer.say(logged_step(trainer, line) if "loss" in line else evaluated(line))


def logged_step(trainer: "Trainer", line: dict[str, Any]) -> str:
    """``step 20/144, epoch 0.42, loss 0.6931, lr 5.0e-05, 52 samples/s, 1:23 left``."""
    state = trainer.state
    left = state.seconds / state.step * (state.max_steps - state.step)
    rate = f", {line['samples_per_second']:.0f} samples/s" if "samples_per_second" in line else ""
    return (f"step {state.step}/{state.max_steps}, epoch {line['epoch']:.2f}, loss {line['loss']:.4f}, "
            f"lr {line['learning_rate']:.1e}{rate}, {tqdm.format_interval(left)} left")

