"""Faults of lesson 10: fifteen of them on real ranks, each rank's message, and the tool that names the culprit.

A scenario runs in three ways: broken, as it would in a training that nobody watches; inspected, with the tool that
names the culprit; and fixed. Each takes a second or so.
"""

import contextlib
import functools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
import torch.distributed as dist

from course_lib.errors import CourseError
from course_lib.hangs.watchdog import read_reports
from course_lib.launching.launch import RankError, RanksHung, launch
from course_lib.lessons.faults import numerical_faults as numbers
from course_lib.lessons.faults import scenarios as stops
from course_lib.lessons.faults.scenarios import CULPRIT, PATIENCE
from course_lib.lessons.faults.tools import (
    BARRIER,
    DETAIL,
    FIRST_CAUSE,
    GUARD,
    MISSING_KEY,
    OWN_CHECK,
    TIMES,
    WATCHDOG,
    FaultOutcome,
    Tool,
)
from course_lib.writing import write_text

How = Literal["broken", "inspected", "fixed"]
OnRank = Callable[[Path], Any]
"""Runs on every rank, with the run's folder; returns what JSON can hold."""


@dataclass(frozen=True)
class Scenario:
    """A fault.

    Attributes:
        name: in a few words.
        sign: what you notice first: an ``error``, a ``hang``, something ``slow``, or ``nothing``.
        expected: what one would expect to see.
        looks: what it looks like, on three ranks.
        tool: what names the culprit.
        cure: what to do about it.
        broken: the fault.
        fixed: the same, cured.
        inspected: the fault with a check built in, where the tool is such a check.
        culprits: the ranks at fault.
        joined: whether the ranks are in a group when the function begins.
        restarts: how often the cured run is started again.
        limit: seconds until the launcher ends a broken run that nobody else ends.
    """

    name: str
    sign: Literal["error", "hang", "slow", "nothing"]
    expected: str
    looks: str
    tool: Tool
    cure: str
    broken: OnRank
    fixed: OnRank
    inspected: OnRank | None = None
    culprits: frozenset[int] = frozenset({CULPRIT})
    joined: bool = True
    restarts: int = 0
    limit: float = 30.0

    @property
    def tool_reads_broken(self) -> bool:
        """Whether the tool needs no run of its own: a broken run leaves all that it reads."""
        return self.inspected is None and self.tool.is_reader


@dataclass(frozen=True)
class Trial:
    """A scenario, broken, inspected and fixed, and the ranks that the tool named."""

    broken: FaultOutcome
    inspected: FaultOutcome
    fixed: FaultOutcome
    named: set[int]


