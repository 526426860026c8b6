"""Lesson 07: tables of actions, what they hold and how long they wait; no ranks, no torch."""

import random
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from course_lib.errors import ConfigError
from course_lib.grading.rules import Seen, items, number, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, in_turn
from course_lib.modeling.dealing import deal_out
from course_lib.parallel.pipeline.actions import Action, Schedule, loop
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check, in_flight

COSTS = Costs()
"""F, I and W of one unit each, messages of none."""


def table(case: Case, seen: Seen) -> Schedule:
    """The table that a learner's rows make.

    Raises:
        Malformed: rows that are none, or a table that cannot run.
    """
    rows = items(seen, 0, "rows", list)
    ranks, per_rank = case.inputs["ranks"], case.inputs.get("stages_per_rank", 1)
    if len(rows) != ranks:
        raise Malformed(Miss(f"{ranks} rows", f"{len(rows)}"))
    try:
        actions = tuple(tuple(Action.parse(str(text)[:40]) for text in row[:10_000]) for row in rows)
        made = Schedule("yours", loop(ranks, per_rank), case.inputs["microbatches"], actions)
        check(made)
    except ConfigError as error:
        raise Malformed(Miss("a table that can run", short(error.what), note=written(rows))) from None
    return made


DRAWN = 96
"""Characters of a drawn row."""


def written(rows: list[list[Any]]) -> str:
    """Rows that cannot run, as they are."""
    return "\n".join(
        [
            "your rows:",
            *(f"rank {rank}  {' '.join(map(str, row[:64]))}"[: DRAWN + 8] for rank, row in enumerate(rows[:16])),
        ]
    )


