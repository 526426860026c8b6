"""The callbacks that end a run which cannot go well, as the config's section ``guard`` asks for them."""

from course_lib.config import Config
from course_lib.training.callbacks import Callback


def guards(config: Config) -> list[Callback]:
    """Those that the config names; called by every rank."""
    return []
