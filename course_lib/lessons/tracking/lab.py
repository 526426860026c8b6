"""Measurements of lesson 11: the cost of tracking, where it arises, and whether it leaves the machine."""

import functools
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from course_lib.config import Config
from course_lib.errors import LaunchError
from course_lib.launching.netns import in_own_network
from course_lib.tracking.base import Guarded, RunInfo, Tracker
from course_lib.tracking.choose import TRACKERS
from course_lib.training.callbacks import Callback
from course_lib.training.run import build_trainer
from course_lib.training.session import Session

ROW = {
    "train/loss": 0.5,
    "train/learning_rate": 1e-4,
    "train/gradient_norm": 1.0,
    "train/samples_per_second": 100.0,
    "train/tokens_per_second": 3000.0,
    "train/seconds": 1.0,
    "train/epoch": 0.5,
}
"""A row as the trainers log it."""


class LogsTo(Callback):
    """Gives each logged line to a tracker, on the main rank."""

    def __init__(self, tracker: Tracker):
        self.tracker = tracker

    def on_train_begin(self, trainer: Session) -> None:
        if trainer.is_main:
            self.tracker.start()

    def on_log(self, trainer: Session, line: dict[str, Any]) -> None:
        if trainer.is_main:
            self.tracker.log(line, trainer.state.step)

    def on_train_end(self, trainer: Session) -> None:
        if trainer.is_main:
            self.tracker.finish()


class Slow(Tracker):
    """A tracker that waits for its service: every row takes ``seconds``."""

    name = "slow"

    def __init__(self, seconds: float):
        super().__init__(RunInfo("slow", "slow", "slow", None, Path()))
        self.seconds = seconds

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        time.sleep(self.seconds)


STRETCH = 4
"""Steps that are timed together."""


class StepTimes(Callback):
    """Seconds from the end of each optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Session) -> None:
        self.ends.append(time.perf_counter())

    @property
    def least_ms(self) -> float:
        """Milliseconds per step of the quickest STRETCH of them except for the first two.

        What else the machine does adds to a stretch; from one step to the next it also takes away, as a rank that has
        waited for a core sees less of the others' next step.
        """
        return min(b - a for a, b in zip(self.ends[2:], self.ends[2 + STRETCH :], strict=False)) / STRETCH * 1e3


def step_ms(config: Config, slow: float = 0.0, in_thread: bool = False) -> float:
    """Train on this rank's part; a tracker takes ``slow`` seconds per row on the main rank. A collective call.

    Args:
        config: of a run of more than STRETCH + 2 steps.
        slow: seconds per row; 0: no tracker at all.
        in_thread: hand rows to a thread, as the trainers do, or keep them in the step.

    Returns:
        The time of a step on this rank while they are quickest, in ms.
    """
    times = StepTimes()
    tracker: Tracker = Guarded(Slow(slow)) if in_thread else Slow(slow)
    trainer, _ = build_trainer(config, [times, *([LogsTo(tracker)] if slow else [])])
    if trainer.is_main:
        trainer.output_dir.mkdir(parents=True, exist_ok=True)
    trainer.ranks.barrier()
    trainer.train()
    return times.least_ms


def row_ms(names: Iterable[str], folder: Path) -> pd.DataFrame:
    """Median milliseconds that a training waits for a row to be kept: in the step, and handed to a thread.

    Args:
        names: of trackers.
        folder: for what they keep.
    """

    def timed(tracker: Tracker) -> float:
        tracker.start()
        spent = []
        for number in range(100):
            begin = time.perf_counter()
            tracker.log(ROW, number)
            spent.append(time.perf_counter() - begin)
            time.sleep(2e-3)  # a training computes here
        tracker.finish()
        return statistics.median(spent) * 1e3

    milliseconds = {}
    for name in names:
        info = [RunInfo(f"{name}{number}", "cost", "lesson", None, folder / f"{name}-{number}") for number in (0, 1)]
        milliseconds[name] = {
            "in the step": timed(TRACKERS[name](info[0])),
            "handed over": timed(Guarded(TRACKERS[name](info[1]))),
        }
    return pd.DataFrame(milliseconds).T


def attempts_to_leave(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int | None, str]:
    """Call a function where there is no network but loopback, and count what was meant for any other address.

    Returns:
        How many connections and packets had no way to go, as the kernel counts them, and why it is None where this
        system allows no network of one's own.
    """
    try:
        return in_own_network(_counted, functools.partial(function, *args, **kwargs)), ""
    except LaunchError as reason:
        return None, str(reason)


def _counted(function: Callable[[], Any]) -> int:
    before = without_a_route()
    function()
    return without_a_route() - before


def without_a_route() -> int:
    """Connections and packets of this network that had no way to go so far, over IPv4 and IPv6."""
    names, values = (line.split() for line in Path("/proc/self/net/snmp").read_text().splitlines()[:2])
    six = dict(line.split() for line in Path("/proc/self/net/snmp6").read_text().splitlines())
    return int(values[names.index("OutNoRoutes")]) + int(six["Ip6OutNoRoutes"])


def knock() -> None:
    """Try to reach an address that is nobody's (192.0.2.1, RFC 5737), once."""
    with socket.socket() as door:
        door.settimeout(1)
        door.connect_ex(("192.0.2.1", 443))
