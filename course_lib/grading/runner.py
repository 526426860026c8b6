"""Grading one answer: cases drawn here, observations made in the sandbox, and every judgement made here."""

import json
import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from course_lib.grading import supervisor, trusted_peer, verdict, wire_check
from course_lib.grading.sandbox import Ended, Limits, Sandbox, SandboxError
from course_lib.grading.serialize import NotPlain, pack, unpack
from course_lib.grading.task import Case, Finding, Task
from course_lib.grading.verdict import Verdict, scores_of

MAX_SOURCE = 256 << 10  # characters, those beyond ASCII escaped
BROKEN = {
    "timeout": verdict.TIMEOUT,
    "memory": verdict.MEMORY,
    "processes": verdict.PROCESSES,
    "output": verdict.OUTPUT,
}


class Stopped(Exception):
    """The grader was stopped before there was a verdict."""


def grade_source(
    task: Task,
    source: str | None,
    *,
    hidden: Sequence[Case] | None,
    limits: Limits,
    sandbox: Sandbox,
    stop: threading.Event | None = None,
) -> Verdict:
    """Grade the text of one answer.

    The public cases come first and the hidden ones after them, in one sandbox; grading ends with the first case in
    which a rank gives no observation. Whatever the answer does lowers its own points at most.

    Args:
        task: that is answered.
        source: Python text that defines the task's function; None where there is no answer.
        hidden: cases that the learner does not know; None grades by the public ones alone.
        limits: on all cases together.
        sandbox: where the answer runs.
        stop: set by another thread, ends the sandbox.
    Raises:
        Stopped: it was.
        SandboxError: the sandbox could not be started, which says nothing about the answer.
    """
    begin = time.monotonic()
    if source is None or not source.strip():
        return _without(task, verdict.NO_ANSWER)
    if len(json.dumps(source)) > MAX_SOURCE or "\0" in source:
        return _without(task, "not a text of Python, or a very long one")
    public = task.cases(random.Random(0))
    meeting = trusted_peer.meeting(task) if task.met and sandbox.isolated else None
    cases = [*public, *(hidden or ()), *([meeting.case] if meeting else [])]
    ended = _run(task, source, cases, meeting, limits, sandbox, stop or threading.Event())
    seen, wires = _records(ended.output, cases)
    error = None
    shown: list[Finding] = []
    unseen: list[Finding] = []
    for number, case in enumerate(cases):
        open_case = number < len(public)
        met = meeting if meeting and case is meeting.case else None
        left = _left(seen, number) if met else None
        if left is not None:
            unseen.extend(trusted_peer.parted(task, left))
            break
        observations, problem = _observations(seen, number, case)
        if observations is None:
            problem = BROKEN.get(ended.why, problem) if problem == verdict.CRASHED else problem
            error = problem if open_case or problem in BROKEN.values() else verdict.HIDDEN_ERROR
            break
        findings = _judged(task, case, observations, met)
        if case.world_size > 1 and sandbox.isolated:
            findings += wire_check.not_on_the_wire(list(task.points), observations, wires.get(number, 0))
        (shown if open_case else unseen).extend(findings)
    if hidden is None:
        shown, unseen = [*shown, *unseen], []
    return Verdict(
        task.name,
        scores_of(task, shown, None if hidden is None else unseen, error),
        error,
        round(time.monotonic() - begin, 3),
    )


def _without(task: Task, error: str) -> Verdict:
    return Verdict(task.name, scores_of(task, [], None, error), error, 0.0)


def _run(
    task: Task,
    source: str,
    cases: Sequence[Case],
    meeting: trusted_peer.PeerMeeting | None,
    limits: Limits,
    sandbox: Sandbox,
    stop: threading.Event,
) -> Ended:
    job = {
        "module": sandbox.tasks or task.observe.__module__,
        "task": task.name,
        "source": source,
        "limits": asdict(limits),
        "world_sizes": [case.world_size for case in cases],
        "own": list(task.own),
        "met": len(cases) - 1 if meeting else None,
    }
    parts = [job, *(case.inputs for case in cases), *([{"number": meeting.number}] if meeting else [])]
    with tempfile.TemporaryFile() as file:
        for part in map(pack, parts):
            file.write(supervisor.LENGTH.pack(len(part)) + part)
        file.flush()
        file.seek(0)
        ended = sandbox.run(file, limits, supervisor.STARTED, stop)
    if ended.why == "stopped":
        raise Stopped
    if not ended.output.startswith(supervisor.STARTED):
        said = (ended.complaint.strip() or "it said nothing").splitlines()[-1]
        raise SandboxError(
            f"the sandbox ended before the answer began: {said}",
            "see that the course is installed where grading runs, and that memory is left",
        )
    return ended


def _records(output: bytes, cases: Sequence[Case]) -> tuple[dict[tuple[int, int], bytes], dict[int, int]]:
    """What each rank observed in each case, still packed, and what the kernel counted in it."""
    seen: dict[tuple[int, int], bytes] = {}
    at = len(supervisor.STARTED)
    while len(output) - at >= supervisor.RECORD.size:
        number, rank, length = supervisor.RECORD.unpack_from(output, at)
        at += supervisor.RECORD.size
        if number >= len(cases) or not supervisor.WIRE <= rank < cases[number].world_size or at + length > len(output):
            break
        seen[number, rank] = output[at : at + length]
        at += length
    wires = {number: unpack(seen.pop((number, rank))) for number, rank in list(seen) if rank == supervisor.WIRE}
    return seen, wires


def _observations(
    seen: Mapping[tuple[int, int], bytes], number: int, case: Case
) -> tuple[list[dict[str, Any]] | None, str]:
    """The observations of every rank, or why there are none: what the first rank to fail said."""
    observed: dict[int, dict[str, Any]] = {}
    for rank in [rank for of, rank in seen if of == number]:
        data = seen[number, rank]
        if not data:
            continue
        try:
            value = unpack(data)
        except NotPlain:
            return None, "reported something that is no observation"
        if not isinstance(value, dict):
            return None, "reported something that is no observation"
        if "error" in value:
            where = f"rank {rank} " if case.world_size > 1 else ""
            return None, verdict.printable(f"{where}{value['error']}")
        observed[rank] = value
    if len(observed) < case.world_size:
        return None, verdict.CRASHED
    return [observed[rank] for rank in range(case.world_size)], ""


def _left(seen: Mapping[tuple[int, int], bytes], number: int) -> str | None:
    """What our own rank of a case could not join, if it left for that."""
    data = seen.get((number, trusted_peer.RANK))
    return unpack(data).get("left") if data else None


def _judged(
    task: Task, case: Case, observations: list[dict[str, Any]], met: trusted_peer.PeerMeeting | None = None
) -> list[Finding]:
    """The judge's findings. One that cannot read hostile observations has not seen the property hold."""
    try:
        if met:
            return trusted_peer.judge(task, met, observations)
        return task.judge(case, observations)
    except Exception as error:
        said = f"observations that the check cannot read ({type(error).__name__})"
        return [Finding(name, False, None, "a result of the expected form", said) for name in task.points]
