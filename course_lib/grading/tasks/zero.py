"""Lesson 05: optimizer states and gradients split over the ranks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, made_by, number, result, short, waited_for
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import alone, along, each_world, entry, in_turn, numbers
from course_lib.grading.tasks.models import STEPS, chain, flat, mean_gradients, odd_case, trained

LESSON = "05_zero_stages"


# --- zero.bytes ---


def bytes_case(rng: random.Random) -> dict:
    return {"parameters": 128 * rng.randrange(1, 10**6), "ranks": 2 ** rng.randrange(1, 8)}


def observe_bytes(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {f"stage {stage}": plain(function(given["parameters"], given["ranks"], stage)) for stage in range(4)}


def bytes_of(stage: int) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        size, ranks = case.inputs["parameters"], case.inputs["ranks"]
        kinds = zip((12, 2, 2), (stage >= 1, stage >= 2, stage >= 3), strict=True)
        right = sum(width * size / (ranks if split else 1) for width, split in kinds)
        actual = number(seen, 0, f"stage {stage}")
        return (
            None
            if abs(actual - right) <= 1e-6 * right
            else Miss(f"{right:,.0f} bytes for {case.inputs}", f"{actual:,.0f}")
        )

    return rule


BYTES = Task(
    name="zero.bytes",
    lesson=LESSON,
    function="bytes_per_rank",
    title="The bill of four stages",
    difficulty=1,
    importance=5,
    minutes=10,
    draw=alone(bytes_case),
    observe=observe_bytes,
    needs_ranks=False,
    properties={f"stage {stage}": Property(1, bytes_of(stage)) for stage in range(4)},
)


# --- zero.partition ---


def partition_case(rng: random.Random, place: int) -> dict:
    """In every fourth case there are fewer elements than ranks."""
    if place % 4 == 1:
        return {"sizes": rng.choice(([1], [2], [1, 1])), "ranks": 4}
    return {"sizes": [rng.randrange(1, 20) for _ in range(rng.randrange(1, 7))], "ranks": rng.randrange(1, 5)}


def observe_partition(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {"runs": [plain(function(list(given["sizes"]), r, given["ranks"])) for r in range(given["ranks"])]}


def runs(case: Case, seen: Seen) -> list[list[list[int]]]:
    by_rank, sizes = items(seen, 0, "runs", list), case.inputs["sizes"]
    good = len(by_rank) == case.inputs["ranks"] and all(
        isinstance(run, list)
        and len(run) == 3
        and all(type(n) is int for n in run)
        and 0 <= run[0] < len(sizes)
        and run[1] >= 0
        and run[2] > 0
        and run[1] + run[2] <= sizes[run[0]]
        for mine in by_rank
        for run in mine
    )
    if not good:
        raise Malformed(Miss("for each rank a list of (parameter, first element, elements) within it", short(by_rank)))
    return by_rank


def each_element_once(case: Case, seen: Seen) -> Miss | None:
    held = sorted(
        (index, first + offset) for mine in runs(case, seen) for index, first, count in mine for offset in range(count)
    )
    every = [(index, offset) for index, size in enumerate(case.inputs["sizes"]) for offset in range(size)]
    return (
        None
        if held == every
        else Miss("every element on one rank", f"{len(set(held))} of {len(every)}, {len(held) - len(set(held))} twice")
    )


def evenly(case: Case, seen: Seen) -> Miss | None:
    limit = -(-sum(case.inputs["sizes"]) // case.inputs["ranks"])
    sizes = [sum(run[2] for run in mine) for mine in runs(case, seen)]
    return None if max(sizes) <= limit else Miss(f"at most {limit} elements per rank", short(sizes))


def as_cut(case: Case, seen: Seen) -> Miss | None:
    length = -(-sum(case.inputs["sizes"]) // case.inputs["ranks"])
    for rank, mine in enumerate(runs(case, seen)):
        right, start = [], 0
        for index, size in enumerate(case.inputs["sizes"]):
            low, high = max(start, rank * length), min(start + size, (rank + 1) * length)
            if high > low:
                right.append([index, low - start, high - low])
            start += size
        if mine != right:
            return Miss(f"{short(right)} on rank {rank}", short(mine))
    return None


PARTITION = Task(
    name="zero.partition",
    lesson=LESSON,
    function="my_runs",
    title="Cut a flat buffer into shards",
    difficulty=3,
    importance=4,
    minutes=25,
    draw=in_turn(partition_case, 8),
    observe=observe_partition,
    needs_ranks=False,
    essential=("in order",),
    properties={
        "every element once": Property(1, each_element_once),
        "even": Property(1, evenly),
        "in order": Property(1, as_cut),
    },
)


# --- zero.stage1 ---


def step_case(rng: random.Random, world: int) -> dict:
    size = world * rng.randrange(2, 8)
    return {
        "weights": numbers(rng, size),
        "momentum": numbers(rng, size),
        "lr": 0.5,
        "beta": 0.75,
        "gradients": [[numbers(rng, size) for _ in range(STEPS)] for _ in range(world)],
    }


def observe_step(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, after = case.inputs, []
    weights, momentum = (
        torch.from_numpy(array.copy())
        for array in (given["weights"], np.split(given["momentum"], case.world_size)[rank])
    )
    with Recorder() as record:
        for gradient in given["gradients"][rank]:
            function(weights, torch.from_numpy(gradient.copy()), momentum, given["lr"], given["beta"])
            after.append(torch.cat([weights, momentum]))
    values = torch.stack(after)
    return {
        "weights": plain(values[:, : len(weights)]),
        "momentum": plain(values[:, len(weights) :]),
        "events": record.events,
    }


def after_steps(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Weights and momentum after each step, shape (steps, elements)."""
    weights, momentum, made = case.inputs["weights"], case.inputs["momentum"], []
    for gradients in zip(*case.inputs["gradients"], strict=True):
        momentum = case.inputs["beta"] * momentum + np.mean(gradients, axis=0)
        weights = weights - case.inputs["lr"] * momentum
        made.append((weights, momentum))
    return np.stack([w for w, _ in made]), np.stack([m for _, m in made])


