"""Lesson 06: weights that are whole only while they are used."""

import random
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, events, number, result, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, each_world, entry, numbers
from course_lib.grading.tasks.prepared import few_bytes

LESSON = "06_fsdp"
NAPS = 200


def layers_case(rng: random.Random, world: int, layers: int | None = None, dtype: str = "float32") -> dict:
    """On three ranks or more the last one has nothing but padding of the first weight."""
    sizes = [rng.randrange(2, 6) for _ in range((layers or rng.randrange(3, 6)) + 1)]
    if world > 2:
        sizes[:2] = (2, 2) if world == 3 else (3, 3)
    return {
        "weights": [numbers(rng, after, before).clip(-3.5, 3.5) for before, after in pairwise(sizes)],
        "rows": [numbers(rng, 3, sizes[0]) for _ in range(world)],
        "dtype": dtype,
    }


def draw_layers(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Some layers on each number of ranks, a model of one layer on two, and weights in two bytes."""
    return [
        *each_world(layers_case)(rng, worlds),
        Case(2, layers_case(rng, 2, layers=1)),
        Case(2, layers_case(rng, 2, dtype="bfloat16")),
    ]


def shard(weight: np.ndarray, rank: int, ranks: int) -> Tensor:
    """A rank's run of a flattened weight, padded with zeros to a multiple of the ranks."""
    padded = np.zeros(-(-weight.size // ranks) * ranks, dtype=np.float32)
    padded[: weight.size] = weight.reshape(-1)
    return torch.from_numpy(np.split(padded, ranks)[rank].copy())


def shards_alone(weights: list[np.ndarray], rank: int, ranks: int) -> list[np.ndarray]:
    """The weights in their shapes, with zeros where another rank's shard lies."""
    shares = []
    for weight in weights:
        run = -(-weight.size // ranks)
        mine = (np.arange(weight.size) // run == rank).reshape(weight.shape)
        shares.append(np.where(mine, weight, np.float32(0)))
    return shares


def living(storages: list[weakref.ref]) -> int:
    """Number of storages that still hold memory."""
    held = {id(storage): storage.nbytes() for storage in (reference() for reference in storages) if storage is not None}
    return sum(size > 0 for size in held.values())


def observe_forward(function: Callable[..., Any], case: Case, rank: int) -> dict:
    shapes = [weight.shape for weight in case.inputs["weights"]]
    dtype = getattr(torch, case.inputs["dtype"])
    shards = [shard(weight, rank, case.world_size).to(dtype) for weight in case.inputs["weights"]]
    own = {tensor.untyped_storage().data_ptr() for tensor in shards}
    storages: list[weakref.ref] = []
    alive = 0

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        nonlocal alive
        record.note("compute")
        storage = weight.untyped_storage()
        if case.world_size > 1 and storage.data_ptr() in own:
            raise ValueError("compute() was given a shard, not a whole weight")
        if weight.dtype != dtype:
            raise ValueError(f"compute() was given a weight of {weight.dtype}, made of shards of {dtype}")
        storages.append(weakref.ref(storage))
        for _ in range(NAPS):  # gloo's thread lets go of a tensor a moment after wait() has returned
            if (now := living(storages)) <= 1:
                break
            time.sleep(0.001)
        alive = max(alive, now)
        result = torch.tanh(x @ weight.float().T)
        record.note("computed")
        return result

    with Recorder() as record:
        output = function(torch.from_numpy(case.inputs["rows"][rank].copy()), shards, shapes, compute)
    return {"output": plain(output), "events": record.events, "alive": alive}


def outputs(case: Case) -> list[np.ndarray]:
    made = []
    for x in case.inputs["rows"]:
        for weight in case.inputs["weights"]:
            x = np.tanh(x @ weight.T)
        made.append(x)
    return made


def each_gathered_once(case: Case, seen: Seen) -> Miss | None:
    ranks = case.world_size
    width = getattr(torch, case.inputs["dtype"]).itemsize
    right = [f"all_gather {width * -(-weight.size // ranks) * ranks}" for weight in case.inputs["weights"]]
    for rank in range(ranks):
        issued = [event for event in events(seen, rank) if event.split()[0] in NAMES]
        if issued != right:
            return Miss(short(", ".join(right)), short(", ".join(issued) or "no collective"), rank)
    return None


def gathered_ahead(ahead: int) -> Rule:
    """Rule: when layer i computes, it and ``ahead`` more layers have begun to be gathered."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        layers = len(case.inputs["weights"])
        for rank in range(case.world_size):
            issued = computed = 0
            for event in events(seen, rank):
                issued += event.startswith("all_gather")
                if event == "compute":
                    due = min(computed + 1 + ahead, layers)
                    if issued != due:
                        return Miss(f"{due} gathers begun when layer {computed} computes", f"{issued}", rank)
                    computed += 1
            if computed != layers:
                return Miss(f"{layers} layers computed", f"{computed}", rank)
        return None

    return rule


def let_go(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        alive = number(seen, rank, "alive")
        if alive != 1:
            return Miss("used weights freed: one alive while a layer computes", f"{alive:.0f}", rank)
    return None


def waits_when_due(case: Case, seen: Seen) -> Miss | None:
    """Rule: when layer i computes, no more than i + 1 gathers have been waited for."""
    for rank in range(case.world_size):
        waited = computed = 0
        for event in events(seen, rank):
            waited += event == "wait"
            if event == "compute":
                computed += 1
                if waited != computed:
                    return Miss(f"{computed} gathers waited for when layer {computed - 1} computes", f"{waited}", rank)
        if not computed:
            return Miss("layers that compute", "none", rank)
    return None


GATHER = Task(
    name="fsdp.gather",
    lesson=LESSON,
    function="sharded_forward",
    title="Gather, compute, free",
    difficulty=3,
    importance=5,
    minutes=25,
    draw=draw_layers,
    observe=observe_forward,
    own={"weights": shards_alone, "rows": entry},
    essential=("output", "freed", "one layer at a time"),
    properties={
        "output": Property(2, result("output", outputs)),
        "each gathered once": Property(1, each_gathered_once),
        "freed": Property(2, let_go),
        "one layer at a time": Property(2, gathered_ahead(0)),
    },
)

PREFETCH = Task(
    name="fsdp.prefetch",
    lesson=LESSON,
    function="prefetching_forward",
    title="Gather the next layer ahead of time",
    difficulty=4,
    importance=4,
    minutes=25,
    draw=draw_layers,
    observe=observe_forward,
    own={"weights": shards_alone, "rows": entry},
    essential=("output", "one layer ahead", "does not block"),
    properties={
        "output": Property(2, result("output", outputs)),
        "each gathered once": Property(1, each_gathered_once),
        "freed": Property(1, let_go),
        "one layer ahead": Property(2, gathered_ahead(1)),
        "does not block": Property(2, waits_when_due),
    },
)


# --- fsdp.clip ---


def clip_case(rng: random.Random, world: int) -> dict:
    sizes = [rng.randrange(1, 8) for _ in range(3)]
    return {
        "gradients": [
            [numbers(rng, size * (world < 3 or rank < world - 1)) for size in sizes] for rank in range(world)
        ],
        "max_norm": rng.choice((0.5, 1.0, 1000.0)),
    }


def observe_clip(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = [torch.from_numpy(gradient.copy()) for gradient in case.inputs["gradients"][rank]]
    with Recorder() as record:
        norm = function(gradients, case.inputs["max_norm"])
    return {"norm": plain(norm), "gradients": plain(torch.cat(gradients)), "events": record.events}


def norm(case: Case) -> float:
    return float(np.linalg.norm(np.concatenate([gradient for mine in case.inputs["gradients"] for gradient in mine])))


def clipped(case: Case) -> list[np.ndarray]:
    factor = min(1.0, case.inputs["max_norm"] / norm(case))
    return [factor * np.concatenate(mine) for mine in case.inputs["gradients"]]


def draw_clip(rng: random.Random, worlds: Any = (1, 2, 3)) -> list[Case]:
    """Each world size with a limit that cuts and with one that does not."""
    cases = each_world(clip_case)(rng, [world for world in worlds for _ in range(2)])
    for place, case in enumerate(cases):
        case.inputs["max_norm"] = (0.5, 1000.0)[place % 2]
    return cases


CLIP = Task(
    name="fsdp.clip",
    lesson=LESSON,
    function="clip",
    title="Clip by the norm of all shards",
    difficulty=2,
    importance=4,
    minutes=15,
    draw=draw_clip,
    observe=observe_clip,
    own={"gradients": entry},
    essential=("norm", "scaled"),
    properties={
        "norm": Property(2, result("norm", lambda case: [norm(case)] * case.world_size)),
        "scaled": Property(2, result("gradients", clipped)),
        "few bytes": Property(1, few_bytes(16)),
    },
)

ALL = (GATHER, PREFETCH, CLIP)
