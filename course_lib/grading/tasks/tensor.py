"""Lesson 08: layers that several ranks share, and who is who on the rank grid."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, made_by, result, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import alone, along, each_world, numbers, whole

LESSON = "08_tensor_and_hybrid"


# --- tensor.mlp ---


def mlp_case(rng: random.Random, world: int) -> dict:
    width, hidden = rng.randrange(2, 5), world * rng.randrange(1, 4)
    return {"x": numbers(rng, 3, width), "up": numbers(rng, hidden, width), "down": numbers(rng, width, hidden)}


def observe_mlp(function: Callable[..., Any], case: Case, rank: int) -> dict:
    x = torch.from_numpy(case.inputs["x"].copy()).requires_grad_()
    up = nn.Parameter(torch.from_numpy(np.split(case.inputs["up"], case.world_size)[rank].copy()))
    down = nn.Parameter(torch.from_numpy(np.split(case.inputs["down"], case.world_size, axis=1)[rank].copy()))
    with Recorder() as record:
        output = function(x, up, down)
        record.note("backward")
        output.square().sum().backward()
    return {
        "output": plain(output),
        "x": plain(x.grad),
        "up": plain(up.grad),
        "down": plain(down.grad),
        "events": record.events,
    }


def by_one(case: Case) -> dict[str, np.ndarray]:
    x, up, down = (torch.from_numpy(case.inputs[key].copy()).requires_grad_() for key in ("x", "up", "down"))
    output = torch.tanh(x @ up.T) @ down.T
    output.square().sum().backward()
    return {
        "output": output.detach().numpy(),
        **{
            name: leaf.grad.numpy()
            for name, leaf in zip(("x", "up", "down"), (x, up, down), strict=True)
            if leaf.grad is not None
        },
    }


def pieces_right(case: Case, seen: Seen) -> Miss | None:
    whole_gradients = by_one(case)
    return result("up", lambda case: np.split(whole_gradients["up"], case.world_size))(case, seen) or result(
        "down", lambda case: np.split(whole_gradients["down"], case.world_size, axis=1)
    )(case, seen)


def one_each_way(case: Case, seen: Seen) -> Miss | None:
    size = case.inputs["x"].nbytes
    right = [f"all_reduce {size}", "backward", f"all_reduce {size}"]
    for rank in range(case.world_size):
        issued = [event for event in events(seen, rank) if event != "wait"]
        if issued != right:
            return Miss(", ".join(right), short(", ".join(issued)), rank)
    return None


MLP = Task(
    name="tensor.mlp",
    lesson=LESSON,
    function="split_mlp",
    title="Columns, then rows",
    difficulty=4,
    importance=5,
    minutes=35,
    draw=each_world(mlp_case),
    observe=observe_mlp,
    own={"up": along(0), "down": along(1)},
    essential=("output", "gradient of x"),
    properties={
        "output": Property(2, result("output", lambda case: [by_one(case)["output"]] * case.world_size)),
        "gradient of x": Property(2, result("x", lambda case: [by_one(case)["x"]] * case.world_size)),
        "gradients of the pieces": Property(1, pieces_right),
        "one all-reduce each way": Property(2, one_each_way),
    },
)


# --- tensor.embedding ---


def embedding_case(rng: random.Random, world: int) -> dict:
    """On an even number of ranks the first has all rows that are asked for."""
    own = rng.randrange(2, 5)
    return {
        "table": numbers(rng, world * own, rng.randrange(2, 5)),
        "ids": whole(rng, 0, own if world % 2 == 0 else world * own, 2, 6),
    }


def observe_embedding(function: Callable[..., Any], case: Case, rank: int) -> dict:
    rows = torch.from_numpy(np.split(case.inputs["table"], case.world_size)[rank].copy())
    with Recorder() as record:
        vectors = function(torch.from_numpy(case.inputs["ids"].copy()), rows)
    return {"vectors": plain(vectors), "events": record.events}


def no_table_sent(case: Case, seen: Seen) -> Miss | None:
    size = case.inputs["ids"].size * case.inputs["table"][0].nbytes
    for rank in range(case.world_size):
        if (issued := made_by(seen, rank)) != [f"all_reduce {size}"]:
            return Miss(f"all_reduce {size}", short(", ".join(issued) or "no collective"), rank)
    return None


EMBEDDING = Task(
    name="tensor.embedding",
    lesson=LESSON,
    function="split_embedding",
    title="A table that nobody has whole",
    difficulty=2,
    importance=3,
    minutes=15,
    draw=each_world(embedding_case),
    observe=observe_embedding,
    own={"table": along(0)},
    essential=("vectors", "one all-reduce"),
    properties={
        "vectors": Property(
            3, result("vectors", lambda case: [case.inputs["table"][case.inputs["ids"]]] * case.world_size)
        ),
        "one all-reduce": Property(1, no_table_sent),
    },
)


# --- tensor.cross_entropy ---


def entropy_case(rng: random.Random, world: int) -> dict:
    """On an even number of ranks the first has all targets."""
    own = rng.randrange(4, 9)
    return {"logits": numbers(rng, 5, world * own), "targets": whole(rng, 0, own if world % 2 == 0 else world * own, 5)}


def draw_entropy(rng: random.Random, worlds: Any = (1, 2, 3)) -> list[Case]:
    """Each world size with small logits, and one case with large ones: exp(1000) is more than float64 holds."""
    cases = [Case(world, {**entropy_case(rng, world)}) for world in (*worlds, worlds[-1])]
    for place, case in enumerate(cases):
        largest = 1000.0 if place == len(cases) - 1 else 3.0
        logits = case.inputs["logits"]
        case.inputs["logits"] = (logits * (largest / np.abs(logits).max())).astype(np.float32)
    return cases


def observe_entropy(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = torch.from_numpy(np.split(case.inputs["logits"], case.world_size, axis=1)[rank].copy())
    with Recorder() as record:
        loss = function(mine, torch.from_numpy(case.inputs["targets"].copy()))
    return {"loss": plain(loss), "events": record.events}


def entropy(case: Case) -> list[float]:
    logits, targets = (torch.from_numpy(case.inputs[key]) for key in ("logits", "targets"))
    return [F.cross_entropy(logits.double(), targets).item()] * case.world_size


def right_for_small(case: Case, seen: Seen) -> Miss | None:
    is_small = float(np.abs(case.inputs["logits"]).max()) < 100
    return result("loss", entropy)(case, seen) if is_small else None


def three_numbers_per_row(case: Case, seen: Seen) -> Miss | None:
    limit = 3 * 4 * len(case.inputs["targets"])
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if sum(int(event.split()[1]) for event in made) > limit or (case.world_size > 1 and not made):
            return Miss(f"at most {limit} bytes, three numbers per row", short(", ".join(made) or "nothing"), rank)
    return None


CROSS_ENTROPY = Task(
    name="tensor.cross_entropy",
    lesson=LESSON,
    function="split_cross_entropy",
    title="A loss from split logits",
    difficulty=4,
    importance=4,
    minutes=35,
    draw=draw_entropy,
    observe=observe_entropy,
    own={"logits": along(1)},
    essential=("loss", "bytes"),
    properties={
        "loss": Property(3, right_for_small),
        "large logits": Property(1, result("loss", entropy)),
        "bytes": Property(2, three_numbers_per_row),
    },
)


# --- tensor.grid ---


def grid_case(rng: random.Random) -> dict:
    return {"data": rng.randrange(1, 4), "pipeline": rng.randrange(1, 4), "tensor": rng.randrange(2, 5)}


def observe_grid(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {"groups": [plain(function(r, **given)) for r in range(given["data"] * given["pipeline"] * given["tensor"])]}


def group_along(axis: int, name: str) -> Any:
    def rule(case: Case, seen: Seen) -> Miss | None:
        shape = tuple(case.inputs[size] for size in ("data", "pipeline", "tensor"))
        grid = np.arange(np.prod(shape)).reshape(shape)
        by_rank = items(seen, 0, "groups", dict)
        if len(by_rank) != grid.size:
            raise Malformed(Miss(f"groups of {grid.size} ranks", f"of {len(by_rank)}"))
        for rank, groups in enumerate(by_rank):
            place: list[Any] = list(np.unravel_index(rank, shape))
            place[axis] = slice(None)
            right = [int(member) for member in grid[tuple(place)]]
            if groups.get(name) != right:
                return Miss(f"{right} as {name} group of rank {rank}", short(groups.get(name)))
        return None

    return rule


GRID = Task(
    name="tensor.grid",
    lesson=LESSON,
    function="groups",
    title="Who is who on the rank grid",
    difficulty=2,
    importance=4,
    minutes=15,
    draw=alone(grid_case),
    observe=observe_grid,
    needs_ranks=False,
    properties={name: Property(1, group_along(axis, name)) for axis, name in enumerate(("data", "pipeline", "tensor"))},
)

ALL = (MLP, EMBEDDING, CROSS_ENTROPY, GRID)