def zero_traffic(case: Case, seen: Seen) -> Miss | None:
    size = case.inputs["weights"].nbytes
    right = [f"reduce_scatter {size}", f"all_gather {size}"] * STEPS
    for rank in range(case.world_size):
        if (issued := made_by(seen, rank)) != right:
            return Miss(", ".join(right), short(", ".join(issued) or "no collective"), rank)
    return None


STAGE1 = Task(
    name="zero.stage1",
    lesson=LESSON,
    function="zero1_step",
    title="A step of ZeRO-1",
    difficulty=3,
    importance=5,
    minutes=30,
    draw=each_world(step_case),
    observe=observe_step,
    own={"gradients": entry, "momentum": along(0)},
    essential=("weights", "collectives"),
    properties={
        "weights": Property(3, result("weights", lambda case: [after_steps(case)[0]] * case.world_size, first_step=0)),
        "own state": Property(
            1, result("momentum", lambda case: np.split(after_steps(case)[1], case.world_size, 1), first_step=0)
        ),
        "collectives": Property(2, zero_traffic),
    },
)


# --- zero.stage2 ---


def stage2_case(rng: random.Random, world: int) -> dict:
    return odd_case(rng, world, multiple=world)


def observe_stage2(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model = chain(case.inputs)
    parameters, held, left, shards = trained(model), 0, 0, []

    def arrived(parameter: Any) -> None:
        nonlocal held
        record.note("gradient")
        held = max(held, sum(p.grad is not None for p in parameters))

    with Recorder() as record:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(arrived)
        finish = function(parameters)
        for rows in case.inputs["rows"][rank]:
            record.note("step")
            model(torch.from_numpy(rows)).square().mean().backward()
            left = max(left, sum(p.grad is not None for p in parameters))
            shards.append(torch.cat([shard.reshape(-1).clone() for shard in finish()]))
    return {"shards": plain(torch.stack(shards)), "events": record.events, "most whole gradients": held, "left": left}


def shards_of_mean(case: Case) -> list[np.ndarray]:
    sizes = [parameter.numel() for parameter in trained(chain(case.inputs))]
    steps = [np.split(mean, np.cumsum(sizes)[:-1]) for mean in mean_gradients(case)[0]]
    return [
        np.stack([flat([np.split(gradient, case.world_size)[rank] for gradient in step]) for step in steps])
        for rank in range(case.world_size)
    ]


def freed(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        most, left = number(seen, rank, "most whole gradients"), number(seen, rank, "left")
        if most > 1 or left > 0:
            return Miss("one whole gradient at a time, none after backward", f"{most:.0f}, and {left:.0f} after", rank)
    return None


def scattered_early(case: Case, seen: Seen) -> Miss | None:
    layers = len(trained(chain(case.inputs)))
    for rank in range(case.world_size):
        if miss := waited_for(events(seen, rank), rank):
            return miss
        happened = " ".join(event.split()[0] for event in events(seen, rank) if event != "wait").split("step")[1:]
        steps = [step.split() for step in happened]
        for step in steps if len(steps) == STEPS else [[]]:
            made = [name for name in step if name != "gradient"]
            if made != ["reduce_scatter"] * layers:
                return Miss(f"{layers} reduce_scatters in a step", short(", ".join(made) or "none"), rank)
            if "gradient" not in step[step.index("reduce_scatter") :]:
                return Miss("reduce_scatters while backward runs", "all after the last gradient", rank)
    return None


STAGE2 = Task(
    name="zero.stage2",
    lesson=LESSON,
    function="attach_zero2",
    title="ZeRO-2: reduce, scatter and let go",
    difficulty=4,
    importance=4,
    minutes=35,
    draw=each_world(stage2_case),
    observe=observe_stage2,
    own={"rows": entry},
    essential=("shards", "freed", "while backward runs"),
    properties={
        "shards": Property(3, result("shards", shards_of_mean, first_step=0)),
        "freed": Property(2, freed),
        "while backward runs": Property(2, scattered_early),
    },
)

ALL = (BYTES, PARTITION, STAGE1, STAGE2)
