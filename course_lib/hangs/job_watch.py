"""On a rank of somebody else's job: the watchdog, from its first process group on, with a beat per optimizer step."""

from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.hangs.watchdog import Watchdog


class JobWatch:
    """Watches this rank from now to `end`.

    Args:
        seconds: without progress until the ranks report and end.
        folder: of the reports.
    """

    def __init__(self, seconds: float, folder: str | Path):
        self.watchdog, self._steps = Watchdog(seconds, folder), 0
        self.watchdog.__enter__()
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def end(self, error: BaseException | None) -> None:
        """The rank leaves, by an error or not."""
        self._hook.remove()
        self.watchdog.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._steps += 1
        self.watchdog.beat(self._steps - 1)


def begin(settings: dict[str, Any]) -> JobWatch:
    """Start on this rank.

    Args:
        settings: ``seconds`` and ``folder``.
    """
    return JobWatch(settings["seconds"], Path(settings["folder"]))
