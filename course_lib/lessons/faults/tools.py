"""The tools of lesson 10: what each of them reads, and the ranks that it then names."""

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from course_lib.hangs.backend_records import backend_records
from course_lib.hangs.watchdog import HangReport, Watchdog
from course_lib.launching.launch import RankError
from course_lib.lessons.faults.scenarios import PATIENCE
from course_lib.writing import write_text


@dataclass(frozen=True)
class FaultOutcome:
    """Outcome of a run.

    Attributes:
        said: of each rank, what it did last: ``returned 4``, ``raised RuntimeError: ...``, ``was killed by SIGKILL``,
            ``was still waiting``.
        values: of each rank, what its function returned; None where it did not.
        reporters: the ranks that raised an exception, the first one first.
        error: what `launch` raised, None where it did not.
        reports: of the watchdog; empty where it had nothing to say or was not there.
        records: of torch's own flight recorder, for each rank; empty where it was not switched on.
        starts: how often the ranks were started.
        seconds: from the first start to the end, wall clock.
    """

    said: tuple[str, ...]
    values: tuple[Any, ...]
    reporters: tuple[int, ...]
    error: Exception | None
    reports: tuple[HangReport, ...]
    records: tuple[list[dict[str, Any]], ...]
    starts: int
    seconds: float


@dataclass(frozen=True)
class Tool:
    """Tool that names the culprit.

    Attributes:
        name: for tables.
        named: the ranks that it names, read from an inspected run.
        join: called on each rank before it joins the group.
        around: what the function runs in, on each rank.
        until_timeout: whether it looks once a collective has timed out.
    """

    name: str
    named: Callable[[FaultOutcome], set[int]]
    join: Callable[[], None] | None = None
    around: Callable[[Path], AbstractContextManager] | None = None
    until_timeout: bool = False

    @property
    def is_reader(self) -> bool:
        """Whether the tool only reads what a run leaves, and does not run with it."""
        return self.join is self.around is None


def _of_reports(outcome: FaultOutcome) -> set[int]:
    return {verdict.rank for report in outcome.reports for verdict in report.verdicts}


def _of_fingerprints(outcome: FaultOutcome) -> set[int]:
    """The rank that most others differ from; two ranks name each other."""
    others = Counter(int(rank) for said in outcome.said for rank in re.findall(r"but Rank (\d+) is running", said))
    return {rank for rank, count in others.items() if count == max(others.values())}


def _of_first_cause(outcome: FaultOutcome) -> set[int]:
    return {outcome.error.rank} if isinstance(outcome.error, RankError) else set()


def _of_missing_key(outcome: FaultOutcome) -> set[int]:
    return {int(rank) for said in outcome.said for rank in re.findall(r"keys: \S*/(\d+)", said)}


def _of_barrier(outcome: FaultOutcome) -> set[int]:
    """What the barrier's error says: rank 0 alone knows who is missing."""
    failed = re.search(r"Ranks ([\d, ]+) failed to pass monitoredBarrier", outcome.said[0])
    return {int(rank) for rank in failed[1].split(",")} if failed else set()


def _of_message(outcome: FaultOutcome) -> set[int]:
    return {int(rank) for rank in re.findall(r"of rank (\d+) is not", str(outcome.error))}


def _of_times(outcome: FaultOutcome) -> set[int]:
    """The rank that the others wait for waits least itself."""
    waited = [sum(waiting for _, waiting in steps) for steps in outcome.values]
    return {waited.index(min(waited))}


def _of_records(outcome: FaultOutcome) -> set[int]:
    """The ranks that recorded the fewest collectives, where not all recorded as many."""
    counts = [len(entries) for entries in outcome.records]
    return {rank for rank, count in enumerate(counts) if count < max(counts)}


def _switch_recorder_on() -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"  # over NCCL it is on by itself


@contextlib.contextmanager
def _recorded(folder: Path) -> Iterator[None]:
    """Leave what this rank's recorder holds, however the function ends."""
    try:
        yield
    finally:
        write_text(folder / f"records{dist.get_rank()}.json", json.dumps(backend_records()))


def _compare_fingerprints() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()


WATCHDOG = Tool("the watchdog's report", _of_reports, around=lambda folder: Watchdog(PATIENCE.total_seconds(), folder))
DETAIL = Tool("TORCH_DISTRIBUTED_DEBUG=DETAIL", _of_fingerprints, join=_compare_fingerprints)
FIRST_CAUSE = Tool("the launcher's first cause", _of_first_cause)
BARRIER = Tool("monitored_barrier", _of_barrier)
MISSING_KEY = Tool("the key that the store waits for", _of_missing_key)
OWN_CHECK = Tool("a look before the all-reduce", _of_message)
GUARD = Tool("the desync guard", _of_message)
TIMES = Tool("waiting time by rank", _of_times)
TORCH_RECORDER = Tool(
    "torch's flight recorder", _of_records, join=_switch_recorder_on, around=_recorded, until_timeout=True
)
