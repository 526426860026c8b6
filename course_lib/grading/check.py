"""``check("ddp.bucketing", function)`` in a notebook: what a learner's function does, property by property.

All cases run in one launch: for each, the ranks that it needs make a process group of just themselves.
"""

import contextlib
import datetime
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from course_lib import learner_files
from course_lib.errors import ConfigError, DataError, nearest
from course_lib.grading.task import Case, Finding, Observation, Task, earned
from course_lib.grading.tasks import TASKS
from course_lib.launching.launch import RankError, RanksHung, launch

SECONDS_PER_CASE = 10.0
"""That a rank waits for another in a collective."""


@dataclass(frozen=True)
class CheckJob:
    """One case to run with one function."""

    task: Task
    function: Callable[..., Any]
    case: Case


@dataclass(frozen=True)
class Report:
    """What a check found; prints as the answer to the learner.

    Attributes:
        task: that was checked.
        findings: of all cases.
    """

    task: Task
    findings: tuple[Finding, ...]

    @property
    def points(self) -> int:
        """Points earned."""
        return earned(self.task, self.findings)

    @property
    def failed(self) -> tuple[str, ...]:
        """Properties that do not hold in some case."""
        return tuple(name for name in self.task.properties
                     if not all(finding.holds for finding in self.findings if finding.property == name))

    def __str__(self) -> str:
        lines = [f"{self.task.name}: {self.points} of {sum(self.task.points.values())} points"]
        told: set[tuple[str, str]] = set()
        for name, points in self.task.points.items():
            miss = next((finding for finding in self.findings if finding.property == name and not finding.holds), None)
            lines.append(f"  {'no ' if miss else 'yes'}  {name} ({points})")
            if miss and (miss.expected, miss.found) not in told:  # an error is every property's
                told.add((miss.expected, miss.found))
                where = "" if miss.rank is None or not self.task.needs_ranks else f" on rank {miss.rank}"
                lines.append(f"       expected{where}: {miss.expected}; found: {miss.found}")
        return "\n".join(lines)


def task_of(name: str) -> Task:
    """The task with this name.

    Raises:
        ConfigError: there is none; the nearest are given.
    """
    if name not in TASKS:
        raise ConfigError(f"no exercise `{name}`", nearest(name, TASKS))
    return TASKS[name]


def check(name: str, function: Callable[..., Any], *, folder: Path | None = None) -> Report:
    """Run a learner's function on the public cases, print which properties hold, and keep the result for them.

    Args:
        name: of the exercise.
        function: the learner's.
        folder: that my_results.json is kept in; without it, in a notebook that somebody works in, beside the notebook.

    Raises:
        ConfigError: no such exercise.
        CourseError: ranks cannot be started here.
    """
    task = task_of(name)
    report = examine(task, function, task.cases(random.Random(0)))
    print(report)
    if folder is not None or learner_files.is_live():
        keep(report, learner_files.results_file(folder))
    return report


def keep(report: Report, file: learner_files.LearnerFile) -> None:
    """Write down a report's points, in place of the exercise's last ones; a file in the way is one line."""
    result = {"points": report.points, "of": sum(report.task.points.values()), "when": learner_files.now()}
    try:
        if said := file.change(lambda content: content.__setitem__(report.task.name, result)):
            print(said)
    except DataError as error:
        print(error)


def examine(task: Task, function: Callable[..., Any], cases: Sequence[Case]) -> Report:
    """Run a function on cases, and judge what was observed. A function that hangs or ends its process fails."""
    jobs = [CheckJob(task, function, case) for case in cases]
    try:
        observed = observe(jobs, stream=True)
    except RanksHung as hung:
        frame = f" in {function.__name__}\n"
        inside = [rank for rank, stack in hung.stacks.items() if frame in stack] or list(hung.stacks)
        late: Observation = {"error": "still in the function when the time was over"}
        observed = [[late if rank in inside else {} for rank in range(max(inside) + 1)] for _ in jobs]
    except RankError as error:
        observed = [[{"error": str(error).splitlines()[0]}] for _ in jobs]
    return Report(task, tuple(finding for job, seen in zip(jobs, observed, strict=True)
                              for finding in task.judge(job.case, seen)))


def observe(jobs: Sequence[CheckJob], stream: bool = False) -> list[list[Observation]]:
    """The observations of each job by rank, all in one launch; those without ranks run in one more process.

    Raises:
        RankError: a rank died.
        RanksHung: the time was over.
    """
    observed: list[list[Observation]] = [[] for _ in jobs]
    for needs_ranks in (False, True):
        chosen = [i for i, job in enumerate(jobs) if job.task.needs_ranks is needs_ranks]
        if not chosen:
            continue
        ranks = max(jobs[i].case.world_size for i in chosen)
        per_rank = launch(_observe_on_rank, [jobs[i] for i in chosen], num_processes=ranks, device="cpu", stream=stream,
                          timeout=_seconds(len(chosen)))
        for place, i in enumerate(chosen):
            observed[i] = [per_rank[rank][place] for rank in range(jobs[i].case.world_size)]
    return observed


def _seconds(jobs: int) -> float:
    """Seconds until ranks that still run are ended."""
    return 2 * SECONDS_PER_CASE + 3 * jobs


def _observe_on_rank(jobs: Sequence[CheckJob]) -> list[Observation | None]:
    """What this rank observes of each job; None where it takes no part."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store, _, _ = next(rendezvous("env://"))
    observed: list[Observation | None] = []
    for number, job in enumerate(jobs):
        world = job.case.world_size
        if rank >= world:
            observed.append(None)
            continue
        meeting = Meeting(dist.PrefixStore(f"case {number}", store), rank, world, 2 * _seconds(len(jobs)))
        meeting.meet("begin")  # the others may still be busy with a case that this rank has no part in
        observed.append(_observe_case(job, meeting) if job.task.needs_ranks else _observe_function(job, rank))
    return observed


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a case wait for each other, whatever the learner's function does with their process group."""

    store: dist.Store
    rank: int
    world_size: int
    seconds: float

    def arrive(self, place: str) -> None:
        """Say that this rank has reached ``place``."""
        self.store.set(f"{place} {self.rank}", "")

    def meet(self, place: str) -> None:
        """Say so, and wait until all ranks have reached ``place``."""
        self.arrive(place)
        self.store.wait([f"{place} {rank}" for rank in range(self.world_size)],
                        datetime.timedelta(seconds=self.seconds))


def _observe_case(job: CheckJob, meeting: Meeting) -> Observation:
    """One rank's part in a case, in a process group of the case's ranks.

    A rank whose function has returned stays until the others' have: its connections are theirs. One that failed leaves
    at once, so that nobody waits for it.
    """
    dist.init_process_group("gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.world_size,
                            timeout=datetime.timedelta(seconds=SECONDS_PER_CASE))
    meeting.meet("connected")
    try:
        seen = _observe_function(job, meeting.rank)
        if "error" in seen:
            meeting.arrive("end")
        else:
            meeting.meet("end")
    finally:
        with contextlib.suppress(RuntimeError):  # a peer that failed has closed the group's connections
            dist.destroy_process_group()
    return seen


def _observe_function(job: CheckJob, rank: int) -> Observation:
    """What is observed of the function; what it raises is an error text."""
    try:
        return job.task.observe(job.function, job.case, rank)
    except Exception as error:  # whatever the learner's code raises is what was observed
        return {"error": f"{type(error).__name__}: {error}"[:300], "at": time.monotonic()}
