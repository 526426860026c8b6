"""Lesson 08, to build: a transformer block whose attention heads and MLP columns lie on several ranks."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, events, near, result, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, along, numbers

LESSON = "08_tensor_and_hybrid"
STEPS = 2
RATE = 0.125
BY_ROWS, BY_COLUMNS, WHOLE = ("query", "key", "value", "up"), ("output", "down"), ("norm1", "norm2")
NAMES_OF = (*BY_ROWS, *BY_COLUMNS, *WHOLE)
EPSILON = 1e-5


def block_case(rng: random.Random, world: int) -> dict:
    heads = world * rng.randrange(1, 3)
    width, hidden = heads * rng.randrange(1, 3), world * rng.randrange(2, 4)
    if width < 2:
        heads, width = 2 * heads, 2
    shapes = {
        **dict.fromkeys(("query", "key", "value", "output"), (width, width)),
        "up": (hidden, width),
        "down": (width, hidden),
        "norm1": (width,),
        "norm2": (width,),
    }
    # Small weights: with those of a normal distribution some first steps are so long that the second one's gradients
    # are thousands of times as large, and rounding in another order shows.
    return {
        "heads": heads,
        "x": numbers(rng, STEPS, 2, 3, width),
        **{
            name: numbers(rng, *shape) + 1 if name in WHOLE else numbers(rng, *shape) / 4
            for name, shape in shapes.items()
        },
    }


def draw_blocks(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    return [Case(world, block_case(rng, world)) for world in worlds]


class WholeBlock(nn.Module):
    """The block on one process."""

    def __init__(self, case: Case):
        super().__init__()
        self.heads = case.inputs["heads"]
        for name in NAMES_OF:
            self.register_parameter(name, nn.Parameter(torch.from_numpy(case.inputs[name].copy())))

    def forward(self, x: Tensor) -> Tensor:
        of = dict(self.named_parameters())
        normed = F.rms_norm(x, x.shape[-1:], of["norm1"], EPSILON)
        query, key, value = (
            (normed @ of[name].T).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in ("query", "key", "value")
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2) @ of["output"].T
        return x + F.gelu(F.rms_norm(x, x.shape[-1:], of["norm2"], EPSILON) @ of["up"].T) @ of["down"].T


def piece(name: str, whole: np.ndarray, rank: int, world: int) -> np.ndarray:
    """A rank's part of a weight."""
    if name in WHOLE:
        return whole
    return np.split(whole, world, 0 if name in BY_ROWS else 1)[rank]


def observe_block(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = {name: torch.from_numpy(piece(name, case.inputs[name], rank, case.world_size).copy()) for name in NAMES_OF}
    block = function(given, case.inputs["heads"])
    parameters = dict(block.named_parameters())
    outputs, of_x, gradients = [], [], []
    with Recorder() as record:
        for rows in case.inputs["x"]:
            block.zero_grad()
            x = torch.from_numpy(rows.copy()).requires_grad_()
            record.note("forward")
            output = block(x)
            record.note("backward")
            output.square().mean().backward()
            outputs.append(output.detach())
            of_x.append(plain(x.grad))
            gradients.append({name: plain(parameters[name].grad) for name in NAMES_OF})
            with torch.no_grad():
                for parameter in parameters.values():
                    if parameter.grad is not None:
                        parameter.sub_(RATE * parameter.grad)
    return {
        "output": plain(torch.stack(outputs)),
        "x": np.stack(of_x),
        **{f"of {name}": np.stack([step[name] for step in gradients]) for name in NAMES_OF},
        "events": record.events,
    }


def by_one(case: Case) -> dict[str, np.ndarray]:
    block = WholeBlock(case)
    made: dict[str, list[np.ndarray]] = {name: [] for name in ("all of it", "x", *NAMES_OF)}
    for rows in case.inputs["x"]:
        block.zero_grad()
        x = torch.from_numpy(rows.copy()).requires_grad_()
        output = block(x)
        output.square().mean().backward()
        made["all of it"].append(output.detach().numpy())
        made["x"].append(plain(x.grad))
        for name, parameter in block.named_parameters():
            made[name].append(plain(parameter.grad))
            with torch.no_grad():
                parameter.sub_(RATE * torch.from_numpy(made[name][-1]))
    return {name: np.stack(steps) for name, steps in made.items()}


def on_all(key: str) -> Callable[[Case], list[np.ndarray]]:
    return lambda case: [by_one(case)[key]] * case.world_size


def gradients_are(names: Sequence[str]) -> Callable[[Case, Seen], Miss | None]:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right, world = by_one(case), case.world_size
        misses = []
        for name in names:
            pieces = [np.stack([piece(name, step, rank, world) for step in right[name]]) for rank in range(world)]
            misses.append(near(seen, f"of {name}", pieces, first_step=0))
        return min((miss for miss in misses if miss), key=lambda miss: miss.step or 0, default=None)

    return rule


def two_each_way(case: Case, seen: Seen) -> Miss | None:
    reduce = f"all_reduce {case.inputs['x'][0].nbytes}"
    right = ["forward", reduce, reduce, "backward", reduce, reduce] * STEPS
    for rank in range(case.world_size):
        made = [event for event in events(seen, rank) if event.split()[0] in (*NAMES, "forward", "backward")]
        if made != right:
            return Miss(f"in each step {', '.join(right[:6])}", short(", ".join(made)), rank)
    return None


BLOCK = Task(
    name="tensor.block",
    lesson=LESSON,
    function="ParallelBlock",
    title="Build it: a tensor-parallel block",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=draw_blocks,
    observe=observe_block,
    own={**{name: along(0) for name in BY_ROWS}, **{name: along(1) for name in BY_COLUMNS}},
    essential=("output", "gradients of the pieces"),
    properties={
        "output": Property(2, result("output", on_all("all of it"), first_step=0)),
        "gradient of x": Property(2, result("x", on_all("x"), first_step=0)),
        "gradients of the pieces": Property(2, gradients_are((*BY_ROWS, *BY_COLUMNS))),
        "gradients of the norms": Property(2, gradients_are(WHOLE)),
        "two all-reduces each way": Property(3, two_each_way),
    },
)

ALL = (BLOCK,)
