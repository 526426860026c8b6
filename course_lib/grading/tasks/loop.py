"""Lesson 01: what a training step is made of, on one process."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.grading.rules import Seen, events, items, near, result, short, suspected
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import alone, in_turn, numbers, whole
from course_lib.grading.tasks.models import flat

LESSON = "01_basic_loop"


# --- loop.warmup ---


def warmup_case(rng: random.Random, place: int) -> dict:
    """In every fourth case there is no warm-up."""
    warmup = 0 if place % 4 == 3 else rng.randrange(2, 8)
    return {"peak": rng.randrange(1, 20) / 1000, "warmup": warmup, "total": warmup + rng.randrange(3, 20)}


def observe_warmup(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {
        "rates": plain(
            [float(function(step, given["peak"], given["warmup"], given["total"])) for step in range(given["total"])]
        )
    }


def rates(rising: bool) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        peak, warmup, total = (case.inputs[key] for key in ("peak", "warmup", "total"))
        actual = items(seen, 0, "rates", (int, float))
        if len(actual) != total:
            raise Malformed(Miss(f"{total} rates", f"{len(actual)}"))
        for step in range(warmup) if rising else range(warmup, total):
            right = peak * (step + 1) / warmup if rising else peak * (total - step) / (total - warmup)
            if not abs(actual[step] - right) <= 1e-9:
                return Miss(f"{right:.6g} in step {step}", f"{actual[step]:.6g}")
        return None

    return rule


WARMUP = Task(
    name="loop.warmup",
    lesson=LESSON,
    function="learning_rate",
    title="Warm up, then decay",
    difficulty=1,
    importance=3,
    minutes=10,
    draw=in_turn(warmup_case),
    observe=observe_warmup,
    needs_ranks=False,
    properties={"warm-up": Property(1, rates(True)), "decay": Property(1, rates(False))},
)


# --- loop.length_groups ---


def lengths_case(rng: random.Random, place: int) -> dict:
    """In turn: any number of rows, full batches alone, fewer rows than fit into a batch, none."""
    size = rng.randrange(2, 6)
    count = (rng.randrange(9, 30), size * rng.randrange(2, 6), rng.randrange(1, size), 0)[place % 4]
    return {"lengths": [rng.randrange(1, 60) for _ in range(count)], "batch_size": size}


def observe_batches(function: Callable[..., Any], case: Case, rank: int) -> dict:
    return {"batches": plain(function(list(case.inputs["lengths"]), case.inputs["batch_size"]))}


def batches(seen: Seen) -> list[list[int]]:
    row_lists = items(seen, 0, "batches", list)
    if not all(type(row) is int for batch in row_lists for row in batch):
        raise Malformed(Miss("lists of row numbers", short(row_lists)))
    return row_lists


def every_row_once(case: Case, seen: Seen) -> Miss | None:
    rows = sorted(row for batch in batches(seen) for row in batch)
    count = len(case.inputs["lengths"])
    return None if rows == list(range(count)) else Miss(f"rows 0 to {count - 1}, each once", short(rows))


def fits(case: Case, seen: Seen) -> Miss | None:
    size, due = case.inputs["batch_size"], -(-len(case.inputs["lengths"]) // case.inputs["batch_size"])
    sizes = [len(batch) for batch in batches(seen)]
    good = len(sizes) == due and all(0 < n <= size for n in sizes)
    return None if good else Miss(f"{due} batches of at most {size} rows", short(sizes))


def least_padding(case: Case, seen: Seen) -> Miss | None:
    lengths, size = case.inputs["lengths"], case.inputs["batch_size"]
    if (miss := every_row_once(case, seen)) is not None:
        return miss
    # Sorted, and the short batch at the end with the shortest rows: no grouping takes fewer tokens.
    ordered = sorted(lengths, reverse=True)
    limit = sum(ordered[first] * len(ordered[first : first + size]) for first in range(0, len(ordered), size))
    rising = sorted(lengths)
    limit = max(
        limit,
        sum(
            max(rising[first : first + size]) * len(rising[first : first + size])
            for first in range(0, len(rising), size)
        ),
    )
    padded = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches(seen) if batch)
    return None if padded <= limit else Miss(f"at most {limit} tokens, padding included", f"{padded}")


LENGTH_GROUPS = Task(
    name="loop.length_groups",
    lesson=LESSON,
    function="batches_by_length",
    title="Batches with little padding",
    difficulty=2,
    importance=3,
    minutes=15,
    draw=in_turn(lengths_case),
    observe=observe_batches,
    needs_ranks=False,
    essential=("every row once", "padding"),
    properties={
        "every row once": Property(1, every_row_once),
        "batch size": Property(1, fits),
        "padding": Property(2, least_padding),
    },
)


# --- loop.token_weighted ---


def tokens_case(rng: random.Random, place: int) -> dict:
    """In turn: tokens that count in each micro-batch, one of padding alone, one without a row."""
    width, classes = rng.randrange(2, 6), rng.randrange(3, 6)
    parts = []
    for number in range(rng.randrange(2, 5)):
        is_odd = number == 1 and place % 3
        rows = 0 if is_odd == 2 else rng.randrange(3, 8)
        mask = np.zeros(rows, np.int64) if is_odd else whole(rng, 0, 2, rows)
        mask[:1] = not is_odd
        parts.append({"inputs": numbers(rng, rows, width), "targets": whole(rng, 0, classes, rows), "mask": mask})
    return {"weight": numbers(rng, classes, width), "parts": parts}


def head(case: Case) -> nn.Linear:
    classes, width = case.inputs["weight"].shape
    model = nn.Linear(width, classes, bias=False)
    model.weight.data = torch.from_numpy(case.inputs["weight"].copy())
    return model


def tensors(part: dict) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(part[key].copy()) for key in ("inputs", "targets", "mask"))


def observe_accumulation(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, happened = head(case), []
    model.register_forward_hook(lambda *_: happened.append("forward"))
    model.weight.register_post_accumulate_grad_hook(lambda _: happened.append("backward"))
    loss = function(model, [tensors(part) for part in case.inputs["parts"]])
    return {"gradient": plain(model.weight.grad), "loss": plain(loss), "is": type(loss).__name__, "events": happened}


def whole_batch(case: Case) -> tuple[np.ndarray, float]:
    model = head(case)
    inputs, targets, mask = (torch.cat(parts) for parts in zip(*map(tensors, case.inputs["parts"]), strict=True))
    loss = (F.cross_entropy(model(inputs), targets, reduction="none") * mask).sum() / mask.sum()
    loss.backward()
    assert model.weight.grad is not None
    return model.weight.grad.numpy(), loss.item()


def one_at_a_time(case: Case, seen: Seen) -> Miss | None:
    right = ["forward", "backward"] * len(case.inputs["parts"])
    happened = events(seen, 0)
    return None if happened == right else Miss("forward, backward for one micro-batch after the other", short(happened))


def a_number(case: Case, seen: Seen) -> Miss | None:
    """The mean loss, as a float: a tensor would keep its graph."""
    if str(seen[0].get("is")) != "float":
        return Miss("a float as the loss", short(f"a {seen[0].get('is')}"))
    return near(seen, "loss", [whole_batch(case)[1]])


TOKEN_WEIGHTED = Task(
    name="loop.token_weighted",
    lesson=LESSON,
    function="accumulate_tokens",
    title="Accumulation that weighs every token alike",
    difficulty=2,
    importance=5,
    minutes=20,
    draw=in_turn(tokens_case),
    observe=observe_accumulation,
    needs_ranks=False,
    essential=("gradient",),
    properties={
        "gradient": Property(3, result("gradient", lambda case: [whole_batch(case)[0]])),
        "loss": Property(1, a_number),
        "one graph at a time": Property(2, one_at_a_time),
    },
)


# --- loop.adamw ---


def adamw_case(rng: random.Random) -> dict:
    shapes = [(rng.randrange(1, 5), rng.randrange(1, 5)) for _ in range(rng.randrange(1, 4))]
    return {
        "weights": [numbers(rng, *shape) for shape in shapes],
        "lr": 0.1,
        "betas": [0.9, 0.95],
        "eps": 0.1,
        "weight_decay": 0.3,
        "gradients": [[numbers(rng, *shape) for shape in shapes] for _ in range(3)],
    }


def observe_adamw(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    weights = [torch.from_numpy(w.copy()) for w in given["weights"]]
    states: list[dict] = [{} for _ in weights]
    after = []
    for step, gradients in enumerate(given["gradients"], 1):
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            function(
                weight,
                torch.from_numpy(gradient.copy()),
                state,
                step,
                given["lr"],
                tuple(given["betas"]),
                given["eps"],
                given["weight_decay"],
            )
        after.append(torch.cat([w.reshape(-1) for w in weights]))
    sizes = [sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()) for state in states]
    return {"weights": plain(torch.stack(after)), "state elements": sizes}


def by_torch(case: Case, kind: type[torch.optim.Adam] = torch.optim.AdamW, **changed: float) -> list[np.ndarray]:
    """The weights after each step."""
    given, after = {**case.inputs, **changed}, []
    weights = [nn.Parameter(torch.from_numpy(w.copy())) for w in given["weights"]]
    optimizer = kind(weights, given["lr"], tuple(given["betas"]), given["eps"], given["weight_decay"])
    for gradients in given["gradients"]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        after.append(torch.cat([w.detach().reshape(-1) for w in weights]))
    return [torch.stack(after).numpy()]


def uncorrected(case: Case) -> list[np.ndarray]:
    """The same without bias correction."""
    given, after = case.inputs, []
    weights, m, v = flat(given["weights"]), 0.0, 0.0
    (beta1, beta2), lr = given["betas"], given["lr"]
    for gradient in map(flat, given["gradients"]):
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        weights = (1 - lr * given["weight_decay"]) * weights - lr * m / (np.sqrt(v) + given["eps"])
        after.append(weights)
    return [np.stack(after)]


def weights_are(case: Case, seen: Seen) -> Miss | None:
    unchanged, steps = flat(case.inputs["weights"]), len(case.inputs["gradients"])
    return suspected(
        near(seen, "weights", by_torch(case), 1e-5, first_step=1),
        seen,
        "weights",
        {
            "the weights are as they were: change `weight` itself, in place": lambda: [np.stack([unchanged] * steps)],
            "these are Adam's weights: the decay is in the gradient, and not taken from the weight": lambda: by_torch(
                case, torch.optim.Adam
            ),
            "these are the weights without weight decay": lambda: by_torch(case, weight_decay=0.0),
            "these are the weights without bias correction": lambda: uncorrected(case),
        },
    )


def two_states(case: Case, seen: Seen) -> Miss | None:
    right = [2 * weight.size for weight in case.inputs["weights"]]
    sizes = items(seen, 0, "state elements", int)
    return None if sizes == right else Miss(f"states of {right} elements, two per weight", short(sizes))


ADAMW = Task(
    name="loop.adamw",
    lesson=LESSON,
    function="adamw_step",
    title="AdamW, and what it remembers",
    difficulty=3,
    importance=3,
    minutes=25,
    draw=alone(adamw_case),
    observe=observe_adamw,
    needs_ranks=False,
    essential=("weights",),
    properties={"weights": Property(3, weights_are), "two states per weight": Property(1, two_states)},
)

ALL = (WARMUP, LENGTH_GROUPS, TOKEN_WEIGHTED, ADAMW)