def drawn(schedule: Schedule) -> str:
    """Drawing of a table, a row for each rank: ``F0F1B0····``."""
    timeline = simulate(schedule, COSTS)
    width = max(1, min(4, DRAWN // int(timeline.makespan)))
    rows = []
    for rank, spans in enumerate(timeline.rows):
        row = ""
        for span in spans:
            room = width * int(span.end - span.start)
            text = str(span.action)
            labels = (text, text.lstrip("0123456789"), str(span.action.microbatch))
            label = next((candidate for candidate in labels if len(candidate) < room), labels[-1][-room:])
            row += "·" * (width * int(span.start) - len(row)) + label.ljust(room, "-" if room > width else " ")
        rows.append(f"rank {rank} |{row.ljust(width * int(timeline.makespan), '·')}|")
    return "\n".join(["your table, · is waiting:", *rows])


def waits_no_longer(name: str) -> Rule:
    """The bubble is at most that of the course's own table of this name."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        schedule = table(case, seen)
        own, bubble = (simulate(one, COSTS).bubble for one in (reference(name, case), schedule))
        return kit.unless(bubble <= own, f"a bubble of {own}", f"{bubble}", drawn(schedule))

    return rule


def holds_no_more(name: str) -> Rule:
    """No rank holds more micro-batches than in the course's own table."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        schedule = table(case, seen)
        both = zip(in_flight(reference(name, case)), in_flight(schedule), strict=True)
        for rank, (own, peak) in enumerate(both):
            if peak > own:
                said = f"at most {own} micro-batches in flight in row {rank}"
                return Miss(said, f"{peak}", note=drawn(schedule))
        return None

    return rule


def reference(name: str, case: Case) -> Schedule:
    return make(name, case.inputs["ranks"], case.inputs["microbatches"], case.inputs.get("stages_per_rank", 1))


def pipeline_case(rng: random.Random) -> dict:
    ranks = rng.randrange(2, 6)
    return {"ranks": ranks, "microbatches": max(1, ranks + rng.randrange(-3, 6))}


def interleaved_case(rng: random.Random) -> dict:
    ranks = rng.randrange(2, 5)
    return {"ranks": ranks, "microbatches": ranks * rng.randrange(1, 4), "stages_per_rank": rng.randrange(2, 4)}


def observe_rows(function: Callable[..., Any], case: Case, rank: int) -> dict:
    return {"rows": [plain(function(row, **case.inputs)) for row in range(case.inputs["ranks"])]}


def schedule_task(name: str, kind: str, inputs: Callable[[random.Random], dict], essential: str) -> Task:
    """A task that asks for one rank's row of a table, judged by what the whole table does."""
    return Task(
        **kit.about(name),
        draw=alone(inputs),
        observe=observe_rows,
        essential=("runs", essential),
        properties={
            "runs": Property(2, kit.reads(table)),
            "bubble": Property(2, waits_no_longer(kind)),
            "in flight": Property(2, holds_no_more(kind)),
        },
    )


ONE_F_ONE_B = schedule_task("pipeline.1f1b", "1f1b", pipeline_case, essential="in flight")
INTERLEAVED = schedule_task("pipeline.interleaved", "interleaved", interleaved_case, essential="bubble")
ZERO_BUBBLE = schedule_task("pipeline.zero_bubble", "zb_h1", pipeline_case, essential="bubble")


# --- pipeline.balance ---


def balance_case(rng: random.Random, place: int) -> dict:
    """Dear blocks at both ends, dear first blocks, one stage, as many stages as blocks; else anything."""
    stages = 1 if place == 3 else rng.randrange(2, 5) if place != 2 else rng.randrange(3, 5)
    costs = [rng.choice((1, 1, 1, 2, 3, 5, 8)) for _ in range(stages if place == 4 else rng.randrange(5, 12))]
    if place == 1:
        costs[0] = costs[-1] = 40
    if place == 2:
        costs[0] = costs[1] = 40
    return {"costs": costs, "stages": stages}


def observe_split(function: Callable[..., Any], case: Case, rank: int) -> dict:
    return {"first_units": plain(function(list(case.inputs["costs"]), case.inputs["stages"]))}


def stage_costs(case: Case, seen: Seen) -> list[int]:
    cuts, units = items(seen, 0, "first_units", int), len(case.inputs["costs"])
    if (
        len(cuts) != case.inputs["stages"] - 1
        or sorted(set(cuts)) != cuts
        or (cuts and not (0 < cuts[0] <= cuts[-1] < units))
    ):
        raise Malformed(Miss(f"{case.inputs['stages'] - 1} rising places from 1 to {units - 1}", short(cuts)))
    ends = [0, *cuts, units]
    return [sum(case.inputs["costs"][a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def dearest_is_cheapest(case: Case, seen: Seen) -> Miss | None:
    ends = [0, *deal_out(case.inputs["costs"], case.inputs["stages"]), len(case.inputs["costs"])]
    best = max(sum(case.inputs["costs"][a:b]) for a, b in zip(ends, ends[1:], strict=False))
    dearest = max(stage_costs(case, seen))
    return kit.unless(dearest == best, f"a dearest stage of {best}", f"{dearest} for {case.inputs['costs']}")


BALANCE = Task(
    **kit.about("pipeline.balance"),
    draw=in_turn(balance_case, 8),
    observe=observe_split,
    essential=("dearest stage",),
    properties={
        "contiguous stages": Property(1, kit.reads(stage_costs)),
        "dearest stage": Property(3, dearest_is_cheapest),
    },
)


# --- pipeline.bubble ---


def bubble_case(rng: random.Random) -> dict:
    ranks = rng.randrange(2, 9)
    return {"ranks": ranks, "microbatches": ranks * rng.randrange(1, 6), "stages_per_rank": rng.randrange(1, 4)}


def observe_bubble(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {
        "plain": plain(function(given["ranks"], given["microbatches"])),
        "interleaved": plain(function(given["ranks"], given["microbatches"], given["stages_per_rank"])),
    }


def bubble_is(key: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        lap = case.inputs["stages_per_rank"] if key == "interleaved" else 1
        others = case.inputs["ranks"] - 1
        right = Fraction(others, lap * case.inputs["microbatches"] + others)
        share = number(seen, 0, key)
        return kit.unless(abs(share - right) < 1e-9, f"{right} of the step", f"{share:.6g} for {case.inputs}")

    return rule


BUBBLE = Task(
    **kit.about("pipeline.bubble"),
    draw=alone(bubble_case),
    observe=observe_bubble,
    properties={"1F1B": Property(1, bubble_is("plain")), "interleaved": Property(1, bubble_is("interleaved"))},
)
