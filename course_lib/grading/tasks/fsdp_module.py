"""Lesson 06, to build: a layer that keeps its shard alone, with its backward."""

import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, events, items, number, result, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.fsdp import shard

LESSON = "06_fsdp"
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


def draw_sharded(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    return [Case(world, sharded_case(rng, world)) for world in worlds]


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
    layers = [function(torch.from_numpy(weight.copy())) for weight in given["weights"]]
    layers[given["frozen"]].shard.requires_grad_(False)
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
            first = x = torch.from_numpy(rows.copy()).requires_grad_()
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
            steps["gradients"].append(
                np.concatenate(
                    [
                        plain(torch.zeros_like(layer.shard) if layer.shard.grad is None else layer.shard.grad)
                        for layer in layers
                    ]
                )
            )
            with torch.no_grad():
                for layer in layers:
                    if layer.shard.grad is not None:
                        layer.shard.sub_(RATE * layer.shard.grad)
    return {
        **{name: np.stack(arrays) for name, arrays in steps.items()},
        "parameters": parameters,
        "kept": kept,
        "saved": saved,
        "events": record.events,
    }


def by_whole_weights(case: Case) -> dict[str, list[np.ndarray]]:
    """Outputs, gradients of x and each rank's shards of the mean gradients, by weights that are whole."""
    given, world = case.inputs, case.world_size
    weights = [
        torch.from_numpy(weight.copy()).requires_grad_(i != given["frozen"])
        for i, weight in enumerate(given["weights"])
    ]
    outputs: list[list[np.ndarray]] = [[] for _ in range(world)]
    of_x: list[list[np.ndarray]] = [[] for _ in range(world)]
    shards: list[list[np.ndarray]] = [[] for _ in range(world)]
    for step in range(STEPS):
        for weight in weights:
            weight.grad = None
        for rank in range(world):
            first = x = torch.from_numpy(given["rows"][rank][step].copy()).requires_grad_()
            for number_ in given["order"]:
                x = torch.tanh(x @ weights[number_].T)
            x.square().sum().backward()
            assert first.grad is not None
            outputs[rank].append(x.detach().numpy())
            of_x[rank].append(first.grad.numpy())
        means = [np.zeros(w.shape, np.float32) if w.grad is None else w.grad.numpy() / world for w in weights]
        for rank in range(world):
            shards[rank].append(np.concatenate([shard(mean, rank, world).numpy() for mean in means]))
        with torch.no_grad():
            for weight, mean in zip(weights, means, strict=True):
                weight.sub_(RATE * torch.from_numpy(mean))
    return {
        "output": [np.stack(mine) for mine in outputs],
        "x": [np.stack(mine) for mine in of_x],
        "gradients": [np.stack(mine) for mine in shards],
    }


def as_due(case: Case, seen: Seen) -> Miss | None:
    """Forward a gather for each use; backward, in turn, a gather and, unless it is frozen, a reduce-scatter."""
    given, world = case.inputs, case.world_size
    size = 4 * world * -(-given["weights"][0].size // world)
    gather, scatter = f"all_gather {size}", f"reduce_scatter {size}"
    right = ["forward", *[gather] * len(given["order"]), "backward"]
    for number_ in reversed(given["order"]):
        right += [gather] + [scatter] * (number_ != given["frozen"])
    for rank in range(world):
        made = [event for event in events(seen, rank) if event.split()[0] in (*NAMES, "forward", "backward")]
        if made != right * STEPS:
            at = next((i for i, (a, b) in enumerate(zip(made, right * STEPS, strict=False)) if a != b), len(made))
            return Miss(
                f"{short(', '.join((right * STEPS)[at : at + 3]))} as event {at}",
                short(", ".join(made[at : at + 3]) or "nothing more"),
                rank,
            )
    return None


def let_go(case: Case, seen: Seen) -> Miss | None:
    """Between the uses of a weight nobody has it whole: no tensor, and nothing that autograd saved."""
    size = case.inputs["weights"][0].size
    run = -(-size // case.world_size)
    for rank in range(case.world_size):
        held = items(seen, rank, "parameters", int)
        if held != [run] * len(case.inputs["weights"]):
            return Miss(f"parameters of {run} elements in each layer", short(held), rank)
        kept, saved = number(seen, rank, "kept"), number(seen, rank, "saved")
        if case.world_size > 1 and (kept > 0 or saved >= size):
            what = f"{kept:.0f} tensors as large as a weight" if kept else "a whole weight, saved for backward"
            return Miss("no whole weight kept from forward to backward", what, rank)
    return None


MODULE = Task(
    name="fsdp.module",
    lesson=LESSON,
    function="ShardedLinear",
    title="Build it: a sharded layer with its backward",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=draw_sharded,
    observe=observe_sharded,
    own={"rows": entry},
    essential=("gradients", "freed"),
    properties={
        "output": Property(2, result("output", lambda case: by_whole_weights(case)["output"], first_step=0)),
        "gradient of x": Property(2, result("x", lambda case: by_whole_weights(case)["x"], first_step=0)),
        "gradients": Property(3, result("gradients", lambda case: by_whole_weights(case)["gradients"], first_step=0)),
        "collectives": Property(2, as_due),
        "freed": Property(3, let_go),
    },
)

ALL = (MODULE,)
