"""Lesson 02: the mean of all ranks' gradients, by a ring, in buckets, while backward runs, and only when it is due."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, calls, events, made_by, near, only, result, short, waited_for
from course_lib.grading.task import Case, Met, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import each_world, entry, numbers, whole
from course_lib.grading.tasks.models import (
    STEPS,
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

LESSON = "02_data_parallel"


# --- ddp.average ---


def observe_average(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, gradients, stray = chain(case.inputs), [], 0.0
    with Recorder() as record:
        for _ in backwards(model, case.inputs["rows"][rank]):
            function(model)
            gradients.append(gradients_of(model).clone())
            stray = max(stray, elsewhere(model))
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in trained(model)])
    return {
        "gradient": plain(torch.stack(gradients)),
        "elsewhere": stray,
        "weights": plain(weights),
        "events": record.events,
    }


def weights_of(case: Case) -> np.ndarray:
    """Trained weights, one behind the other, before the first step."""
    return flat([parameter.detach().numpy() for parameter in trained(chain(case.inputs))])


def sends_each_once(case: Case, seen: Seen) -> Miss | None:
    """All-reduces that carry the gradient's bytes, once in each step."""
    size = STEPS * weights_of(case).nbytes
    for rank in range(case.world_size):
        if sum(calls(seen, rank, "all_reduce")) != size or len(calls(seen, rank, "all_reduce")) != len(
            made_by(seen, rank)
        ):
            return Miss(f"all_reduce of {size} bytes in all", short(", ".join(made_by(seen, rank)) or "nothing"), rank)
    return None


def weights_untouched(case: Case, seen: Seen) -> Miss | None:
    """The weights are as they were, though something was sent."""
    for rank in range(case.world_size):
        if not made_by(seen, rank):
            return Miss("gradients averaged, weights as they were", "nothing was sent", rank)
    return near(seen, "weights", [weights_of(case)] * case.world_size, 0)


MET = Met("mean gradient", "gradient", lambda case: local_gradients(case)[0])