# --- scenarios --------------------------------------------------------------------------------------------------------

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "mismatched collectives",
            "hang",
            "an error that names the two calls",
            "all ranks raise an error, each in its own call",
            DETAIL,
            "every rank issues the same collectives in the same order; no collective under `if rank`",
            stops.mismatched_collectives,
            stops.matching_collectives,
        ),
        Scenario(
            "skipped step",
            "hang",
            "an error on the rank that skipped it",
            "the others time out; the culprit returns, with sums of different steps",
            WATCHDOG,
            "take part with a gradient of zeros",
            stops.skipped_step,
            stops.step_with_nothing_to_add,
        ),
        Scenario(
            "different shapes",
            "hang",
            "an error on both sides, with the shapes",
            "an abort, a time-out, or wrong sums, as it happens",
            DETAIL,
            "agree on the longest length first, and pad",
            stops.different_shapes,
            stops.padded_to_the_longest,
        ),
        Scenario(
            "different dtypes",
            "nothing",
            "an error, or a conversion",
            "all ranks return, with bits that were added as if they were numbers",
            DETAIL,
            "convert before you send",
            stops.different_dtypes,
            stops.one_dtype,
        ),
        Scenario(
            "shorter data loader",
            "hang",
            "the epoch ends with the shortest",
            "the others time out in their last step; the culprit has finished",
            BARRIER,
            "agree on the smallest number of batches, or deal out equal numbers",
            stops.shorter_loader,
            stops.as_many_as_the_shortest,
            stops.barrier_before_each_step,
        ),
        Scenario(
            "dead rank",
            "error",
            "an error that names the rank",
            "the others: connection closed or reset by an address, if they get to say anything",
            FIRST_CAUSE,
            "restart from the last whole checkpoint",
            stops.dead_rank,
            stops.restarted_from_the_last_step,
            restarts=1,
        ),
        Scenario(
            "stopped rank",
            "hang",
            "what a dead rank looks like",
            "the others time out; the culprit's process is there",
            WATCHDOG,
            "wake it, or end it and restart",
            stops.stopped_rank,
            stops.stopped_rank_is_woken,
        ),
        Scenario(
            "wrong port",
            "hang",
            "connection refused, at once",
            "the others time out waiting for a key; the culprit tries another address, or times out there",
            MISSING_KEY,
            "one MASTER_PORT for all, from the launcher",
            stops.wrong_port,
            stops.one_place_to_meet,
            joined=False,
        ),
        Scenario(
            "wrong address",
            "hang",
            "no route to host, at once",
            "the others time out waiting for a key; the culprit tries another address, or times out there",
            MISSING_KEY,
            "one MASTER_ADDR for all, that every machine can reach",
            stops.wrong_address,
            stops.one_place_to_meet,
            joined=False,
        ),
        Scenario(
            "deadlocked pipeline",
            "hang",
            "a time-out, as of any collective",
            "nobody says anything, ever: a send over gloo has no time-out",
            WATCHDOG,
            "send and receive together, with batch_isend_irecv",
            stops.deadlocked_pipeline,
            stops.sends_and_receives_at_once,
            culprits=frozenset({0, CULPRIT}),
            limit=5.0,
        ),
        Scenario(
            "straggler",
            "slow",
            "one rank's steps are slower",
            "every rank's steps are equally slow",
            TIMES,
            "deal out the work by its length",
            numbers.straggler,
            numbers.long_texts_dealt_out,
        ),
        Scenario(
            "NaN on one rank",
            "nothing",
            "NaN on that rank",
            "the loss is NaN on all ranks from the same step on",
            OWN_CHECK,
            "leave the step out, on all ranks together, and mend the data",
            numbers.nan_on_one_rank,
            numbers.step_left_out_by_all,
            numbers.nan_is_looked_for,
        ),
        Scenario(
            "diverging parameters",
            "nothing",
            "a loss that does not fall",
            "the loss falls, and the ranks train different models",
            GUARD,
            "send rank 0's parameters to all at the start",
            numbers.diverging_parameters,
            numbers.start_from_rank_0,
            numbers.diverging_is_looked_for,
        ),
        Scenario(
            "out of memory",
            "error",
            "an error on that rank, and the others go on",
            "the culprit cannot allocate; the others wait for it",
            FIRST_CAUSE,
            "compute a long batch in micro-batches",
            numbers.out_of_memory,
            numbers.micro_batches,
        ),
        Scenario(
            "full disk",
            "error",
            "a line that says so",
            "rank 0 fails in a way that does not mention the disk; the others wait",
            FIRST_CAUSE,
            "write beside and rename, and tell all ranks how it went",
            numbers.full_disk,
            numbers.failure_is_told_to_all,
            culprits=frozenset({0}),
        ),
    )
}


# --- running them -----------------------------------------------------------------------------------------------------


def trial(scenario: Scenario, world_size: int = 3, device: str = "cpu") -> Trial:
    """Run a scenario in all three ways."""
    broken = run(scenario, world_size, device=device)
    inspected = broken if scenario.tool_reads_broken else run(scenario, world_size, "inspected", device=device)
    fixed = run(scenario, world_size, "fixed", device=device)
    return Trial(broken, inspected, fixed, scenario.tool.named(inspected))


