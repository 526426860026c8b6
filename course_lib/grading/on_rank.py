"""Checks on one rank: the cases one after the other, each in a process group of its own ranks."""

import contextlib
import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from course_lib.grading import hang_report, own_code
from course_lib.grading.task import Case, Observation, Task
from course_lib.grading.time_limits import CAN_TELL, LOOPS, WAITS, IdleWatch, computing, sockets
from course_lib.hangs.rank_state import RankState

SECONDS_PER_CASE = 10.0
"""Without a rank of a case that computes, until their waits are ended: each waits for another."""
SECONDS_OF_CPU = 30.0
"""That a rank computes in a case, until it is interrupted."""
NOT_RUN = "not run, after a case in which ranks waited in vain"
LAST_RESORT = datetime.timedelta(hours=1)
"""Of a wait that nothing else has ended."""
RECORDS: list[RankState] = []
"""By rank, what it does, in memory that forked ranks share with the process that checks."""


@dataclass(frozen=True)
class CheckJob:
    """One case to run with one function.

    Attributes:
        answer: number of the answer that it is a case of: once its ranks have waited in vain, the rest is not run.
        seconds: without a rank that computes, until what ranks wait for is ended.
        most: CPU seconds that a rank may take for it.
    """

    task: Task
    function: Callable[..., Any]
    case: Case
    answer: int = 0
    seconds: float = SECONDS_PER_CASE
    most: float = SECONDS_OF_CPU


def share_pages(ranks: int) -> None:
    """New records for the ranks to come."""
    for record in RECORDS:
        record.close()
    RECORDS[:] = [RankState() for _ in range(ranks)]


def observe_on_rank(jobs: Sequence[CheckJob]) -> list[Observation | None]:
    """This rank's observations of each job; None where it takes no part."""
    torch.set_num_threads(1)
    drop_native_output()
    rank = int(os.environ["RANK"])
    store, _, _ = next(rendezvous("env://"))
    observed: list[Observation | None] = []
    for number, job in enumerate(jobs):
        world = job.case.world_size
        if rank >= world:
            observed.append(None)
            continue
        own_code.give_salt(job.function, rank)
        meeting = Meeting(dist.PrefixStore(f"case {number}", store), rank, world)
        meeting.meet("begin")  # the others may still be busy with a case that this rank has no part in
        if not job.task.needs_ranks:
            last = observed[-1] if number and jobs[number - 1].answer == job.answer else None
            error = last.get("error", "") if last else ""
            is_late = error == NOT_RUN or LOOPS in error or WAITS in error
            observed.append({"error": NOT_RUN} if is_late else _observe_alone(job))
            continue
        stopped = f"answer {job.answer} stopped"
        if rank == 0:  # one decides for all
            meeting.store.set("decided", str(int(store.check([stopped]))))
        if meeting.store.get("decided") == b"1":
            observed.append({"error": NOT_RUN})
            continue
        observed.append(_observe_case(job, number, meeting, functools.partial(store.set, stopped, "")))
    return observed


def drop_native_output() -> None:
    """Show what Python prints, and drop what libraries write to standard error themselves, such as stacks."""
    sys.stderr = open(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


@dataclass(frozen=True)
class Meeting:
    """Meeting point of a case's ranks, whatever the learner's function does with their process group."""

    store: dist.Store
    rank: int
    world_size: int

    def arrive(self, place: str, word: str = "") -> None:
        """Say that this rank has reached ``place``."""
        self.store.set(f"{place} {self.rank}", word)

    def meet(self, place: str, word: str = "") -> list[str]:
        """Say so, and wait until all ranks have reached ``place``; what each of them said."""
        self.arrive(place, word)
        keys = [f"{place} {rank}" for rank in range(self.world_size)]
        self.store.wait(keys, datetime.timedelta(days=1))  # whoever waits in vain is ended with the launch
        return [self.store.get(key).decode() for key in keys]


def _observe_case(job: CheckJob, number: int, meeting: Meeting, stop: Callable[[], None]) -> Observation:
    """One rank's part in a case, in a process group of the case's ranks.

    A rank whose function has returned stays until the others' have: its connections are theirs. One that failed leaves
    at once, so that nobody waits for it; one that waited in vain says `stop`.
    """
    record = RECORDS[meeting.rank] if meeting.rank < len(RECORDS) else RankState()
    connection = _connection()
    watch = IdleWatch(job.seconds, sockets() - connection.sockets)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"group {number}", connection.store),
        rank=meeting.rank,
        world_size=meeting.world_size,
        timeout=LAST_RESORT if CAN_TELL else datetime.timedelta(seconds=job.seconds),
    )
    watch.start()
    said = meeting.meet("connected", f"{os.getpid()} {watch.native_id}")
    try:
        ranks = [(int(pid), int(thread)) for pid, thread in map(str.split, said)] if CAN_TELL else ()
        seen = _observe_function(job, meeting.rank, watch.watching(ranks), record)
        if "error" in seen and hang_report.WAITED.search(seen["error"]):
            stop()
        if "error" in seen:
            meeting.arrive("end")
        else:
            meeting.meet("end")
    finally:
        with contextlib.suppress(RuntimeError):  # a peer that failed has closed the group's connections
            dist.destroy_process_group()
        if watch.has_ended_waits:
            _connection.cache_clear()
    return seen


class _Connection:
    """A rank's connection to the store for its process groups, which can be closed while the ranks still meet."""

    def __init__(self) -> None:
        before = sockets()
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=LAST_RESORT)
        self.sockets = sockets() - before


_connection = functools.cache(_Connection)
"""Made once: each may take seconds where a name server does not answer."""


def _observe_alone(job: CheckJob) -> Observation:
    """A case without ranks, in this process."""
    watch = IdleWatch(job.seconds, sockets())
    watch.start()
    return _observe_function(job, 0, watch.watching([(os.getpid(), watch.native_id or 0)] if CAN_TELL else ()))


def _observe_function(
    job: CheckJob, rank: int, watched: AbstractContextManager[None], record: RankState | None = None
) -> Observation:
    """What is observed of the function; what it raises is an error text."""
    try:
        with hang_report.recorded(record) if record else contextlib.nullcontext(), watched, computing(job.most):
            return job.task.observe(job.function, job.case, rank)
    except Exception as error:  # whatever the learner's code raises is what was observed
        return {"error": own_code.told(error, own_code.file_of(job.function)), "at": time.monotonic()}
