"""Lesson 02: the mean of all ranks' gradients, by a ring, in buckets, while backward runs, and only when it is due."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, calls, events, made_by, waited_for
from course_lib.grading.task import Case, Met, Miss, Property, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, numbers, whole
from course_lib.grading.tasks.models import (
    STEPS,
    all_weights,
    backwards,
    chain,
    draw_models,
    elsewhere,
    flat,
    gradients_of,
    local_gradients,
    mean_gradient,
    trained,
    widths,
)
from course_lib.parallel.ddp import DataParallel

# --- ddp.average ---


def observe_average(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, gradients, stray = chain(case.inputs), [], 0.0
    with Recorder() as record:
        for _ in backwards(model, case.inputs["rows"][rank]):
            function(model)
            gradients.append(gradients_of(model))
            stray = max(stray, elsewhere(model))
    return kit.noted(record, gradient=torch.stack(gradients), elsewhere=stray, weights=all_weights(trained(model)))


def weights_of(case: Case) -> np.ndarray:
    """Trained weights, one behind the other, before the first step."""
    return all_weights(trained(chain(case.inputs))).numpy()


@kit.each_rank
def sends_each_once(case: Case, seen: Seen, rank: int) -> Miss | None:
    """All-reduces that carry the gradient's bytes, once in each step."""
    size, made, sent = STEPS * weights_of(case).nbytes, made_by(seen, rank), calls(seen, rank, "all_reduce")
    fits = sum(sent) == size and len(sent) == len(made)
    return kit.unless(fits, f"all_reduce of {size} bytes in all", kit.listed(made, "nothing"))


@kit.each_rank
def sends_something(case: Case, seen: Seen, rank: int) -> Miss | None:
    return kit.unless(made_by(seen, rank), "gradients averaged, weights as they were", "nothing was sent")


MET = Met("mean gradient", "gradient", lambda case: local_gradients(case)[0])

AVERAGE = Task(
    **kit.about("ddp.average"),
    draw=draw_models,
    observe=observe_average,
    met=MET,
    own={"rows": entry},
    essential=("mean gradient",),
    properties={
        "mean gradient": Property(3, mean_gradient),
        "weights untouched": Property(
            1, kit.all_of(sends_something, kit.equals("weights", weights_of, on_all=True, tolerance=0))
        ),
        "bytes": Property(1, sends_each_once),
    },
)


# --- ddp.ring ---


def ring_case(rng: random.Random, world: int, size: int) -> dict:
    """Case whose size divides by 4, of whole numbers that float32 does not hold."""
    return {"tensors": [numbers(rng, size) if size % 4 else whole(rng, 2**40, 2**50, size) for _ in range(world)]}


SIZES = {1: (5,), 2: (1, 9), 3: (1, 2, 4, 12), 4: (9,)}
"""By number of ranks: one element, fewer than ranks, such as `chunk` cuts into too few parts, and such as divide."""


def draw_ring(rng: random.Random, worlds: Sequence[int] | None = None) -> list[Case]:
    """The public sizes, or for each number of ranks some that a few parts are empty at, and larger ones."""
    sizes = (
        SIZES
        if worlds is None
        else {
            world: (rng.choice((1, world - 1)), 2 * world + 1, 4 * world, rng.randrange(world, 30)) for world in worlds
        }
    )
    return [Case(world, ring_case(rng, world, size)) for world, own in sizes.items() for size in own]


