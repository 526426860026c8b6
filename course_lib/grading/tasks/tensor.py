"""Lesson 08: layers that several ranks share, and who is who on the rank grid."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, along, each_world, numbers, whole

# --- tensor.mlp ---


def mlp_case(rng: random.Random, world: int) -> dict:
    width, hidden = rng.randrange(2, 5), world * rng.randrange(1, 4)
    return {"x": numbers(rng, 3, width), "up": numbers(rng, hidden, width), "down": numbers(rng, width, hidden)}


def observe_mlp(function: Callable[..., Any], case: Case, rank: int) -> dict:
    x = kit.tensor(case.inputs["x"]).requires_grad_()
    up, down = nn.Parameter(kit.part(case, "up", rank)), nn.Parameter(kit.part(case, "down", rank, 1))
    with Recorder() as record:
        output = function(x, up, down)
        record.note("backward")
        output.square().sum().backward()
    return kit.noted(record, output=output, **kit.gradients({"x": x, "up": up, "down": down}))


def by_one(case: Case) -> dict[str, list[np.ndarray]]:
    """By rank: the output, and the gradients of x and of the rank's pieces."""
    leaves = {name: kit.tensor(case.inputs[name]).requires_grad_() for name in ("x", "up", "down")}
    output = torch.tanh(leaves["x"] @ leaves["up"].T) @ leaves["down"].T
    output.square().sum().backward()
    whole = plain({"output": output, **kit.gradients(leaves)})
    pieces = {name: np.split(whole.pop(name), case.world_size, axis) for name, axis in (("up", 0), ("down", 1))}
    return {name: [values] * case.world_size for name, values in whole.items()} | pieces


def as_one(key: str) -> Rule:
    return kit.equals(key, by_one, of=key)


@kit.each_rank
def one_each_way(case: Case, seen: Seen, rank: int) -> Miss | None:
    size = case.inputs["x"].nbytes
    right = [f"all_reduce {size}", "backward", f"all_reduce {size}"]
    issued = [event for event in events(seen, rank) if event != "wait"]
    return kit.unless(issued == right, ", ".join(right), kit.listed(issued, ""))


MLP = Task(
    **kit.about("tensor.mlp"),
    draw=each_world(mlp_case),
    observe=observe_mlp,
    own={"up": along(0), "down": along(1)},
    essential=("output", "gradient of x"),
    properties={
        "output": Property(2, as_one("output")),
        "gradient of x": Property(2, as_one("x")),
        "gradients of the pieces": Property(1, kit.all_of(as_one("up"), as_one("down"))),
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
    rows = kit.part(case, "table", rank)
    with Recorder() as record:
        vectors = function(kit.tensor(case.inputs["ids"]), rows)
    return kit.noted(record, vectors=vectors)


def vectors(case: Case) -> np.ndarray:
    return case.inputs["table"][case.inputs["ids"]]


def only_vectors(case: Case) -> list[str]:
    """No table is sent."""
    return [f"all_reduce {vectors(case).nbytes}"]


EMBEDDING = Task(
    **kit.about("tensor.embedding"),
    draw=each_world(embedding_case),
    observe=observe_embedding,
    own={"table": along(0)},
    essential=("vectors", "one all-reduce"),
    properties={
        "vectors": Property(3, kit.equals("vectors", vectors, on_all=True)),
        "one all-reduce": Property(1, kit.made_are(only_vectors)),
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
    mine = kit.part(case, "logits", rank, 1)
    with Recorder() as record:
        loss = function(mine, kit.tensor(case.inputs["targets"]))
    return kit.noted(record, loss=loss)


def entropy(case: Case) -> float:
    logits, targets = (torch.from_numpy(case.inputs[key]) for key in ("logits", "targets"))
    return F.cross_entropy(logits.double(), targets).item()


right_loss = kit.equals("loss", entropy, on_all=True)


def right_for_small(case: Case, seen: Seen) -> Miss | None:
    is_small = float(np.abs(case.inputs["logits"]).max()) < 100
    return right_loss(case, seen) if is_small else None


def three_numbers_per_row(case: Case) -> int:
    return 3 * 4 * len(case.inputs["targets"])


CROSS_ENTROPY = Task(
    **kit.about("tensor.cross_entropy"),
    draw=draw_entropy,
    observe=observe_entropy,
    own={"logits": along(1)},
    essential=("loss", "bytes"),
    properties={
        "loss": Property(3, right_for_small),
        "large logits": Property(1, right_loss),
        "bytes": Property(2, kit.bytes_at_most(three_numbers_per_row, "at most {} bytes, three numbers per row")),
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
    **kit.about("tensor.grid"),
    draw=alone(grid_case),
    observe=observe_grid,
    properties={name: Property(1, group_along(axis, name)) for axis, name in enumerate(("data", "pipeline", "tensor"))},
)