def run(
    scenario: Scenario, world_size: int = 3, how: How = "broken", tool: Tool | None = None, device: str = "cpu"
) -> FaultOutcome:
    """Run a scenario on real ranks.

    Args:
        scenario: one of SCENARIOS.
        world_size: at least 2. Of two ranks each is the other's only suspect, so three teach more.
        how: ``inspected`` with a tool, ``fixed`` with the scenario's cure.
        tool: to inspect with; the scenario's own by default.
        device: ``cpu``: over gloo; ``cuda``: over NCCL, a GPU for each rank. There no collective times out, so a broken
            run that hangs lasts until the launcher ends it.
    """
    tool = (tool or scenario.tool) if how == "inspected" else None
    own_check = scenario.inspected if tool is scenario.tool else None
    function = scenario.fixed if how == "fixed" else own_check or scenario.broken
    impatient = (scenario.sign == "hang" and how == "broken") or bool(tool and tool.until_timeout)
    limit = scenario.limit if how == "broken" else 30.0
    restarts = scenario.restarts if how == "fixed" else 0
    starts, started = 1, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_rank = functools.partial(_on_rank, function, folder, scenario.joined, impatient, tool, device)

        def launched() -> Exception | None:
            try:
                launch(on_rank, num_processes=world_size, timeout=limit, device=device, stream=False)
            except (RankError, RanksHung, CourseError) as error:
                return error
            return None

        while error := launched():
            if starts > restarts:
                break
            starts += 1
            for told in folder.glob("rank*.json"):
                told.unlink()
        last = [_read(folder / f"rank{rank}.json") for rank in range(world_size)]
        reports = tuple(read_reports(folder))
        records = tuple(_read(folder / f"records{rank}.json").get("entries", []) for rank in range(world_size))
    raised_at = {rank: notes["at"] for rank, notes in enumerate(last) if "raised" in notes}
    said = tuple(_said(rank, notes, error) for rank, notes in enumerate(last))
    values = tuple(notes.get("value") for notes in last)
    reporters = tuple(sorted(raised_at, key=raised_at.__getitem__))
    return FaultOutcome(said, values, reporters, error, reports, records, starts, time.monotonic() - started)


def _on_rank(function: OnRank, folder: Path, joined: bool, impatient: bool, tool: Tool | None, device: str) -> None:
    """Join, run the function, and leave word of how it ended."""
    told: dict[str, Any] = {}
    try:
        if tool and tool.join:
            tool.join()
        torch.set_default_device(device)
        if joined:
            dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
        if impatient and joined and device == "cpu":  # by default a collective over gloo waits for half an hour
            dist.distributed_c10d._set_pg_timeout(PATIENCE, dist.group.WORLD)
        with tool.around(folder) if tool and tool.around else contextlib.nullcontext():
            told["value"] = function(folder)
    except Exception as error:
        told["raised"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        told["at"] = time.monotonic()
        write_text(folder / f"rank{os.environ['RANK']}.json", json.dumps(told))


def _read(path: Path) -> dict[str, Any]:
    """What a rank left in a file; nothing where it had nothing to leave, or was ended before the file stood there."""
    return (json.loads(path.read_text()) if path.exists() else None) or {}


def _said(rank: int, told: dict[str, Any], error: Exception | None) -> str:
    if "raised" in told:
        return f"raised {_without_build_paths(told['raised'])}"
    if "value" in told:
        return f"returned {told['value']}"
    if isinstance(error, RankError) and error.rank == rank:
        return error.failure.summary
    if isinstance(error, RankError) and rank in error.consequences:
        return error.consequences[rank]
    stack = error.stacks.get(rank, "") if isinstance(error, RanksHung) else ""
    calls = [
        call for call in re.findall(r'File "([^"]+)", line (\d+) in (\w+)', stack) if call[2] != "wrapper"
    ]  # torch's, around each collective
    for (_, _, name), (file, line, caller) in zip(calls, calls[1:], strict=False):
        if caller in _FUNCTIONS:
            return f"was still in `{name}`, called at {Path(file).name}:{line}"
    return "was still waiting"


_FUNCTIONS = {
    function.__code__.co_name
    for module in (stops, numbers)
    for function in vars(module).values()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__
}
"""Names of the scenarios' own functions: all that a stack tells of a function in a process that has ended."""


def _without_build_paths(text: str) -> str:
    """Less the place in gloo's source that it begins with."""
    return re.sub(r"\[(enforce fail at )?/\S+?([^/]+:\d+)\]", r"[\2]", text)
