"""The callbacks that end a run which cannot go well, as the config's section ``guard`` asks for them."""

import os
import sys

from course_lib.config import Config
from course_lib.hangs.report import HANG_FOLDER
from course_lib.hangs.watchdog import Watchdog
from course_lib.training.callbacks.base import Callback
from course_lib.training.callbacks.desync import AgreementCheck
from course_lib.training.session import Session


class WatchdogCallback(Callback):
    """Has a :class:`Watchdog` watch from the first step to the last; its reports go to ``hang`` in the run's folder.

    A process that no launcher started may be a notebook's: it gets the report, and is not ended.
    """

    def __init__(self, config: Config):
        self.watchdog = Watchdog(
            config.guard.watchdog, config.output_dir / HANG_FOLDER, ends="RANK" in os.environ, holds_sigterm=False
        )  # the trainer saves a checkpoint then

    def on_train_begin(self, trainer: Session) -> None:
        self.watchdog.__enter__()

    def on_step_end(self, trainer: Session) -> None:
        self.watchdog.beat(trainer.state.step)

    def on_train_end(self, trainer: Session) -> None:
        self.watchdog.__exit__(*sys.exc_info())  # the error that ends the run, where one does


def guards(config: Config) -> list[Callback]:
    """Those that the config names; called by every rank."""
    watchdog: list[Callback] = [WatchdogCallback(config)] if config.guard.watchdog else []
    return watchdog + ([AgreementCheck(config)] if config.guard.desync_check != "off" else [])