AVERAGE = Task(
    name="ddp.average",
    lesson=LESSON,
    function="average_gradients",
    title="The mean of all ranks' gradients",
    difficulty=1,
    importance=5,
    minutes=10,
    draw=draw_models,
    observe=observe_average,
    met=MET,
    own={"rows": entry},
    essential=("mean gradient",),
    properties={
        "mean gradient": Property(3, mean_gradient()),
        "weights untouched": Property(1, weights_untouched),
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
    tensor = torch.from_numpy(case.inputs["tensors"][rank].copy())
    with Recorder() as record:
        function(tensor)
    return {"sum": plain(tensor), "events": record.events}


def from_messages(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        if case.world_size > 1 and not made_by(seen, rank):
            return Miss("sends and receives", "nothing", rank)
        others = [event for event in made_by(seen, rank) if event.split()[0] not in ("send", "recv")]
        if others:
            return Miss("sends and receives", others[0], rank)
        if miss := waited_for(events(seen, rank), rank):
            return miss
    return None


def ring_bytes(case: Case, seen: Seen) -> Miss | None:
    ranks, size = case.world_size, case.inputs["tensors"][0].nbytes
    part = case.inputs["tensors"][0].itemsize * -(-case.inputs["tensors"][0].size // ranks)
    limit = 2 * (ranks - 1) * part
    for rank in range(ranks):
        sent = sum(calls(seen, rank, "send"))
        if sent > limit or (ranks > 1 and sent < limit - 16 * ranks):
            return Miss(f"about {limit} bytes sent, 2 (N - 1) / N of {size}", f"{sent}", rank)
    return None


def to_neighbours(case: Case, seen: Seen) -> Miss | None:
    ranks = case.world_size
    for rank in range(ranks):
        peers = {event.split()[-1] for event in events(seen, rank) if event.startswith("send ")}
        if peers - {str((rank + 1) % ranks)} and peers - {str((rank - 1) % ranks)}:
            return Miss("messages to one neighbour", f"to ranks {', '.join(sorted(peers))}", rank)
        if ranks > 1 and not peers:
            return Miss("messages to one neighbour", "none", rank)
    return None


RING = Task(
    name="ddp.ring",
    lesson=LESSON,
    function="ring_all_reduce",
    title="All-reduce by a ring",
    difficulty=4,
    importance=4,
    minutes=35,
    draw=draw_ring,
    observe=observe_ring,
    own={"tensors": entry},
    essential=("sum", "messages only", "bytes"),
    properties={
        "sum": Property(
            3, result("sum", lambda case: [np.sum(case.inputs["tensors"], axis=0)] * case.world_size, 1e-9)
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
    gradients = [torch.from_numpy(gradient.copy()) for gradient in case.inputs["gradients"][rank]]
    with Recorder() as record:
        function(gradients, case.inputs["bucket_bytes"])
    return {"gradients": plain(torch.cat(gradients)), "events": record.events}


def bucket_sizes(case: Case) -> list[int]:
    sizes, filled = [], 0
    for gradient in case.inputs["gradients"][0]:
        filled += gradient.nbytes
        if filled >= case.inputs["bucket_bytes"]:
            sizes.append(filled)
            filled = 0
    return sizes + [filled] * (filled > 0)


def mean_of_lists(case: Case) -> list[np.ndarray]:
    return [np.mean([flat(gradients) for gradients in case.inputs["gradients"]], axis=0)] * case.world_size


BUCKETING = Task(
    name="ddp.bucketing",
    lesson=LESSON,
    function="reduce_in_buckets",
    title="Many small gradients, few messages",
    difficulty=3,
    importance=4,
    minutes=25,
    draw=each_world(bucket_case),
    observe=observe_buckets,
    own={"gradients": entry},
    essential=("mean", "buckets"),
    met=Met("mean", "gradients", lambda case: flat(case.inputs["gradients"][0])),
    properties={
        "mean": Property(3, result("gradients", mean_of_lists)),
        "buckets": Property(3, only("all_reduce", bucket_sizes)),
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
            gradients.append(gradients_of(model).clone())
            stray = max(stray, elsewhere(model))
    return {"gradient": plain(torch.stack(gradients)), "elsewhere": stray, "events": record.events}


def by_step(seen: Seen, rank: int) -> list[list[str]]:
    """A rank's events from each backward to the end of its ``finish()``."""
    steps: list[list[str]] = []
    for event in events(seen, rank):
        if event == "backward":
            steps.append([])
        if steps:
            steps[-1].append(event)
    return steps if len(steps) == STEPS else [[] for _ in range(STEPS)]


def leaves_early(case: Case, seen: Seen) -> Miss | None:
    """In each step all but the last all-reduce are issued before the last gradient is there."""
    due = len(trained(chain(case.inputs))) - 1
    for rank in range(case.world_size):
        for step, happened in enumerate(by_step(seen, rank)):
            last = max((i for i, event in enumerate(happened) if event.startswith("gradient")), default=0)
            early = sum(event.startswith("all_reduce") for event in happened[:last])
            if early < due:
                return Miss(f"{due} all-reduces begun before the last gradient of step {step}", f"{early}", rank)
    return None


def waits_late(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        for step, happened in enumerate(by_step(seen, rank)):
            middle = happened[: happened.index("finish")] if "finish" in happened else happened
            if not any(event.startswith("all_reduce") for event in happened):
                return Miss("all-reduces, and no wait for them before backward has ended", "no all-reduce", rank)
            if "wait" in middle:
                return Miss(f"no wait before backward has ended, in step {step}", f"{middle.count('wait')} waits", rank)
    return None


def waits_for_all(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        for step, happened in enumerate(by_step(seen, rank)):
            begun, ended = sum(event.startswith("all_reduce") for event in happened), happened.count("wait")
            if ended < begun or not begun:
                return Miss(f"each of {begun or 'some'} all-reduces of step {step} waited for", f"{ended} waits", rank)
    return None


OVERLAP = Task(
    name="ddp.overlap",
    lesson=LESSON,
    function="attach",
    title="Send while backward still runs",
    difficulty=4,
    importance=5,
    minutes=30,
    draw=draw_models,
    observe=observe_overlap,
    met=MET,
    own={"rows": entry},
    essential=("mean gradient", "leaves early", "does not block backward"),
    properties={
        "mean gradient": Property(3, mean_gradient()),
        "leaves early": Property(2, leaves_early),
        "does not block backward": Property(3, waits_late),
        "waits for all": Property(1, waits_for_all),
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
            gradients.append(gradients_of(engine).clone())
    return {"gradient": plain(torch.stack(gradients)), "events": record.events}


def sum_over_parts(case: Case) -> list[np.ndarray]:
    made = []
    for steps in case.inputs["rows"]:
        own = []
        for parts in steps:
            model = chain(case.inputs)
            for rows in parts:
                (model(torch.from_numpy(rows)).square().mean() / len(parts)).backward()
            own.append(gradients_of(model).numpy())
        made.append(np.stack(own))
    return [np.mean(made, axis=0)] * case.world_size


def at_the_end(case: Case, seen: Seen) -> Miss | None:
    """One all-reduce of the whole gradient in each step."""
    right = ["step", f"all_reduce {4 * sum(weight.size for weight in case.inputs['weights'])}"] * STEPS
    for rank in range(case.world_size):
        made = [event for event in events(seen, rank) if event.split()[0] not in ("broadcast", "wait")]
        if made != right:
            return Miss(short(", ".join(right)), short(", ".join(made) or "no collective"), rank)
    return None


NO_SYNC = Task(
    name="ddp.no_sync",
    lesson=LESSON,
    function="accumulate",
    title="Accumulate, and send once",
    difficulty=2,
    importance=5,
    minutes=15,
    draw=each_world(accumulation_case),
    observe=observe_accumulation,
    own={"rows": entry},
    essential=("gradient", "sent once"),
    properties={"gradient": Property(3, result("gradient", sum_over_parts)), "sent once": Property(2, at_the_end)},
)

ALL = (AVERAGE, RING, BUCKETING, OVERLAP, NO_SYNC)
