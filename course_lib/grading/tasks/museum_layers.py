"""Lesson 16's museum: layers that ranks share, in forms that were written wrong."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, near, number
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import along, each_world, numbers

# --- museum.entry ---


class _Hands(torch.autograd.Function):
    """A number whose backward hands on a gradient. (`backward(gradient)` imports sympy first, which takes seconds.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return x.sum()

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> tuple:  # type: ignore[override]
        return ctx.gradient, None


def entry_case(rng: random.Random, world: int) -> dict:
    rows, width = rng.randrange(2, 4), rng.randrange(4, 7)
    return {"x": numbers(rng, rows, width), "arriving": numbers(rng, world, 2, rows, width)}


def observe_entry(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Two backwards: one with a gradient that lies in memory as it is read, one with a transposed one."""
    seen: dict[str, Any] = {}
    for name, arriving in zip(("plain", "transposed"), kit.tensor(case.inputs["arriving"][rank]), strict=True):
        if name == "transposed":
            arriving = arriving.mT.contiguous().mT
        x, before = kit.tensor(case.inputs["x"]).requires_grad_(), arriving.clone()
        output = function(x)
        _Hands.apply(output, arriving).backward()
        seen |= {name: plain(x.grad), f"{name} changed": float((arriving - before).abs().max())}
    return seen | {"output": plain(output)}


def entered(case: Case) -> np.ndarray:
    """The sums of both backwards."""
    return case.inputs["arriving"].astype(np.float64).sum(0)


@kit.each_rank
def left_alone(case: Case, seen: Seen, rank: int) -> Miss | None:
    is_as_it_was = all(number(seen, rank, f"{name} changed") == 0 for name in ("plain", "transposed"))
    return kit.unless(is_as_it_was, "the arriving gradient as it was", "changed in place")


ENTRY = Task(
    **kit.about("museum.entry"),
    draw=each_world(entry_case),
    observe=observe_entry,
    own={"arriving": along(0)},
    essential=("output", "gradient", "transposed gradient"),
    properties={
        "output": Property(1, kit.equals("output", lambda case: case.inputs["x"], on_all=True)),
        "gradient": Property(2, kit.equals("plain", entered, of=0, on_all=True)),
        "transposed gradient": Property(3, kit.equals("transposed", entered, of=1, on_all=True)),
        "arriving gradient left alone": Property(1, left_alone),
    },
)


# --- museum.exit ---


def exit_case(rng: random.Random, world: int) -> dict:
    rows, inside, out = rng.randrange(2, 4), rng.randrange(1, 4), rng.randrange(2, 5)
    return {
        "x": numbers(rng, world, rows, inside),
        "weight": numbers(rng, world, out, inside),
        "bias": numbers(rng, out),
        "arriving": numbers(rng, rows, out),
    }


def observe_exit(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = {name: case.inputs[name] if name == "bias" else case.inputs[name][rank] for name in ("x", "weight", "bias")}
    leaves = {name: kit.tensor(values).requires_grad_() for name, values in given.items()}
    output = function(*leaves.values())
    (output * kit.tensor(case.inputs["arriving"])).sum().backward()
    return plain({"output": output, **kit.gradients(leaves)})


def by_whole_layer(case: Case) -> dict[str, list[np.ndarray]]:
    """Of one process, in float64, by rank."""
    x, weight, bias, arriving = (case.inputs[name].astype(np.float64) for name in ("x", "weight", "bias", "arriving"))
    ranks = case.world_size
    return {
        "output": [sum(a @ w.T for a, w in zip(x, weight, strict=True)) + bias] * ranks,
        "x": [arriving @ w for w in weight],
        "weight": [arriving.T @ a for a in x],
        "bias": [arriving.sum(0)] * ranks,
    }


def of_layer(*names: str) -> Rule:
    return kit.all_of(*(kit.equals(name, by_whole_layer, of=name) for name in names))


EXIT = Task(
    **kit.about("museum.exit"),
    draw=each_world(exit_case),
    observe=observe_exit,
    own={"x": along(0), "weight": along(0)},
    essential=("output", "gradient of the bias"),
    properties={
        "output": Property(1, of_layer("output")),
        "gradients of input and weight": Property(1, of_layer("x", "weight")),
        "gradient of the bias": Property(3, of_layer("bias")),
    },
)


# --- museum.norm ---

CLIPPED, SMALL = "clipped", "small"


def norm_case(rng: random.Random, world: int) -> dict:
    whole, split = numbers(rng, rng.randrange(2, 4), 3), numbers(rng, world, rng.randrange(2, 4), 4)
    whole[0, 0], split[:, 0, 0] = 2, 1  # no gradient is all zeros
    kind = rng.choice((CLIPPED, SMALL)) if world == 1 else CLIPPED
    return {"kind": kind, "whole": whole, "split": split, "most": 0.5 if kind == CLIPPED else 1000.0}


def draw_norm(rng: random.Random, worlds: tuple[int, ...] = (1, 2, 3)) -> list[Case]:
    cases = each_world(norm_case)(rng, worlds)
    for world in worlds[-2:]:
        small = norm_case(rng, world) | {"kind": SMALL, "most": 1000.0}
        cases.append(Case(world, small))
    return cases


def observe_norm(function: Callable[..., Any], case: Case, rank: int) -> dict:
    whole, split = (list(kit.tensor(values)) for values in (case.inputs["whole"], case.inputs["split"][rank]))
    norm = function(whole, split, case.inputs["most"])
    return {"norm": plain(norm), "whole": plain(torch.stack(whole)), "split": plain(torch.stack(split))}


def norm_of(case: Case) -> float:
    return float(np.sqrt(sum((case.inputs[name].astype(np.float64) ** 2).sum() for name in ("whole", "split"))))


def clipped(case: Case) -> dict[str, list[np.ndarray]]:
    factor = min(1.0, case.inputs["most"] / norm_of(case))
    return {"whole": [case.inputs["whole"] * factor] * case.world_size, "split": list(case.inputs["split"] * factor)}


def scaled(kind: str) -> Rule:
    return kit.all_of(
        kit.reads(lambda case, seen: [number(seen, rank, "norm") for rank in range(case.world_size)]),
        *(kit.equals(name, clipped, kind, of=name) for name in ("whole", "split")),
    )


NORM = Task(
    **kit.about("museum.norm"),
    draw=draw_norm,
    observe=observe_norm,
    own={"split": along(0)},
    essential=("norm", "what is clipped"),
    properties={
        "norm": Property(3, kit.equals("norm", norm_of, on_all=True)),
        "what is clipped": Property(2, scaled(CLIPPED)),
        "what is small enough": Property(1, scaled(SMALL)),
    },
)


# --- museum.tied ---

EMBEDDING, HEAD = "embedding.weight", "head.weight"


def tied_case(rng: random.Random, world: int) -> dict:
    return {"gradients": numbers(rng, world, 2, rng.randrange(2, 5), 3)}


def stage(case: Case, rank: int) -> dict[str, np.ndarray]:
    """The gradients on one stage: the first has the embedding, the last the head, each a block."""
    first, second = case.inputs["gradients"][rank]
    ends = {EMBEDDING: rank == 0, HEAD: rank == case.world_size - 1}
    held = {name: one for (name, here), one in zip(ends.items(), (first, second), strict=True) if here}
    return {f"blocks.{rank}.weight": first + second} | held


def observe_tied(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = {name: kit.tensor(one) for name, one in stage(case, rank).items()}
    with Recorder() as record:
        function(gradients)
    return kit.noted(record, names=sorted(gradients), **gradients)


def tied_sum(case: Case, seen: Seen) -> Miss | None:
    last = case.world_size - 1
    right = case.inputs["gradients"][0, 0].astype(np.float64) + case.inputs["gradients"][last, 1]
    ends = ((0, EMBEDDING), (last, HEAD))
    return next((miss for rank, name in ends if (miss := kit.on_rank(near(seen[rank:], name, [right]), rank))), None)


@kit.each_rank
def between_the_ends(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Messages between the first and the last stage alone, of one gradient each; all else is as it was."""
    items(seen, rank, "names", str)
    last, size = case.world_size - 1, case.inputs["gradients"][0, 0].nbytes
    made, peer = [event for event in events(seen, rank) if event != "wait"], {0: last, last: 0}.get(rank)
    sent = size * made.count(f"send {size} to {peer}")
    others = [event for event in made if event.split()[0] not in ("send", "recv")]
    if last and (sent != (0 if peer is None else size) or others or (peer is None and made)):
        shown = ", ".join(made) or "nothing"
        return Miss("a send and a receive between the first and the last stage alone", shown)
    name = f"blocks.{rank}.weight"
    if miss := near(seen[rank:], name, [stage(case, rank)[name]]):
        return Miss(miss.expected, miss.found)
    return tied_sum(case, seen) if not last else None


TIED = Task(
    **kit.about("museum.tied"),
    draw=each_world(tied_case),
    observe=observe_tied,
    own={"gradients": along(0)},
    essential=("tied gradients",),
    properties={"tied gradients": Property(3, tied_sum), "who talks to whom": Property(2, between_the_ends)},
)
