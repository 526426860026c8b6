"""Lesson 05: optimizer states and gradients split over the ranks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, number, short, waited_for
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, along, each_world, entry, in_turn, numbers
from course_lib.grading.tasks.models import STEPS, chain, flat, mean_gradients, odd_case, trained

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
        fits = abs(actual - right) <= 1e-6 * right
        return kit.unless(fits, f"{right:,.0f} bytes for {case.inputs}", f"{actual:,.0f}")

    return rule


BYTES = Task(
    **kit.about("zero.bytes"),
    draw=alone(bytes_case),
    observe=observe_bytes,
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

    def is_run(run: Any) -> bool:
        if not isinstance(run, list) or len(run) != 3 or not all(type(n) is int for n in run):
            return False
        index, first, count = run
        return 0 <= index < len(sizes) and first >= 0 and count > 0 and first + count <= sizes[index]

    if len(by_rank) != case.inputs["ranks"] or not all(is_run(run) for mine in by_rank for run in mine):
        raise Malformed(Miss("for each rank a list of (parameter, first element, elements) within it", short(by_rank)))
    return by_rank


def each_element_once(case: Case, seen: Seen) -> Miss | None:
    every_run = [run for mine in runs(case, seen) for run in mine]
    held = sorted((index, first + offset) for index, first, count in every_run for offset in range(count))
    every = [(index, offset) for index, size in enumerate(case.inputs["sizes"]) for offset in range(size)]
    shown = f"{len(set(held))} of {len(every)}, {len(held) - len(set(held))} twice"
    return kit.unless(held == every, "every element on one rank", shown)


def evenly(case: Case, seen: Seen) -> Miss | None:
    limit = -(-sum(case.inputs["sizes"]) // case.inputs["ranks"])
    sizes = [sum(run[2] for run in mine) for mine in runs(case, seen)]
    return kit.unless(max(sizes) <= limit, f"at most {limit} elements per rank", short(sizes))


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
    **kit.about("zero.partition"),
    draw=in_turn(partition_case, 8),
    observe=observe_partition,
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
    given, weights, momentum = case.inputs, kit.tensor(case.inputs["weights"]), kit.part(case, "momentum", rank)
    after = []
    with Recorder() as record:
        for gradient in given["gradients"][rank]:
            function(weights, kit.tensor(gradient), momentum, given["lr"], given["beta"])
            after.append(torch.cat([weights, momentum]))
    values = torch.stack(after)
    return kit.noted(record, weights=values[:, : len(weights)], momentum=values[:, len(weights) :])


def after_steps(case: Case) -> dict[str, list[np.ndarray]]:
    """By rank: weights and its own momentum after each step, shape (steps, elements)."""
    weights, momentum, made = case.inputs["weights"], case.inputs["momentum"], []
    for gradients in zip(*case.inputs["gradients"], strict=True):
        momentum = case.inputs["beta"] * momentum + np.mean(gradients, axis=0)
        weights = weights - case.inputs["lr"] * momentum
        made.append((weights, momentum))
    of_weights, of_momentum = map(np.stack, zip(*made, strict=True))
    return {"weights": [of_weights] * case.world_size, "momentum": np.split(of_momentum, case.world_size, 1)}


def zero_traffic(case: Case) -> list[str]:
    size = case.inputs["weights"].nbytes
    return [f"reduce_scatter {size}", f"all_gather {size}"] * STEPS


STAGE1 = Task(
    **kit.about("zero.stage1"),
    draw=each_world(step_case),
    observe=observe_step,
    own={"gradients": entry, "momentum": along(0)},
    essential=("weights", "collectives"),
    properties={
        "weights": Property(3, kit.equals("weights", after_steps, of="weights", first_step=0)),
        "own state": Property(1, kit.equals("momentum", after_steps, of="momentum", first_step=0)),
        "collectives": Property(2, kit.made_are(zero_traffic)),
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
    return kit.noted(record, shards=torch.stack(shards), left=left) | {"most whole gradients": held}


def shards_of_mean(case: Case) -> list[np.ndarray]:
    sizes = [parameter.numel() for parameter in trained(chain(case.inputs))]
    steps = [np.split(mean, np.cumsum(sizes)[:-1]) for mean in mean_gradients(case)[0]]
    return [
        np.stack([flat([np.split(gradient, case.world_size)[rank] for gradient in step]) for step in steps])
        for rank in range(case.world_size)
    ]


@kit.each_rank
def freed(case: Case, seen: Seen, rank: int) -> Miss | None:
    most, left = number(seen, rank, "most whole gradients"), number(seen, rank, "left")
    shown = f"{most:.0f}, and {left:.0f} after"
    return kit.unless(most <= 1 and left <= 0, "one whole gradient at a time, none after backward", shown)


@kit.each_rank
def all_waited_for(case: Case, seen: Seen, rank: int) -> Miss | None:
    return waited_for(events(seen, rank), rank)


def scattered_early(case: Case, step: int, happened: list[str]) -> Miss | None:
    layers, names = len(trained(chain(case.inputs))), [event.split()[0] for event in happened if event != "wait"]
    made = [name for name in names if name != "gradient"]
    if made != ["reduce_scatter"] * layers:
        return Miss(f"{layers} reduce_scatters in a step", kit.listed(made, "none"))
    is_early = "gradient" in names[names.index("reduce_scatter") :]
    return kit.unless(is_early, "reduce_scatters while backward runs", "all after the last gradient")


STAGE2 = Task(
    **kit.about("zero.stage2"),
    draw=each_world(stage2_case),
    observe=observe_stage2,
    own={"rows": entry},
    essential=("shards", "freed", "while backward runs"),
    properties={
        "shards": Property(3, kit.equals("shards", shards_of_mean, first_step=0)),
        "freed": Property(2, freed),
        "while backward runs": Property(2, kit.all_of(all_waited_for, kit.each_step(scattered_early, "step", STEPS))),
    },
)
