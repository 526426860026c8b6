"""Lesson 01: what a training step is made of, on one process."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from course_lib.grading.rules import Seen, events, items, near, short, suspected
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, in_turn, numbers, whole
from course_lib.grading.tasks.models import all_weights, flat

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
    **kit.about("loop.warmup"),
    draw=in_turn(warmup_case),
    observe=observe_warmup,
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
    rows, count = sorted(row for batch in batches(seen) for row in batch), len(case.inputs["lengths"])
    return kit.unless(rows == list(range(count)), f"rows 0 to {count - 1}, each once", short(rows))


def fits(case: Case, seen: Seen) -> Miss | None:
    size, due = case.inputs["batch_size"], -(-len(case.inputs["lengths"]) // case.inputs["batch_size"])
    sizes = [len(batch) for batch in batches(seen)]
    good = len(sizes) == due and all(0 < n <= size for n in sizes)
    return kit.unless(good, f"{due} batches of at most {size} rows", short(sizes))


def padded(lengths: list[int], size: int) -> int:
    """Tokens of batches of so many rows in this order, padding included."""
    parts = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    return sum(max(part) * len(part) for part in parts)


def least_padding(case: Case, seen: Seen) -> Miss | None:
    lengths, size = case.inputs["lengths"], case.inputs["batch_size"]
    if (miss := every_row_once(case, seen)) is not None:
        return miss
    # Sorted, and the short batch at the end with the shortest rows: no grouping takes fewer tokens.
    limit = max(padded(sorted(lengths, reverse=True), size), padded(sorted(lengths), size))
    tokens = sum(padded([lengths[row] for row in batch], len(batch)) for batch in batches(seen) if batch)
    return kit.unless(tokens <= limit, f"at most {limit} tokens, padding included", f"{tokens}")


LENGTH_GROUPS = Task(
    **kit.about("loop.length_groups"),
    draw=in_turn(lengths_case),
    observe=observe_batches,
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
    model.weight.data = kit.tensor(case.inputs["weight"])
    return model


def tensors(part: dict) -> tuple[torch.Tensor, ...]:
    return tuple(kit.tensor(part[key]) for key in ("inputs", "targets", "mask"))


def observe_accumulation(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, happened = head(case), []
    model.register_forward_hook(lambda *_: happened.append("forward"))
    model.weight.register_post_accumulate_grad_hook(lambda _: happened.append("backward"))
    loss = function(model, [tensors(part) for part in case.inputs["parts"]])
    return {"gradient": plain(model.weight.grad), "loss": plain(loss), "is": type(loss).__name__, "events": happened}


def whole_batch(case: Case) -> dict[str, Any]:
    model = head(case)
    inputs, targets, mask = (torch.cat(parts) for parts in zip(*map(tensors, case.inputs["parts"]), strict=True))
    loss = (F.cross_entropy(model(inputs), targets, reduction="none") * mask).sum() / mask.sum()
    loss.backward()
    return {"gradient": plain(model.weight.grad), "loss": loss.item()}


def one_at_a_time(case: Case, seen: Seen) -> Miss | None:
    right, happened = ["forward", "backward"] * len(case.inputs["parts"]), events(seen, 0)
    return kit.unless(happened == right, "forward, backward for one micro-batch after the other", short(happened))


def is_float(case: Case, seen: Seen) -> Miss | None:
    """A tensor would keep its graph."""
    kind = str(seen[0].get("is"))
    return kit.unless(kind == "float", "a float as the loss", short(f"a {kind}"))


TOKEN_WEIGHTED = Task(
    **kit.about("loop.token_weighted"),
    draw=in_turn(tokens_case),
    observe=observe_accumulation,
    essential=("gradient",),
    properties={
        "gradient": Property(3, kit.equals("gradient", whole_batch, of="gradient", on_all=True)),
        "loss": Property(1, kit.all_of(is_float, kit.equals("loss", whole_batch, of="loss", on_all=True))),
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
    given, weights = case.inputs, list(map(kit.tensor, case.inputs["weights"]))
    settings = given["lr"], tuple(given["betas"]), given["eps"], given["weight_decay"]
    states: list[dict] = [{} for _ in weights]
    after = []
    for step, gradients in enumerate(given["gradients"], 1):
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            function(weight, kit.tensor(gradient), state, step, *settings)
        after.append(all_weights(weights))
    sizes = [sum(v.numel() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()) for state in states]
    return {"weights": plain(torch.stack(after)), "state elements": sizes}


def by_torch(case: Case, kind: type[torch.optim.Adam] = torch.optim.AdamW, **changed: float) -> list[np.ndarray]:
    """The weights after each step."""
    given, after = {**case.inputs, **changed}, []
    weights = [nn.Parameter(kit.tensor(w)) for w in given["weights"]]
    optimizer = kind(weights, given["lr"], tuple(given["betas"]), given["eps"], given["weight_decay"])
    for gradients in given["gradients"]:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = kit.tensor(gradient)
        optimizer.step()
        after.append(all_weights(weights))
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
    right, sizes = [2 * weight.size for weight in case.inputs["weights"]], items(seen, 0, "state elements", int)
    return kit.unless(sizes == right, f"states of {right} elements, two per weight", short(sizes))


ADAMW = Task(
    **kit.about("loop.adamw"),
    draw=alone(adamw_case),
    observe=observe_adamw,
    essential=("weights",),
    properties={"weights": Property(3, weights_are), "two states per weight": Property(1, two_states)},
)
