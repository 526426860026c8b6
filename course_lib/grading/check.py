"""``check("ddp.bucketing", function)`` in a notebook: what a learner's function does, property by property.

All cases run in one launch: for each, the ranks that it needs make a process group of just themselves.
"""

import contextlib
import datetime
import functools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from course_lib import learner_files
from course_lib.errors import ConfigError, DataError, nearest
from course_lib.grading import hang_report, own_code
from course_lib.grading.task import Case, Finding, Observation, Task, earned
from course_lib.grading.tasks import TASKS
from course_lib.hangs.rank_state import RankState
from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.launching.own_time import on_the_wall

SECONDS_PER_CASE = 10.0
"""That a rank waits for another in a collective."""
NOT_RUN = "not run, after a case in which ranks waited in vain"
LATE = "timed out: the function was still running"
_pages: list[RankState] = []
"""By rank, what it does, in memory that forked ranks share with this process."""


@dataclass(frozen=True)
class CheckJob:
    """One case to run with one function.

    Attributes:
        answer: number of the answer that it is a case of: once its ranks have waited in vain, the rest is not run.
        seconds: that a rank waits for another in a collective, up to twice as long where it has waited for cores.
        most: seconds that the case may take, likewise; None: as long as the launch.
    """

    task: Task
    function: Callable[..., Any]
    case: Case
    answer: int = 0
    seconds: float = SECONDS_PER_CASE
    most: float | None = None


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
        whole = sum(self.task.points.values())
        lines = [f"{self.task.name}: {self.points} of {whole} points"]
        told: set[tuple[str, str]] = set()
        for name, points in self.task.points.items():
            miss = next((finding for finding in self.findings if finding.property == name and not finding.holds), None)
            lines.append(f"  {'no ' if miss else 'yes'}  {name} ({points})")
            if miss and (miss.expected, miss.found) not in told:  # an error is every property's
                told.add((miss.expected, miss.found))
                where = "" if miss.rank is None or not self.task.needs_ranks else f" on rank {miss.rank}"
                lines.append(f"       expected{where}: {miss.expected}; found: {miss.found}")
                lines += [f"       {line}" for line in [*miss.note.splitlines(), miss.case] if line]
        if self.task.most(self.failed) < whole and self.points:
            point = ", ".join(f"`{name}`" for name in self.task.essential if name in self.failed)
            lines.append(f"  without {point}, which is the point of it, at most {self.task.most(self.failed)} points")
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
    jobs = [CheckJob(task, function, case, seconds=SECONDS_PER_CASE) for case in cases]
    file = own_code.file_of(function)
    whole = cases[:1] if len(cases) == 1 else ()  # what has hung or died is not known by case
    try:
        observed = observe(jobs, stream=True)
    except RanksHung as hung:
        own = {rank: line for rank, stack in hung.stacks.items() if (line := own_code.last_line(stack, file))}
        inside = own or dict.fromkeys(hung.stacks, "the function")
        late = [{"error": f"still in {inside[rank]} when the time was over"} if rank in inside else {}
                for rank in range(max(inside) + 1)]
        return Report(task, tuple(_unplaced(task, finding, whole) for finding in task.judge(cases[0], late)))
    except RankError as error:
        said = str(error).splitlines()[0]
        dead = re.search(r"rank (\d+)", said)
        why = hang_report.explain(_pages, file, int(dead[1]) if dead else None) if task.needs_ranks else ""
        seen: list[Observation] = [{"error": f"{said}: {why}" if why else said}]
        return Report(task, tuple(_unplaced(task, finding, whole) for finding in task.judge(cases[0], seen)))
    findings = []
    for number, (job, seen) in enumerate(zip(jobs, observed, strict=True), 1):
        if any(one.get("error") == NOT_RUN for one in seen):
            continue
        if task.needs_ranks and job.case.world_size > 1 and _waited_in_vain(seen):
            why = hang_report.explain(_pages[: job.case.world_size], file)
            said = f"a hang: {why}" if why else f"a rank waited {SECONDS_PER_CASE:.0f} s for another in vain"
            seen = [{"error": said}] * job.case.world_size
        findings += [replace(finding, case=finding.case and f"case {number} of {len(jobs)}: {finding.case}")
                     for finding in task.judge(job.case, seen)]
    return Report(task, tuple(findings))


