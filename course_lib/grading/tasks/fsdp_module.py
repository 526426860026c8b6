"""Lesson 06, to build: a layer that keeps its shard alone, with its backward."""

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, events, items, number, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, numbers
from course_lib.grading.tasks.fsdp import shard
from course_lib.grading.tasks.models import all_gradients, descend

STEPS = 2
RATE = 0.25
ROWS = 2
NAPS = 20


def sharded_case(rng: random.Random, world: int) -> dict:
    """Layers of which one is frozen and one is used twice; each weight is far larger than what flows through it."""
    width = rng.randrange(9, 12)
    return {
        "weights": [numbers(rng, width, width) / 4 for _ in range(3)],
        "order": [0, 1, 2, 1],
        "frozen": rng.choice((0, 2)),
        "rows": [[numbers(rng, ROWS, width) for _ in range(STEPS)] for _ in range(world)],
    }


def whole_weights(sizes: range) -> int:
    """Number of living tensors with memory for so many numbers that are no layer's own parameter."""
    seen = set()
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not isinstance(thing, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            if thing.is_floating_point() and storage.nbytes() // thing.element_size() in sizes:
                seen.add(storage.data_ptr())
    return len(seen)


def kept_since(before: int, sizes: range) -> int:
    """Number of tensors beyond ``before``; what a cycle keeps, or gloo's thread for a moment, does not count."""
    for _ in range(NAPS):
        if whole_weights(sizes) <= before:
            return 0
        gc.collect()
        time.sleep(0.01)  # gloo's thread needs a core, too: on a busy machine a nap takes longer
    return max(0, whole_weights(sizes) - before)


def observe_sharded(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    size = given["weights"][0].size
    sizes = range(size, size + case.world_size)  # with its padding
    before = whole_weights(sizes)
    layers = [function(kit.tensor(weight)) for weight in given["weights"]]
    layers[given["frozen"]].shard.requires_grad_(False)
    shards = [layer.shard for layer in layers]
    parameters = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    steps: dict[str, list[np.ndarray]] = {"output": [], "x": [], "gradients": []}  # tensors of ours would be counted
    kept = saved = 0

    def noted(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved = max(saved, tensor.untyped_storage().nbytes() // 4)
        return tensor

    with Recorder() as record:
        for rows in given["rows"][rank]:
            for layer in layers:
                layer.zero_grad()
            first = x = kit.tensor(rows).requires_grad_()
            record.note("forward")
            with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
                for number_ in given["order"]:
                    x = torch.tanh(layers[number_](x))
            kept = max(kept, kept_since(before, sizes))
            record.note("backward")
            x.square().sum().backward()
            kept = max(kept, kept_since(before, sizes))
            steps["output"].append(plain(x))
            steps["x"].append(plain(first.grad))
            steps["gradients"].append(plain(all_gradients(shards)))
            descend(shards, RATE)
    arrays = {name: np.stack(values) for name, values in steps.items()}
    return kit.noted(record, parameters=parameters, kept=kept, saved=saved, **arrays)


def by_whole_weights(case: Case) -> dict[str, list[np.ndarray]]:
    """Outputs, gradients of x and each rank's shards of the mean gradients, by weights that are whole."""
    given, world = case.inputs, case.world_size
    weights = [kit.tensor(weight).requires_grad_(i != given["frozen"]) for i, weight in enumerate(given["weights"])]
    made: dict[str, list[list[Any]]] = {name: [[] for _ in range(world)] for name in ("output", "x", "gradients")}
    for step in range(STEPS):
        for weight in weights:
            weight.grad = None
        for rank in range(world):
            first = x = kit.tensor(given["rows"][rank][step]).requires_grad_()
            for number_ in given["order"]:
                x = torch.tanh(x @ weights[number_].T)
            x.square().sum().backward()
            made["output"][rank].append(plain(x))
            made["x"][rank].append(plain(first.grad))
        means = [np.zeros(w.shape, np.float32) if w.grad is None else w.grad.numpy() / world for w in weights]
        for rank in range(world):
            made["gradients"][rank].append(np.concatenate([shard(mean, rank, world).numpy() for mean in means]))
        descend(weights, RATE / world)
    return {name: list(map(np.stack, by_rank)) for name, by_rank in made.items()}


def by_step(key: str) -> Rule:
    return kit.equals(key, by_whole_weights, of=key, first_step=0)


@kit.each_rank
def as_due(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Forward a gather for each use; backward, in turn, a gather and, unless it is frozen, a reduce-scatter."""
    given, world = case.inputs, case.world_size
    size = 4 * world * -(-given["weights"][0].size // world)
    gather, scatter = f"all_gather {size}", f"reduce_scatter {size}"
    right = ["forward", *[gather] * len(given["order"]), "backward"]
    for number_ in reversed(given["order"]):
        right += [gather] + [scatter] * (number_ != given["frozen"])
    made = [event for event in events(seen, rank) if event.split()[0] in (*NAMES, "forward", "backward")]
    return kit.first_apart(right * STEPS, made)


@kit.each_rank
def let_go(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Between the uses of a weight nobody has it whole: no tensor, and nothing that autograd saved."""
    size, held = case.inputs["weights"][0].size, items(seen, rank, "parameters", int)
    run = -(-size // case.world_size)
    if held != [run] * len(case.inputs["weights"]):
        return Miss(f"parameters of {run} elements in each layer", short(held))
    kept, saved = number(seen, rank, "kept"), number(seen, rank, "saved")
    fits = case.world_size == 1 or (kept <= 0 and saved < size)
    what = f"{kept:.0f} tensors as large as a weight" if kept else "a whole weight, saved for backward"
    return kit.unless(fits, "no whole weight kept from forward to backward", what)


MODULE = Task(
    **kit.about("fsdp.module"),
    draw=each_world(sharded_case),
    observe=observe_sharded,
    own={"rows": entry},
    essential=("gradients", "freed"),
    properties={
        "output": Property(2, by_step("output")),
        "gradient of x": Property(2, by_step("x")),
        "gradients": Property(3, by_step("gradients")),
        "collectives": Property(2, as_due),
        "freed": Property(3, let_go),
    },
)
