"""``check("ddp.bucketing", function)`` in a notebook: what a learner's function does, property by property.

All cases run in one launch: for each, the ranks that it needs make a process group of just themselves.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib import learner_files
from course_lib.errors import ConfigError, DataError, nearest
from course_lib.grading import hang_report, own_code
from course_lib.grading.on_rank import (
    NOT_RUN,
    RECORDS,
    SECONDS_OF_CPU,
    SECONDS_PER_CASE,
    CheckJob,
    observe_on_rank,
    share_pages,
)
from course_lib.grading.report import Report, of_case
from course_lib.grading.task import Case, Finding, Observation, Task
from course_lib.grading.tasks import TASKS
from course_lib.grading.time_limits import LOOPS
from course_lib.launching.launch import RankError, RanksHung, launch


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


def case(name: str, number: int) -> dict[str, Any]:
    """Inputs of a check's case, as the learner's functions get them: a copy to call them with.

    Raises:
        ConfigError: no such exercise.
    """
    return task_of(name).cases(random.Random(0))[number - 1].inputs


def result(report: Report) -> dict[str, Any]:
    """A report's points as they are kept: those earned, of how many, and when."""
    return {"points": report.points, "of": sum(report.task.points.values()), "when": learner_files.now()}


def keep(report: Report, file: learner_files.LearnerFile) -> None:
    """Save a report's points in place of the exercise's earlier ones; on failure print one line."""
    try:
        if said := file.change(lambda content: content.__setitem__(report.task.name, result(report))):
            print(said)
    except DataError as error:
        print(error)


def examine(task: Task, function: Callable[..., Any], cases: Sequence[Case]) -> Report:
    """Run a function on cases, and judge what was observed. A function that hangs or ends its process fails."""
    jobs = [CheckJob(task, function, case, 0, SECONDS_PER_CASE, SECONDS_OF_CPU) for case in cases]
    file = own_code.file_of(function)
    whole = cases[:1] if len(cases) == 1 else ()  # what has hung or died is not known by case
    try:
        observed = observe(jobs, stream=True)
    except RanksHung as hung:
        own = {rank: line for rank, stack in hung.stacks.items() if (line := own_code.last_line(stack, file))}
        inside = own or dict.fromkeys(hung.stacks, "the function")
        late = [
            {"error": f"still in {inside[rank]} when the time was over"} if rank in inside else {}
            for rank in range(max(inside) + 1)
        ]
        return Report(task, tuple(_unplaced(task, finding, whole) for finding in task.judge(cases[0], late)))
    except RankError as error:
        said = str(error).splitlines()[0]
        dead = re.search(r"rank (\d+)", said)
        why = hang_report.explain(RECORDS, file, int(dead[1]) if dead else None) if task.needs_ranks else ""
        seen: list[Observation] = [{"error": f"{said}: {why}" if why else said}]
        return Report(task, tuple(_unplaced(task, finding, whole) for finding in task.judge(cases[0], seen)))
    findings: list[Finding] = []
    for number, (job, seen) in enumerate(zip(jobs, observed, strict=True), 1):
        if any(one.get("error") == NOT_RUN for one in seen):
            continue
        is_hang = task.needs_ranks and job.case.world_size > 1 and _waited_in_vain(seen)
        if is_hang and (why := hang_report.explain(RECORDS[: job.case.world_size], file)):
            seen = [{"error": f"a hang: {_placed(why, seen)}"}] * job.case.world_size
        findings += of_case(task, job.case, seen, f"case {number} of {len(jobs)}")
    return Report(task, tuple(findings))


def _placed(why: str, seen: Sequence[Observation]) -> str:
    """Who waits for whom; of a rank that was in no collective also the line that its own error names."""

    def line(rank: str) -> str:
        return "".join(re.findall(r" \(in line .*\)$", str(seen[int(rank)].get("error", ""))))

    return re.sub(r"rank (\d+) is not in a collective", lambda match: match[0] + line(match[1]), why)


def _unplaced(task: Task, finding: Finding, cases: Sequence[Case]) -> Finding:
    """A finding of a launch as a whole: of one case only where there was but one."""
    return finding if cases else replace(finding, case="")


def _waited_in_vain(seen: Sequence[Observation]) -> bool:
    """Whether the first rank that failed in a case did so because it waited for another too long."""
    errors = [one for one in seen if "error" in one]
    first = min(errors, key=lambda one: one.get("at", 0.0), default=None)
    return first is not None and LOOPS not in first["error"] and hang_report.WAITED.search(first["error"]) is not None


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
            share_pages(ranks)
        per_rank = launch(
            observe_on_rank,
            [jobs[i] for i in chosen],
            num_processes=ranks,
            device="cpu",
            stream=stream,
            timeout=_seconds(len(chosen)),
        )
        for place, i in enumerate(chosen):
            observed[i] = [per_rank[rank][place] for rank in range(jobs[i].case.world_size)]
    return observed


def _seconds(jobs: int) -> float:
    """Until ranks are ended that nothing else has ended: far longer than all the limits of what they do."""
    return 120.0 + SECONDS_OF_CPU * jobs