def _unplaced(task: Task, finding: Finding, cases: Sequence[Case]) -> Finding:
    """A finding of a launch as a whole: of one case only where there was but one."""
    return finding if cases else replace(finding, case="")


def _waited_in_vain(seen: Sequence[Observation]) -> bool:
    """Whether the first rank that failed in a case did so because it waited for another too long."""
    errors = [one for one in seen if "error" in one]
    first = min(errors, key=lambda one: one.get("at", 0.0), default=None)
    return first is not None and hang_report.WAITED.search(first["error"]) is not None


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
        if needs_ranks:
            _share_pages(ranks)
        per_rank = launch(_observe_on_rank, [jobs[i] for i in chosen], num_processes=ranks, device="cpu", stream=stream,
                          timeout=_seconds(len(chosen)))
        for place, i in enumerate(chosen):
            observed[i] = [per_rank[rank][place] for rank in range(jobs[i].case.world_size)]
    return observed


def _share_pages(ranks: int) -> None:
    """New pages for the ranks to come."""
    for page in _pages:
        page.close()
    _pages[:] = [RankState() for _ in range(ranks)]


def _seconds(jobs: int) -> float:
    """Of the ranks' own time, until those that still run are ended."""
    return 3 * SECONDS_PER_CASE + 3 * jobs


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
        meeting = Meeting(dist.PrefixStore(f"case {number}", store), rank, world)
        meeting.meet("begin")  # the others may still be busy with a case that this rank has no part in
        if not job.task.needs_ranks:
            last = observed[-1] if number and jobs[number - 1].answer == job.answer else None
            is_late = last is not None and (last.get("error") == NOT_RUN or LATE in last.get("error", ""))
            observed.append({"error": NOT_RUN} if is_late and job.most else _observe_function(job, rank))
            continue
        stopped = f"answer {job.answer} stopped"
        if rank == 0:  # one decides for all
            meeting.store.set("decided", str(int(store.check([stopped]))))
        if meeting.store.get("decided") == b"1":
            observed.append({"error": NOT_RUN})
            continue
        observed.append(_observe_case(job, meeting, functools.partial(store.set, stopped, "")))
    return observed


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a case wait for each other, whatever the learner's function does with their process group."""

    store: dist.Store
    rank: int
    world_size: int

    def arrive(self, place: str) -> None:
        """Say that this rank has reached ``place``."""
        self.store.set(f"{place} {self.rank}", "")

    def meet(self, place: str) -> None:
        """Say so, and wait until all ranks have reached ``place``."""
        self.arrive(place)
        # Whoever waits in vain is ended with the launch.
        self.store.wait([f"{place} {rank}" for rank in range(self.world_size)], datetime.timedelta(days=1))


def _observe_case(job: CheckJob, meeting: Meeting, stop: Callable[[], None]) -> Observation:
    """One rank's part in a case, in a process group of the case's ranks.

    A rank whose function has returned stays until the others' have: its connections are theirs. One that failed leaves
    at once, so that nobody waits for it; one that waited in vain says `stop`.
    """
    page = _pages[meeting.rank] if meeting.rank < len(_pages) else RankState()
    dist.init_process_group("gloo", store=meeting.store, rank=meeting.rank, world_size=meeting.world_size,
                            timeout=datetime.timedelta(seconds=on_the_wall(job.seconds)))
    meeting.meet("connected")
    try:
        seen = _observe_function(job, meeting.rank, page)
        if "error" in seen and hang_report.WAITED.search(seen["error"]):
            stop()
        if "error" in seen:
            meeting.arrive("end")
        else:
            meeting.meet("end")
    finally:
        with contextlib.suppress(RuntimeError):  # a peer that failed has closed the group's connections
            dist.destroy_process_group()
    return seen


@contextlib.contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    """Interrupt what takes longer, such as a loop without an end; in the process's main thread."""
    if seconds is None:
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(LATE)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, on_the_wall(seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _observe_function(job: CheckJob, rank: int, page: RankState | None = None) -> Observation:
    """What is observed of the function; what it raises is an error text."""
    try:
        with hang_report.recorded(page) if page else contextlib.nullcontext(), _limited(job.most):
            return job.task.observe(job.function, job.case, rank)
    except Exception as error:  # whatever the learner's code raises is what was observed
        return {"error": own_code.told(error, own_code.file_of(job.function)), "at": time.monotonic()}
