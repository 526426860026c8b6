"""Progress of a run on the terminal: its first lines, and a line per logged step where no bar is shown."""

from typing import Any

from tqdm import tqdm

from course_lib.config import Config
from course_lib.training.callbacks.base import Callback, evaluated, shows_bar
from course_lib.training.session import Session


def terminal_lines(config: Config) -> list[Callback]:
    """Lines that a command shows of its run: the first ones, and one per logged step where there is no bar."""
    return [Opening(), *([] if shows_bar(config) else [LogLines()])]


class Opening(Callback):
    """Before the first step: data, model, ranks, precision, steps, and where the run writes."""

    def on_train_begin(self, trainer: Session) -> None:
        if trainer.is_main:
            for line in opening(trainer):
                trainer.say(line)


def opening(trainer: Session) -> list[str]:
    """The first lines of a run."""
    config, state = trainer.config, trainer.state
    lines = [f"data       {config.data.dataset}"]
    lines += [f"{split:<10} {facts.line(split)}" for split, facts in trainer.data.facts.items()]
    lines += [f"           {note}" for note in trainer.data.notes]
    parameters = sum(_count(shape) for name, shape in trainer.stored.shapes().items())
    lines.append(f"model      {config.model.model}, {parameters / 1e6:.1f} million weights, {config.data.task}")
    strategy = config.parallel.strategy
    how = (
        config.run.training_type
        if config.run.training_type != "accelerated"
        else (f"{strategy} by {config.parallel.chosen_engine}")
    )
    kernels = ", fast CPU kernels" if trainer.cpu_kernels == "fast" else ""
    lines.append(
        f"ranks      {trainer.num_processes} ({trainer.device.type}, precision {trainer.precision}{kernels}), {how}"
    )
    begun = f", from step {state.step}" if state.step else ""
    per_epoch = "of a stream" if trainer.data.shards else f"{state.steps_per_epoch} per epoch"
    lines.append(f"steps      {state.max_steps} of {trainer.sampler.global_batch_size} rows, {per_epoch}{begun}")
    return [*lines, f"writes to  {trainer.output_dir}"]


def _count(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


class LogLines(Callback):
    """A line per logged step, with the time left, and one per evaluation, on the main rank: for logs."""

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if trainer.is_main:
            trainer.say(logged_step(trainer, line) if "loss" in line else evaluated(line))


def logged_step(trainer: Session, line: dict[str, Any]) -> str:
    """``step 20/144, epoch 0.42, loss 0.6931, lr 5.0e-05, 52 samples/s, 1:23 left``."""
    state = trainer.state
    left = state.seconds / state.step * (state.max_steps - state.step)
    rate = f", {line['samples_per_second']:.0f} samples/s" if "samples_per_second" in line else ""
    return (
        f"step {state.step}/{state.max_steps}, epoch {line['epoch']:.2f}, loss {line['loss']:.4f}, "
        f"lr {line['learning_rate']:.1e}{rate}, {tqdm.format_interval(left)} left"
    )
