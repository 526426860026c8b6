"""Lesson 16's museum: layers that ranks share, in forms that were written wrong."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, items, near, number, result
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import along, each_world, numbers

LESSON = "16_gradient_audit"

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
    for name, arriving in zip(
        ("plain", "transposed"), torch.from_numpy(case.inputs["arriving"][rank].copy()), strict=True
    ):
        if name == "transposed":
            arriving = arriving.mT.contiguous().mT
        x, before = torch.from_numpy(case.inputs["x"].copy()).requires_grad_(), arriving.clone()
        output = function(x)
        _Hands.apply(output, arriving).backward()
        seen |= {name: plain(x.grad), f"{name} changed": float((arriving - before).abs().max())}
    return seen | {"output": plain(output)}


def entered(place: int) -> Callable[[Case], list[np.ndarray]]:
    return lambda case: [case.inputs["arriving"][:, place].astype(np.float64).sum(0)] * case.world_size


def left_alone(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        for name in ("plain", "transposed"):
            if number(seen, rank, f"{name} changed") != 0:
                return Miss("the arriving gradient as it was", "changed in place", rank)
    return None


ENTRY = Task(
    name="museum.entry",
    lesson=LESSON,
    function="enter_split_layer",
    title="Exhibit 5: the entry of a split layer",
    difficulty=2,
    importance=5,
    minutes=20,
    draw=each_world(entry_case),
    observe=observe_entry,
    own={"arriving": along(0)},
    essential=("output", "gradient", "transposed gradient"),
    properties={
        "output": Property(1, result("output", lambda case: [case.inputs["x"]] * case.world_size)),
        "gradient": Property(2, result("plain", entered(0))),
        "transposed gradient": Property(3, result("transposed", entered(1))),
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
    leaves = {
        name: torch.from_numpy(
            (case.inputs[name] if name == "bias" else case.inputs[name][rank]).copy()
        ).requires_grad_()
        for name in ("x", "weight", "bias")
    }
    output = function(*leaves.values())
    (output * torch.from_numpy(case.inputs["arriving"].copy())).sum().backward()
    return {"output": plain(output)} | {name: plain(leaf.grad) for name, leaf in leaves.items()}


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
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = by_whole_layer(case)
        return next((miss for name in names if (miss := near(seen, name, right[name]))), None)

    return rule


EXIT = Task(
    name="museum.exit",
    lesson=LESSON,
    function="leave_split_layer",
    title="Exhibit 6: the exit of a split layer",
    difficulty=2,
    importance=4,
    minutes=20,
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
    whole, split = (
        list(torch.from_numpy(tensors.copy())) for tensors in (case.inputs["whole"], case.inputs["split"][rank])
    )
    norm = function(whole, split, case.inputs["most"])
    return {"norm": plain(norm), "whole": plain(torch.stack(whole)), "split": plain(torch.stack(split))}


def norm_of(case: Case) -> float:
    return float(np.sqrt(sum((case.inputs[name].astype(np.float64) ** 2).sum() for name in ("whole", "split"))))


def scaled(kind: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        factor = min(1.0, case.inputs["most"] / norm_of(case))
        for rank in range(case.world_size):
            number(seen, rank, "norm")
        if case.inputs["kind"] != kind:
            return None
        return near(seen, "whole", [case.inputs["whole"] * factor] * case.world_size) or near(
            seen, "split", list(case.inputs["split"] * factor)
        )

    return rule


NORM = Task(
    name="museum.norm",
    lesson=LESSON,
    function="clip_by_norm",
    title="Exhibit 7: the norm that clips",
    difficulty=3,
    importance=5,
    minutes=20,
    draw=draw_norm,
    observe=observe_norm,
    own={"split": along(0)},
    essential=("norm", "what is clipped"),
    properties={
        "norm": Property(3, result("norm", lambda case: [np.array(norm_of(case))] * case.world_size)),
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
    gradients = {name: torch.from_numpy(one.copy()) for name, one in stage(case, rank).items()}
    with Recorder() as record:
        function(gradients)
    return {"names": sorted(gradients), "events": record.events} | {
        name: plain(gradient) for name, gradient in gradients.items()
    }


def tied_sum(case: Case, seen: Seen) -> Miss | None:
    last = case.world_size - 1
    right = case.inputs["gradients"][0, 0].astype(np.float64) + case.inputs["gradients"][last, 1]
    for rank, name in ((0, EMBEDDING), (last, HEAD)):
        if miss := near([{name: seen[rank].get(name)}], name, [right]):
            return Miss(miss.expected, miss.found, rank, miss.note)
    return None


def between_the_ends(case: Case, seen: Seen) -> Miss | None:
    """Messages between the first and the last stage alone, of one gradient each; all else is as it was."""
    last, size = case.world_size - 1, case.inputs["gradients"][0, 0].nbytes
    for rank in range(case.world_size):
        items(seen, rank, "names", str)
        words = [event.split() for event in events(seen, rank) if event != "wait"]
        peer = {0: last, last: 0}.get(rank)
        sent = sum(int(said[1]) for said in words if said[0] == "send" and said[1:] == [str(size), "to", str(peer)])
        others = [" ".join(said) for said in words if said[0] not in ("send", "recv")]
        if last and (sent != (0 if peer is None else size) or others or (peer is None and words)):
            listed = ", ".join(" ".join(said) for said in words) or "nothing"
            return Miss("a send and a receive between the first and the last stage alone", listed, rank)
        name = f"blocks.{rank}.weight"
        if miss := near([{name: seen[rank].get(name)}], name, [stage(case, rank)[name]]):
            return Miss(miss.expected, miss.found, rank)
    return tied_sum(case, seen) if not last else None


TIED = Task(
    name="museum.tied",
    lesson=LESSON,
    function="sum_tied",
    title="Exhibit 8: one weight on two stages",
    difficulty=3,
    importance=4,
    minutes=25,
    draw=each_world(tied_case),
    observe=observe_tied,
    own={"gradients": along(0)},
    essential=("tied gradients",),
    properties={"tied gradients": Property(3, tied_sum), "who talks to whom": Property(2, between_the_ends)},
)

ALL = (ENTRY, EXIT, NORM, TIED)
