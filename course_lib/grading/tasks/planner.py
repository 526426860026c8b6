"""Lesson 09, to build: a planner that cuts uneven layers into stages and picks what fits on every rank."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from course_lib.grading.rules import Seen, items, kind, raised, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn
from course_lib.grading.tasks.planning import exactly, refused, says_least

FIELDS = ("data", "stages", "zero", "cut", "memory", "seconds")
PROBES = 5
Plan = tuple[int, int, tuple[int, ...]]
"""Ranks that share a stage, stage of ZeRO, and where each pipeline stage ends."""


def plans(given: dict) -> Iterator[Plan]:
    """All plans that the numbers allow, fitting or not."""
    layers = len(given["layers"])
    for stages in range(1, min(layers, given["gpus"]) + 1):
        data, rest = divmod(given["gpus"], stages)
        if rest or given["micro_batches"] % data:
            continue
        for inner in combinations(range(1, layers), stages - 1):
            for zero in range(4):
                yield data, zero, (*inner, layers)


def stages_of(given: dict, plan: Plan) -> list[list[dict]]:
    ends = plan[2]
    return [given["layers"][first:end] for first, end in zip((0, *ends), ends, strict=False)]


def memory(given: dict, plan: Plan) -> list[int]:
    """Bytes by rank; the ranks of the first stage first."""
    data, zero, ends = plan
    held = []
    for stage, layers in enumerate(stages_of(given, plan)):
        parameters = sum(layer["parameters"] for layer in layers)
        in_flight = min(given["micro_batches"] // data, len(ends) - stage)
        length = -(-parameters // data)
        for rank in range(data):
            shard = max(0, min(length, parameters - rank * length))
            states = sum(width * (shard if zero >= least else parameters) for width, least in ((12, 1), (2, 2), (2, 3)))
            held.append(states + in_flight * sum(layer["activations"] for layer in layers))
    return held


def seconds(given: dict, plan: Plan) -> float:
    data, zero, ends = plan
    stages = stages_of(given, plan)
    slowest = max(sum(layer["seconds"] for layer in layers) for layers in stages)
    largest = max(sum(layer["parameters"] for layer in layers) for layers in stages)
    sent = (3 if zero == 3 else 2) * 2 * largest * (data - 1) / data
    return (given["micro_batches"] // data + len(ends) - 1) * slowest + sent / given["bandwidth"]


def best(given: dict) -> Plan | None:
    """The plan that is due; None where none fits."""
    able = [plan for plan in plans(given) if max(memory(given, plan)) <= given["capacity"]]
    return min(
        able,
        key=lambda plan: (seconds(given, plan), plan[1], len(plan[2]), max(memory(given, plan)), plan[2]),
        default=None,
    )


TIES = (
    ((156, 4000, 1), (12, 60, 1), (132, 20, 2), (84, 6000, 1), (276, 6000, 1), 4, 2, 13344),
    ((252, 40, 5), (12, 2000, 1), (84, 1, 3), (228, 1200, 1), (264, 60, 5), (348, 4000, 1), 6, 6, 9554),
    ((228, 60, 2), (48, 40, 1), (60, 2, 1), (60, 6000, 1), (204, 4000, 5), (288, 800, 1), 4, 6, 13924),
    ((228, 60, 2), (48, 40, 1), (60, 2, 1), (60, 6000, 1), (204, 4000, 5), (288, 800, 1), 4, 6, 12960),
)
"""Layers (parameters, activations, seconds), GPUs, micro-batches, capacity, with several fastest plans: the lower
stage of ZeRO has more stages, fewer stages take more memory, an earlier cut takes more, several cuts take as much."""


def layer(parameters: int, activations: int, seconds: float) -> dict[str, Any]:
    return {"parameters": parameters, "activations": activations, "seconds": seconds}


def tied_case(rng: random.Random, place: int) -> dict:
    """One of `TIES` in other units; messages take no time."""
    *layers, gpus, micro_batches, capacity = TIES[place % len(TIES)]
    unit, pace = rng.randrange(1, 9), rng.randrange(1, 9) / 8
    given: dict[str, Any] = {
        "layers": [layer(unit * held, unit * activations, pace * seconds) for held, activations, seconds in layers],
        "gpus": gpus,
        "micro_batches": micro_batches,
        "bandwidth": 2.0**90,
        "capacity": unit * capacity,
    }
    given["plans"] = [[data, zero, list(ends)] for data, zero, ends in rng.sample(list(plans(given)), PROBES)]
    return given


def planner_case(rng: random.Random, place: int) -> dict:
    """In turn: little room, a last layer that is far larger, nothing fits; from the seventh on `TIES`."""
    if place >= 6:
        return tied_case(rng, place - 6)
    count, gpus = rng.randrange(4, 8), rng.choice((4, 6, 8)) if place else 4
    layers = [layer(rng.randrange(100, 400), rng.randrange(200, 4000), rng.randrange(1, 33) / 16) for _ in range(count)]
    if place % 3 == 1:
        layers[-1]["parameters"] = 5 * layers[-1]["parameters"] + 1
    if place % 3 == 0:
        layers[0]["parameters"] = gpus // 2 + 1  # too few for the last rank to have any
    given: dict[str, Any] = {
        "layers": layers,
        "gpus": gpus,
        "micro_batches": gpus // 2 * (place % 4 + 1),
        "bandwidth": float(2 ** rng.randrange(7, 12)),
        "capacity": 0,
    }
    every = list(plans(given))
    peaks = sorted({max(memory(given, plan)) for plan in every})
    given["capacity"] = peaks[0] - 1 if place % 3 == 2 else peaks[rng.randrange(len(peaks) // 8, len(peaks) // 3 + 1)]
    given["plans"] = [
        [gpus // 2, 3, [1, count]],
        *([data, zero, list(ends)] for data, zero, ends in rng.sample(every, PROBES - 1)),
    ]
    return given


def observe_planner(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    settings = (given[name] for name in ("gpus", "micro_batches", "bandwidth", "capacity"))
    planner = function([dict(layer) for layer in given["layers"]], *settings)
    asked = [(data, zero, list(cut)) for data, zero, cut in given["plans"]]
    told = {key: [plain(getattr(planner, key)(*plan)) for plan in asked] for key in ("memory", "seconds")}
    try:
        made = planner.best()
    except ValueError as refusal:
        return {**told, "best": {}, "types": [], **refused(refusal, function)}
    types = [type(made[name]).__name__ for name in FIELDS]
    return {**told, "best": plain(made), "types": types, "refusal": ""}


def in_words(plan: Plan) -> str:
    data, zero, ends = plan
    return f"{data} x {len(ends)} GPUs, ZeRO-{zero}, stages that end at {list(ends)}"


def memory_is(case: Case, seen: Seen) -> Miss | None:
    tables = items(seen, 0, "memory", list)
    for (data, zero, cut), mine in zip(case.inputs["plans"], tables, strict=False):
        plan = (data, zero, tuple(cut))
        right = memory(case.inputs, plan)
        if len(mine) != len(right):
            return Miss(f"bytes of {len(right)} ranks with {in_words(plan)}", short(mine))
        for rank, (actual, due) in enumerate(zip(mine, right, strict=True)):
            if type(actual) is not int or actual != due:
                return Miss(f"{due} bytes on rank {rank} of {len(right)} with {in_words(plan)}", short(actual))
    return None if len(tables) == PROBES else Miss(f"memory of {PROBES} plans", f"{len(tables)}")


def seconds_are(case: Case, seen: Seen) -> Miss | None:
    all_seconds = items(seen, 0, "seconds", (int, float))
    for (data, zero, cut), actual in zip(case.inputs["plans"], all_seconds, strict=False):
        plan = (data, zero, tuple(cut))
        if not exactly(actual, right := seconds(case.inputs, plan)):
            return Miss(f"{right:.6g} s with {in_words(plan)}", f"{actual:.6g} s")
    return None if len(all_seconds) == PROBES else Miss(f"seconds of {PROBES} plans", f"{len(all_seconds)}")


def chosen(case: Case, seen: Seen) -> Plan | None:
    """The plan that was picked; None where none fits.

    Raises:
        Malformed: it is none of the possible ones.
    """
    if best(case.inputs) is None:
        return None
    made = seen[0].get("best")
    if said := raised(seen):
        raise Malformed(Miss("a plan, as one fits", short(said)))
    if not isinstance(made, dict) or not isinstance(made.get("cut"), list):
        raise Malformed(Miss("a plan, a dict with a list as cut", kind(made)))
    told = [made.get("data"), made.get("zero"), made["cut"], made.get("stages")]
    picked = [plan for plan in plans(case.inputs) if [plan[0], plan[1], list(plan[2]), len(plan[2])] == told]
    if not picked:
        raise Malformed(Miss("a plan that the numbers allow", short(made or seen[0].get("refusal"))))
    return picked[0]


def fits(case: Case, seen: Seen) -> Miss | None:
    plan = chosen(case, seen)
    if plan is None:
        return None
    held, room = memory(case.inputs, plan), case.inputs["capacity"]
    shown = f"{max(held)} on rank {held.index(max(held))} with {in_words(plan)}"
    return kit.unless(max(held) <= room, f"at most {room} bytes on every rank", shown)


def is_best(case: Case, seen: Seen) -> Miss | None:
    plan, right = chosen(case, seen), best(case.inputs)
    if (miss := fits(case, seen)) is not None or plan is None or right is None or plan == right:
        return miss
    due, shown = (
        f"{in_words(one)}: {seconds(case.inputs, one):.6g} s, {max(memory(case.inputs, one))} bytes"
        for one in (right, plan)
    )
    return Miss(due, shown)


def tells_what_it_picked(case: Case, seen: Seen) -> Miss | None:
    plan = chosen(case, seen)
    if plan is None:
        return None
    made = seen[0]["best"]
    right = ["int", "int", "int", "list", "list", "float"]
    if seen[0].get("types") != right:
        return Miss(f"{', '.join(FIELDS)} as {', '.join(right)}", short(seen[0].get("types")))
    if made.get("memory") != memory(case.inputs, plan) or not exactly(made["seconds"], seconds(case.inputs, plan)):
        return Miss("its own memory and seconds", short([made.get("memory"), made.get("seconds")]))
    return None


def refuses(case: Case, seen: Seen) -> Miss | None:
    if chosen(case, seen) is not None:
        return None
    return says_least(seen, min(max(memory(case.inputs, plan)) for plan in plans(case.inputs)), "bytes", "a plan")


PLANNER = Task(
    **kit.about("plan.planner"),
    draw=in_turn(planner_case, 6 + len(TIES)),
    observe=observe_planner,
    essential=("memory", "best"),
    properties={
        "memory": Property(3, memory_is),
        "seconds": Property(2, seconds_are),
        "fits": Property(1, fits),
        "best": Property(3, is_best),
        "refuses": Property(1, refuses),
        "tells": Property(1, tells_what_it_picked),
    },
)
