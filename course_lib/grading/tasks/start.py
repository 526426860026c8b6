"""Lesson 00: ranks that know who they are, hear rank 0, and find out whether they hold the same."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, calls, dtype_of, items, made_by, near, of_dtype, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import each_world, entry, in_turn, numbers, whole
from course_lib.grading.tasks.prepared import few_bytes

LESSON = "00_start_here"


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


def variables(*names: str) -> Callable[[Case, Seen], Miss | None]:
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
            for name in names:
                if environment.get(name) != str(right[name]):
                    return Miss(
                        f"{name}={str(right[name])!r} for process {local} of machine {given['machine']} of "
                        f"{given['machines']}, each with {given['per_machine']}",
                        short(repr(environment.get(name, "nothing"))),
                    )
        return None

    return rule


ENVIRONMENT = Task(
    name="start.environment",
    lesson=LESSON,
    function="environments",
    title="What a launcher tells its processes",
    difficulty=1,
    importance=4,
    minutes=10,
    draw=in_turn(environment_case, 5),
    observe=observe_environment,
    needs_ranks=False,
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
    tensor = torch.from_numpy(case.inputs["tensors"][rank].copy())
    with Recorder() as record:
        heard = function(tensor)
    return {"heard": plain(heard), "dtype of heard": dtype_of(heard), "events": record.events}


def heard_right(case: Case, seen: Seen) -> Miss | None:
    right = case.inputs["tensors"][0]
    return near(seen, "heard", [right] * case.world_size, 1e-12) or of_dtype(seen, "heard", str(right.dtype))


def one_all_reduce(case: Case, seen: Seen) -> Miss | None:
    """One all-reduce of the tensor's size on every rank, and no other collective."""
    size = case.inputs["tensors"][0].nbytes
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if len(made) != 1 or calls(seen, rank, "all_reduce") != [size]:
            return Miss(f"all_reduce {size}", short(", ".join(made) or "no collective"), rank)
    return None


BROADCAST = Task(
    name="start.broadcast",
    lesson=LESSON,
    function="from_rank_0",
    title="A broadcast, by an all-reduce",
    difficulty=2,
    importance=3,
    minutes=15,
    draw=each_world(broadcast_case),
    observe=observe_broadcast,
    own={"tensors": entry},
    essential=("value", "one all-reduce"),
    properties={"value": Property(2, heard_right), "one all-reduce": Property(1, one_all_reduce)},
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
    weights = torch.from_numpy(case.inputs["weights"][rank].copy())
    with Recorder() as record:
        verdict = function(weights)
    return {"verdict": plain(verdict), "events": record.events}


def alike(case: Case) -> list[bool]:
    first, *rest = (weights.tobytes() for weights in case.inputs["weights"])
    return [all(first == other for other in rest)] * case.world_size


ONE_MODEL = Task(
    name="start.one_model",
    lesson=LESSON,
    function="one_model",
    title="Do all ranks hold the same model?",
    difficulty=3,
    importance=5,
    minutes=25,
    draw=model_cases,
    observe=observe_model,
    own={"weights": entry},
    essential=("verdict",),
    properties={
        "verdict": Property(3, lambda case, seen: same(seen, "verdict", alike(case))),
        "few bytes": Property(1, few_bytes(64)),
    },
)

ALL = (ENVIRONMENT, BROADCAST, ONE_MODEL)