def observe_ring(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = kit.tensor(case.inputs["tensors"][rank])
    with Recorder() as record:
        function(mine)
    return kit.noted(record, sum=mine)


@kit.each_rank
def from_messages(case: Case, seen: Seen, rank: int) -> Miss | None:
    made = made_by(seen, rank)
    others = [event for event in made if event.split()[0] not in ("send", "recv")]
    if others or (case.world_size > 1 and not made):
        return Miss("sends and receives", others[0] if others else "nothing")
    return waited_for(events(seen, rank), rank)


@kit.each_rank
def ring_bytes(case: Case, seen: Seen, rank: int) -> Miss | None:
    ranks, given, sent = case.world_size, case.inputs["tensors"][0], sum(calls(seen, rank, "send"))
    limit = 2 * (ranks - 1) * given.itemsize * -(-given.size // ranks)
    fits = sent <= limit and (ranks == 1 or sent >= limit - 16 * ranks)
    return kit.unless(fits, f"about {limit} bytes sent, 2 (N - 1) / N of {given.nbytes}", f"{sent}")


@kit.each_rank
def to_neighbours(case: Case, seen: Seen, rank: int) -> Miss | None:
    ranks = case.world_size
    peers = {event.split()[-1] for event in events(seen, rank) if event.startswith("send ")}
    shown = f"to ranks {', '.join(sorted(peers))}" if peers else "none"
    is_one = any(not peers - {str((rank + way) % ranks)} for way in (1, -1))
    return kit.unless(is_one and (peers or ranks == 1), "messages to one neighbour", shown)


RING = Task(
    **kit.about("ddp.ring"),
    draw=draw_ring,
    observe=observe_ring,
    own={"tensors": entry},
    essential=("sum", "messages only", "bytes"),
    properties={
        "sum": Property(
            3, kit.equals("sum", lambda case: np.sum(case.inputs["tensors"], axis=0), on_all=True, tolerance=1e-9)
        ),
        "messages only": Property(1, from_messages),
        "to one neighbour": Property(2, to_neighbours),
        "bytes": Property(2, ring_bytes),
    },
)


# --- ddp.bucketing ---


def bucket_case(rng: random.Random, world: int) -> dict:
    sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(5, 9))]
    return {
        "gradients": [[numbers(rng, size) for size in sizes] for _ in range(world)],
        "bucket_bytes": 4 * sum(sizes[: rng.randrange(2, 4)]),
    }  # which the first bucket holds exactly


