"""Lesson 00: ranks that know who they are, hear rank 0, and find out whether they hold the same."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, dtype_of, items, near, of_dtype, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, in_turn, numbers, whole

# --- start.environment ---


def environment_case(rng: random.Random, place: int) -> dict:
    machines = 1 if place == 0 else rng.randrange(2, 5)
    return {
        "machine": 0 if place == 0 else rng.randrange(1, machines),
        "machines": machines,
        "per_machine": rng.randrange(2, 5),
        "address": f"10.0.{rng.randrange(256)}.{rng.randrange(1, 255)}",
        "port": rng.randrange(20000, 60000),
    }


def observe_environment(function: Callable[..., Any], case: Case, rank: int) -> dict:
    return {"environments": plain(function(**case.inputs))}


def told(case: Case, seen: Seen) -> list[dict]:
    """The learner's dictionaries, one per process of the machine."""
    listed = items(seen, 0, "environments", dict)
    if len(listed) != case.inputs["per_machine"]:
        raise Malformed(Miss(f"{case.inputs['per_machine']} environments", f"{len(listed)}"))
    return listed


def variables(*names: str) -> Rule:
    """A rule: these variables have the right text in the environment of each process."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        given = case.inputs
        for local, environment in enumerate(told(case, seen)):
            right = {
                "RANK": given["machine"] * given["per_machine"] + local,
                "LOCAL_RANK": local,
                "WORLD_SIZE": given["machines"] * given["per_machine"],
                "MASTER_ADDR": given["address"],
                "MASTER_PORT": given["port"],
            }
            where = f"process {local} of machine {given['machine']} of {given['machines']}"
            for name in names:
                if environment.get(name) != str(right[name]):
                    said = f"{name}={str(right[name])!r} for {where}, each with {given['per_machine']}"
                    return Miss(said, short(repr(environment.get(name, "nothing"))))
        return None

    return rule


ENVIRONMENT = Task(
    **kit.about("start.environment"),
    draw=in_turn(environment_case, 5),
    observe=observe_environment,
    essential=("numbers",),
    properties={
        "numbers": Property(2, variables("RANK", "LOCAL_RANK", "WORLD_SIZE")),
        "address": Property(1, variables("MASTER_ADDR", "MASTER_PORT")),
    },
)


# --- start.broadcast ---


def broadcast_case(rng: random.Random, world: int) -> dict:
    """Case in which others hold infinities, NaN and an infinity, or whole numbers that float32 does not hold."""
    values = numbers(rng, rng.randrange(3, 9))
    rest = [np.resize(np.array([np.inf, np.nan, -np.inf, -3.0], np.float32), values.shape) for _ in range(world - 1)]
    if world % 2:
        values, rest = whole(rng, 2**40, 2**50, len(values)), [whole(rng, 1, 2**50, len(values)) for _ in rest]
    return {"tensors": [values, *rest]}


def observe_broadcast(function: Callable[..., Any], case: Case, rank: int) -> dict:
    tensor = kit.tensor(case.inputs["tensors"][rank])
    with Recorder() as record:
        heard = function(tensor)
    return kit.noted(record, heard=heard) | {"dtype of heard": dtype_of(heard)}


def heard_right(case: Case, seen: Seen) -> Miss | None:
    right = case.inputs["tensors"][0]
    return near(seen, "heard", [right] * case.world_size, 1e-12) or of_dtype(seen, "heard", str(right.dtype))


def one_all_reduce(case: Case) -> list[str]:
    """One all-reduce of the tensor's size on every rank, and no other collective."""
    return [f"all_reduce {case.inputs['tensors'][0].nbytes}"]


BROADCAST = Task(
    **kit.about("start.broadcast"),
    draw=each_world(broadcast_case),
    observe=observe_broadcast,
    own={"tensors": entry},
    essential=("value", "one all-reduce"),
    properties={"value": Property(2, heard_right), "one all-reduce": Property(1, kit.made_are(one_all_reduce))},
)


# --- start.one_model ---

ALIKE, NUMBER, ONE_ULP, SHUFFLED, ZERO, NAN = KINDS = range(6)
"""What is different on one rank: nothing, a number, its last bit, the order of the numbers, the sign of a zero; or
nothing, with a NaN on all."""


def model_case(rng: random.Random, world: int, kind: int) -> dict:
    weights = numbers(rng, 24) + np.arange(24, dtype=np.float32)  # no two alike
    odd, at = rng.randrange(world), rng.randrange(24)
    if kind in (ZERO, NAN):
        weights[at] = np.nan if kind == NAN else 0
    held = [weights.copy() for _ in range(world)]
    if kind == NUMBER:
        held[odd][at] += 1
    if kind == ONE_ULP:
        held[odd][at] = np.nextafter(held[odd][at], np.float32(np.inf))
    if kind == SHUFFLED:
        held[odd] = held[odd][::-1].copy()
    if kind == ZERO:
        held[odd][at] = -0.0
    return {"weights": held}


def model_cases(rng: random.Random, worlds: tuple[int, ...] = (1, 2, 3)) -> list[Case]:
    """All kinds on each number of ranks."""
    return [
        Case(world, model_case(rng, world, kind)) for world in worlds for kind in ((ALIKE,) if world == 1 else KINDS)
    ]


def observe_model(function: Callable[..., Any], case: Case, rank: int) -> dict:
    weights = kit.tensor(case.inputs["weights"][rank])
    with Recorder() as record:
        verdict = function(weights)
    return kit.noted(record, verdict=verdict)


def alike(case: Case) -> list[bool]:
    first, *rest = (weights.tobytes() for weights in case.inputs["weights"])
    return [all(first == other for other in rest)] * case.world_size


ONE_MODEL = Task(
    **kit.about("start.one_model"),
    draw=model_cases,
    observe=observe_model,
    own={"weights": entry},
    essential=("verdict",),
    properties={
        "verdict": Property(3, lambda case, seen: same(seen, "verdict", alike(case))),
        "few bytes": Property(1, kit.few_bytes(64)),
    },
)
