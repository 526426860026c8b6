"""Lesson 12: two minutes' notice, on ranks of which one alone hears it."""

import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.errors import EXIT_RESUME
from course_lib.grading.rules import Seen, items, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit

NOTICE_SECONDS = 120
"""Between a spot machine's signal and its end."""


def notice_cases(rng: random.Random, worlds: Sequence[int] = (1, 2, 3)) -> list[Case]:
    """The last rank alone hears a signal, first in a save, else in a step, and perhaps again; once there is none."""
    cases = []
    for place, world in enumerate((*worlds, worlds[-1])):
        first, every = rng.randrange(50), rng.randrange(3, 5)
        last = first + 2 * every + rng.randrange(1, 3)
        in_a_save = place % 3 == 0
        at = rng.choice([step for step in range(first, last - 2) if ((step + 1) % every == 0) is in_a_save])
        inputs = {
            "first": first,
            "last": last,
            "every": every,
            "at": None if place == len(worlds) else at,
            "in_a_save": in_a_save,
            "twice": place % 2 == 1,
            "step_seconds": rng.randrange(45, 51),
            "save_seconds": rng.randrange(40, 46),
        }
        cases.append(Case(world, inputs))
    return cases


def observe_notice(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Events of a rank, in order. A signal that the function does not take is noted as the rank's end, and is not."""
    given, log = case.inputs, []
    hears = rank == case.world_size - 1

    def step(number: int) -> None:
        log.append(f"step {plain(number)}")
        if hears and number == given["at"] and not given["in_a_save"]:
            ask()

    def save(number: int) -> None:
        log.append(f"save {plain(number)}")
        if hears and ((number - 1 == given["at"] and given["in_a_save"]) or (given["twice"] and "signal" in log)):
            ask()

    def ask() -> None:
        log.append("signal")
        signal.raise_signal(signal.SIGTERM)

    def ended(number: int, frame: Any) -> None:
        log.append("killed")

    before = signal.signal(signal.SIGTERM, ended)
    try:
        code = function(step, save, given["first"], given["last"], given["every"])
    except SystemExit as leaving:
        code = leaving.code
    finally:
        mine = signal.signal(signal.SIGTERM, before)
    return {"log": log, "code": plain(code), "handler": mine is ended}


def stop_due(case: Case) -> int:
    """The number of steps that are due at the end."""
    return case.inputs["last"] if case.inputs["at"] is None else case.inputs["at"] + 1


def log_of(case: Case, seen: Seen, rank: int) -> list[str]:
    """The log of what a rank did.

    Raises:
        Malformed: it has not come to the signal.
    """
    log = items(seen, rank, "log", str)
    first, world = case.inputs["first"], case.world_size
    if f"step {first}" not in log or (case.inputs["at"] is not None and rank == world - 1 and "signal" not in log):
        raise Malformed(Miss(f"steps from {first} on", short(", ".join(log) or "nothing done"), rank))
    return log


def on_each_rank(word: str, due: Callable[[Case], list[int]]) -> Rule:
    """A rule: the numbers noted with a word are those due, on each rank, and nobody was ended."""

    @kit.each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        right, log = [f"{word} {number}" for number in due(case)], log_of(case, seen, rank)
        fits = [entry for entry in log if entry.startswith((word, "killed"))] == right
        return kit.unless(fits, f"{right[0]} ... {right[-1]}", kit.listed(log[-6:], ""))

    return rule


def steps_due(case: Case) -> list[int]:
    return list(range(case.inputs["first"], stop_due(case)))


def saves_due(case: Case) -> list[int]:
    stop, every = stop_due(case), case.inputs["every"]
    return [step for step in range(case.inputs["first"] + 1, stop + 1) if step % every == 0 or step == stop]


def in_time(case: Case, seen: Seen) -> Miss | None:
    log = log_of(case, seen, case.world_size - 1)
    if case.inputs["at"] is None:
        return None
    begun = log[max(0, log.index("signal") - 1) :]  # with what it was at
    seconds = sum(
        case.inputs[f"{word}_seconds"] for word in ("step", "save") for entry in begun if entry.startswith(word)
    )
    fits, shown = seconds <= NOTICE_SECONDS, f"{seconds} s: {kit.listed(begun, '')}"
    return kit.unless(fits, f"an end within {NOTICE_SECONDS} s of the signal", shown)


@kit.each_rank
def code_is(case: Case, seen: Seen, rank: int) -> Miss | None:
    log_of(case, seen, rank)
    right, code = 0 if case.inputs["at"] is None else EXIT_RESUME, seen[rank].get("code")
    return kit.unless(type(code) is int and code == right, f"exit code {right}", short(code))


@kit.each_rank
def handler_is_back(case: Case, seen: Seen, rank: int) -> Miss | None:
    log_of(case, seen, rank)
    return kit.unless(seen[rank].get("handler") is True, "SIGTERM's handler as it was before", "another")


INTERRUPTION = Task(
    **kit.about("cloud.interruption"),
    draw=notice_cases,
    observe=observe_notice,
    essential=("steps", "checkpoints"),
    properties={
        "steps": Property(2, on_each_rank("step", steps_due)),
        "checkpoints": Property(2, on_each_rank("save", saves_due)),
        "in time": Property(1, in_time),
        "exit code": Property(1, code_is),
        "handler": Property(1, handler_is_back),
    },
)