def observe_buckets(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = list(map(kit.tensor, case.inputs["gradients"][rank]))
    with Recorder() as record:
        function(gradients, case.inputs["bucket_bytes"])
    return kit.noted(record, gradients=torch.cat(gradients))


def buckets(case: Case) -> list[str]:
    sizes, filled = [], 0
    for gradient in case.inputs["gradients"][0]:
        filled += gradient.nbytes
        if filled >= case.inputs["bucket_bytes"]:
            sizes.append(filled)
            filled = 0
    return [f"all_reduce {size}" for size in sizes + [filled] * (filled > 0)]


def mean_of_lists(case: Case) -> np.ndarray:
    return np.mean([flat(gradients) for gradients in case.inputs["gradients"]], axis=0)


BUCKETING = Task(
    **kit.about("ddp.bucketing"),
    draw=each_world(bucket_case),
    observe=observe_buckets,
    own={"gradients": entry},
    essential=("mean", "buckets"),
    met=Met("mean", "gradients", lambda case: flat(case.inputs["gradients"][0])),
    properties={
        "mean": Property(3, kit.equals("gradients", mean_of_lists, on_all=True)),
        "buckets": Property(3, kit.made_are(buckets)),
    },
)


# --- ddp.overlap ---


def observe_overlap(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, gradients, stray = chain(case.inputs), [], 0.0
    with Recorder() as record:
        for number, parameter in enumerate(trained(model)):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: record.note(f"gradient {number}"))
        finish = function(model)
        for rows in case.inputs["rows"][rank]:
            model.zero_grad()
            record.note("backward")
            model(torch.from_numpy(rows)).square().mean().backward()
            record.note("finish")
            finish()
            record.note("end")
            gradients.append(gradients_of(model))
            stray = max(stray, elsewhere(model))
    return kit.noted(record, gradient=torch.stack(gradients), elsewhere=stray)


def leaves_early(case: Case, step: int, happened: list[str]) -> Miss | None:
    """All but the last all-reduce are issued before the last gradient is there."""
    due = len(trained(chain(case.inputs))) - 1
    last = max((i for i, event in enumerate(happened) if event.startswith("gradient")), default=0)
    early = kit.count(happened[:last], "all_reduce")
    return kit.unless(early >= due, f"{due} all-reduces begun before the last gradient of step {step}", f"{early}")


def waits_late(case: Case, step: int, happened: list[str]) -> Miss | None:
    waits = happened[: happened.index("finish") if "finish" in happened else None].count("wait")
    if not kit.count(happened, "all_reduce"):
        return Miss("all-reduces, and no wait for them before backward has ended", "no all-reduce")
    return kit.unless(not waits, f"no wait before backward has ended, in step {step}", f"{waits} waits")


def waits_for_all(case: Case, step: int, happened: list[str]) -> Miss | None:
    begun, ended = kit.count(happened, "all_reduce"), happened.count("wait")
    fits = begun and ended >= begun
    return kit.unless(fits, f"each of {begun or 'some'} all-reduces of step {step} waited for", f"{ended} waits")


OVERLAP = Task(
    **kit.about("ddp.overlap"),
    draw=draw_models,
    observe=observe_overlap,
    met=MET,
    own={"rows": entry},
    essential=("mean gradient", "leaves early", "does not block backward"),
    properties={
        "mean gradient": Property(3, mean_gradient),
        "leaves early": Property(2, kit.each_step(leaves_early, "backward", STEPS)),
        "does not block backward": Property(3, kit.each_step(waits_late, "backward", STEPS)),
        "waits for all": Property(1, kit.each_step(waits_for_all, "backward", STEPS)),
    },
)


# --- ddp.no_sync ---


def accumulation_case(rng: random.Random, world: int) -> dict:
    """Two steps of different numbers of micro-batches, of which one has a single one."""
    weights = widths(rng, 2)
    counts = rng.sample((1, rng.randrange(2, 5)), STEPS)
    return {
        "weights": weights,
        "rows": [
            [[numbers(rng, int(whole(rng, 1, 5)), weights[0].shape[1]) for _ in range(parts)] for parts in counts]
            for _ in range(world)
        ],
    }


def observe_accumulation(function: Callable[..., Any], case: Case, rank: int) -> dict:
    engine, gradients = DataParallel(chain(case.inputs)), []
    with Recorder() as record:
        for parts in case.inputs["rows"][rank]:
            engine.zero_grad()
            record.note("step")
            function(engine, [torch.from_numpy(rows) for rows in parts])
            gradients.append(gradients_of(engine))
    return kit.noted(record, gradient=torch.stack(gradients))


def sum_over_parts(case: Case) -> np.ndarray:
    made = []
    for steps in case.inputs["rows"]:
        own = []
        for parts in steps:
            model = chain(case.inputs)
            for rows in parts:
                (model(torch.from_numpy(rows)).square().mean() / len(parts)).backward()
            own.append(gradients_of(model).numpy())
        made.append(np.stack(own))
    return np.mean(made, axis=0)


@kit.each_rank
def at_the_end(case: Case, seen: Seen, rank: int) -> Miss | None:
    """One all-reduce of the whole gradient in each step."""
    right = ["step", f"all_reduce {4 * sum(weight.size for weight in case.inputs['weights'])}"] * STEPS
    made = [event for event in events(seen, rank) if event.split()[0] not in ("broadcast", "wait")]
    return kit.unless(made == right, kit.listed(right), kit.listed(made))


NO_SYNC = Task(
    **kit.about("ddp.no_sync"),
    draw=each_world(accumulation_case),
    observe=observe_accumulation,
    own={"rows": entry},
    essential=("gradient", "sent once"),
    properties={
        "gradient": Property(3, kit.equals("gradient", sum_over_parts, on_all=True)),
        "sent once": Property(2, at_the_end),
    },
)
