"""Short runs for the desync guard, in which one rank goes its own way."""

import os

import torch

from course_lib.config import build
from course_lib.errors import DesyncError
from course_lib.hangs.desync import digest_of, local
from course_lib.training.callbacks import Callback
from course_lib.training.callbacks.guards import guards
from course_lib.training.run import build_trainer
from tests.fresh_accelerator import forget_accelerator

OPTIONS = {
    "model": "tiny-bert",
    "training_type": "accelerated",
    "max_train_samples": 24,
    "max_eval_samples": 8,
    "max_length": 16,
    "max_steps": 4,
    "batch_size": 2,
    "logging_steps": 100,
    "progress_bar": False,
    "device": "cpu",
    "learning_rate": 1e-3,
    "save_steps": 0,
    "eval_steps": 0,
    "keep_best": False,
    "desync_steps": 2,
    "tracker": "none",
    "watchdog": 0,
}
OFF = {"desync_check": "off", "desync_steps": 100}


class Plant(Callback):
    """Does something to one rank, when the trainer comes to one of its hooks for the first, or the nth, time."""

    def __init__(self, hook, deed, rank=1, turn=1):
        self.rank, self.deed, self.turn, self.seen = rank, deed, turn, 0
        setattr(self, hook, self.once)

    def once(self, trainer):
        self.seen += 1
        if trainer.rank == self.rank and self.seen == self.turn:
            with torch.no_grad():
                self.deed(trainer)


class Looks(Callback):
    """Keeps what a function says of the trainer after the last step."""

    def __init__(self, look):
        self.look = look

    def on_step_end(self, trainer):
        if trainer.state.step >= trainer.state.max_steps:
            self.found = self.look(trainer)


def weights_of(trainer):
    """A digest of this rank's parameters."""
    return digest_of([local(p).flatten() for p in trainer.model.parameters()])


def train(folder, options, *callbacks, rank_1=None, look=weights_of):
    """A run on this rank: the step that it reached and a look at it, or the line that the guard ended it with.

    ``rank_1`` are options of that rank alone.
    """
    forget_accelerator()
    own = rank_1 if rank_1 and os.environ["RANK"] == "1" else {}
    config = build(OPTIONS | {"output_dir": str(folder)} | options | own)
    folder.mkdir(exist_ok=True)
    looks = Looks(look)
    try:
        trainer = build_trainer(config, [*callbacks, looks, *guards(config)])[0]
        trainer.train()
    except DesyncError as error:
        return str(error)
    return trainer.state.step, looks.found


def trained(on, folder, runs):
    """What each of several runs gave on each rank; one after another on the same ranks.

    Args:
        on: starts a function on ranks, as ``ranks(2)`` does.
        folder: of theirs.
        runs: functions of a folder, by name.
    """

    def all_runs():
        torch.set_num_threads(1)
        return {name: run(folder / name.replace(" ", "-")) for name, run in runs.items()}

    every = on(all_runs)
    return {name: [results[name] for results in every] for name in runs}


def a_run(options, *callbacks, **more):
    return lambda folder: train(folder, options, *callbacks, **more)
