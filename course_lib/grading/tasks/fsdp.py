"""Lesson 06: weights that are whole only while they are used."""

import random
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, number
from course_lib.grading.task import Case, Miss, Property, Rule, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, numbers

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


draw_layers = each_world(layers_case, (2, 1), (2, None, "bfloat16"))
"""Some layers on each number of ranks, a model of one layer on two, and weights in two bytes."""


def shard(weight: np.ndarray, rank: int, ranks: int) -> Tensor:
    """A rank's run of a flattened weight, padded with zeros to a multiple of the ranks."""
    padded = np.zeros(-(-weight.size // ranks) * ranks, dtype=np.float32)
    padded[: weight.size] = weight.reshape(-1)
    return kit.tensor(np.split(padded, ranks)[rank])


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
        output = function(kit.tensor(case.inputs["rows"][rank]), shards, shapes, compute)
    return kit.noted(record, output=output, alive=alive)


def outputs(case: Case) -> list[np.ndarray]:
    made = []
    for x in case.inputs["rows"]:
        for weight in case.inputs["weights"]:
            x = np.tanh(x @ weight.T)
        made.append(x)
    return made


def gathers(case: Case) -> list[str]:
    """Each weight gathered once."""
    ranks, width = case.world_size, getattr(torch, case.inputs["dtype"]).itemsize
    return [f"all_gather {width * -(-weight.size // ranks) * ranks}" for weight in case.inputs["weights"]]


def before_each(seen: Seen, rank: int, name: str) -> list[int]:
    """How many events of a name there were before each layer computed."""
    happened = events(seen, rank)
    return [kit.count(happened[:place], name) for place, event in enumerate(happened) if event == "compute"]


def gathered_ahead(ahead: int) -> Rule:
    """Rule: when layer i computes, it and ``ahead`` more layers have begun to be gathered."""

    @kit.each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        layers, begun = len(case.inputs["weights"]), before_each(seen, rank, "all_gather")
        for layer, issued in enumerate(begun):
            due = min(layer + 1 + ahead, layers)
            if issued != due:
                return Miss(f"{due} gathers begun when layer {layer} computes", f"{issued}")
        return kit.unless(len(begun) == layers, f"{layers} layers computed", f"{len(begun)}")

    return rule


@kit.each_rank
def let_go(case: Case, seen: Seen, rank: int) -> Miss | None:
    alive = number(seen, rank, "alive")
    return kit.unless(alive == 1, "used weights freed: one alive while a layer computes", f"{alive:.0f}")


@kit.each_rank
def waits_when_due(case: Case, seen: Seen, rank: int) -> Miss | None:
    """When layer i computes, no more than i + 1 gathers have been waited for."""
    waits = before_each(seen, rank, "wait")
    for layer, waited in enumerate(waits):
        if waited != layer + 1:
            return Miss(f"{layer + 1} gathers waited for when layer {layer} computes", f"{waited}")
    return kit.unless(waits, "layers that compute", "none")


def forward_task(name: str, essential: tuple[str, ...], freed: int, properties: dict[str, Property]) -> Task:
    """A forward pass by gathered weights, with the properties that say when they are gathered."""
    return Task(
        **kit.about(name),
        draw=draw_layers,
        observe=observe_forward,
        own={"weights": shards_alone, "rows": entry},
        essential=("output", *essential),
        properties={
            "output": Property(2, kit.equals("output", outputs)),
            "each gathered once": Property(1, kit.made_are(gathers)),
            "freed": Property(freed, let_go),
            **properties,
        },
    )


GATHER = forward_task(
    "fsdp.gather", ("freed", "one layer at a time"), 2, {"one layer at a time": Property(2, gathered_ahead(0))}
)
PREFETCH = forward_task(
    "fsdp.prefetch",
    ("one layer ahead", "does not block"),
    1,
    {"one layer ahead": Property(2, gathered_ahead(1)), "does not block": Property(2, waits_when_due)},
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
    gradients = list(map(kit.tensor, case.inputs["gradients"][rank]))
    with Recorder() as record:
        norm = function(gradients, case.inputs["max_norm"])
    return kit.noted(record, norm=norm, gradients=torch.cat(gradients))


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
    **kit.about("fsdp.clip"),
    draw=draw_clip,
    observe=observe_clip,
    own={"gradients": entry},
    essential=("norm", "scaled"),
    properties={
        "norm": Property(2, kit.equals("norm", norm, on_all=True)),
        "scaled": Property(2, kit.equals("gradients", clipped)),
        "few bytes": Property(1, kit.few_bytes(16)),
    },
)
