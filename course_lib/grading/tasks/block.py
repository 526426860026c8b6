"""Lesson 08, to build: a transformer block whose attention heads and MLP columns lie on several ranks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, events, near
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import along, each_world, numbers
from course_lib.grading.tasks.models import descend

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


class WholeBlock(nn.Module):
    """The block on one process."""

    def __init__(self, case: Case):
        super().__init__()
        self.heads = case.inputs["heads"]
        for name in NAMES_OF:
            self.register_parameter(name, nn.Parameter(kit.tensor(case.inputs[name])))

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
    given = {name: kit.tensor(piece(name, case.inputs[name], rank, case.world_size)) for name in NAMES_OF}
    block = function(given, case.inputs["heads"])
    with Recorder() as record:
        return kit.noted(record, **trained(block, case, record.note))


def trained(block: nn.Module, case: Case, note: Callable[[str], None]) -> dict[str, np.ndarray]:
    """By name what each step brings: the output, and the gradients of x and of the weights."""
    parameters = dict(block.named_parameters())
    made: dict[str, list[np.ndarray]] = {name: [] for name in ("output", "x", *map("of {}".format, NAMES_OF))}
    for rows in case.inputs["x"]:
        block.zero_grad()
        x = kit.tensor(rows).requires_grad_()
        note("forward")
        output = block(x)
        note("backward")
        output.square().mean().backward()
        made["output"].append(plain(output))
        made["x"].append(plain(x.grad))
        for name in NAMES_OF:
            made[f"of {name}"].append(plain(parameters[name].grad))
        descend(parameters.values(), RATE)
    return {name: np.stack(steps) for name, steps in made.items()}


def by_one(case: Case) -> dict[str, np.ndarray]:
    return trained(WholeBlock(case), case, lambda event: None)


def gradients_are(*names: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right, world = by_one(case), case.world_size
        misses = []
        for name in names:
            steps = right[f"of {name}"]
            pieces = [np.stack([piece(name, step, rank, world) for step in steps]) for rank in range(world)]
            misses.append(near(seen, f"of {name}", pieces, first_step=0))
        return min((miss for miss in misses if miss), key=lambda miss: miss.step or 0, default=None)

    return rule


@kit.each_rank
def two_each_way(case: Case, seen: Seen, rank: int) -> Miss | None:
    reduce = f"all_reduce {case.inputs['x'][0].nbytes}"
    right = ["forward", reduce, reduce, "backward", reduce, reduce] * STEPS
    made = [event for event in events(seen, rank) if event.split()[0] in (*NAMES, "forward", "backward")]
    return kit.unless(made == right, f"in each step {', '.join(right[:6])}", kit.listed(made, ""))


BLOCK = Task(
    **kit.about("tensor.block"),
    draw=each_world(block_case),
    observe=observe_block,
    own={**{name: along(0) for name in BY_ROWS}, **{name: along(1) for name in BY_COLUMNS}},
    essential=("output", "gradients of the pieces"),
    properties={
        "output": Property(2, kit.equals("output", by_one, of="output", on_all=True, first_step=0)),
        "gradient of x": Property(2, kit.equals("x", by_one, of="x", on_all=True, first_step=0)),
        "gradients of the pieces": Property(2, gradients_are(*BY_ROWS, *BY_COLUMNS)),
        "gradients of the norms": Property(2, gradients_are(*WHOLE)),
        "two all-reduces each way": Property(3, two_each_way),
    },
)
