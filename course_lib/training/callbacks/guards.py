"""The callbacks that end a run which cannot go well, as the config's section ``guard`` asks for them."""

from course_lib.config import Config
from course_lib.training.callbacks.base import Callback
from course_lib.training.callbacks.desync import AgreementCheck
from course_lib.training.callbacks.watchdog import WatchdogCallback


def guards(config: Config) -> list[Callback]:
    """Those that the config names; called by every rank."""
    guards: list[Callback] = []
    if config.guard.watchdog:
        guards.append(WatchdogCallback(config))
    if config.guard.desync_check != "off":
        guards.append(AgreementCheck(config))
    return guards
