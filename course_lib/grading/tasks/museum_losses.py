"""Lesson 16's museum: losses and micro-batches, in forms that were written wrong."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, made_by, near, number, waited_for
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import along, each_world, numbers, whole

# --- museum.context ---


def context_case(rng: random.Random, world: int) -> dict:
    rows, tokens, width = rng.randrange(1, 3), rng.randrange(2, 4), rng.randrange(2, 4)
    return {
        "data_ranks": {4: 2}.get(world, 1 if world == 2 else rng.choice((1, world))),
        "x": numbers(rng, world, rows, tokens, width),
        "target": numbers(rng, world, rows, tokens),
        "weight": numbers(rng, width),
    }


def observe_context(function: Callable[..., Any], case: Case, rank: int) -> dict:
    weight = kit.tensor(case.inputs["weight"]).requires_grad_()
    x, target = (kit.tensor(case.inputs[name][rank]) for name in ("x", "target"))
    told = function(weight, x, target, case.inputs["data_ranks"])
    return {"loss": plain(told), "gradient": plain(weight.grad)}


def of_all_tokens(case: Case) -> dict[str, Any]:
    """The mean over the tokens of all rows, and its gradient."""
    x, target, weight = (case.inputs[name].astype(np.float64) for name in ("x", "target", "weight"))
    off = x @ weight - target
    return {"loss": float((off**2).mean()), "gradient": 2 * (off[..., None] * x).reshape(-1, len(weight)).mean(0)}


CONTEXT = Task(
    **kit.about("museum.context"),
    draw=each_world(context_case, worlds=(1, 2, 4)),  # context ranks alone on 2, on 4 with data ranks too
    observe=observe_context,
    own={"x": along(0), "target": along(0)},
    essential=("gradient",),
    properties={
        "gradient": Property(3, kit.equals("gradient", of_all_tokens, of="gradient", on_all=True)),
        "loss": Property(1, kit.equals("loss", of_all_tokens, of="loss", on_all=True)),
    },
)


# --- museum.tokens ---

IGNORED = -100


def tokens_case(rng: random.Random, world: int) -> dict:
    """Ranks with unlike numbers of tokens that count; on three ranks or more one of them with none."""
    tokens, classes = rng.randrange(3, 6), rng.randrange(3, 6)
    labels = whole(rng, 0, classes, world, tokens)
    labels[0, 1:] = IGNORED
    if world > 2:
        labels[1] = IGNORED
    return {"logits": numbers(rng, world, tokens, classes), "labels": labels}


def observe_tokens(function: Callable[..., Any], case: Case, rank: int) -> dict:
    logits = kit.tensor(case.inputs["logits"][rank]).requires_grad_()
    with Recorder() as record:
        loss = function(logits, kit.tensor(case.inputs["labels"][rank]))
    loss.backward()
    return kit.noted(record, loss=loss, gradient=logits.grad)


def of_counted_tokens(case: Case) -> tuple[float, list[np.ndarray]]:
    """The mean over all ranks' tokens that count; its gradient, times the ranks, since DDP will average."""
    logits, labels = kit.tensor(case.inputs["logits"]).double().requires_grad_(), kit.tensor(case.inputs["labels"])
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(mean, logits)
    return float(mean.detach()), list(case.world_size * gradient.numpy())


def averages_to_the_mean(case: Case, seen: Seen) -> Miss | None:
    right = of_counted_tokens(case)[0]
    loss = sum(number(seen, rank, "loss") for rank in range(case.world_size)) / case.world_size
    return kit.unless(abs(loss - right) <= 1e-4 * max(1.0, right), f"losses with a mean of {right:.5g}", f"{loss:.5g}")


@kit.each_rank
def a_count_travels(case: Case, seen: Seen, rank: int) -> Miss | None:
    number(seen, rank, "loss")
    made = made_by(seen, rank)
    fits = case.world_size == 1 or (made and kit.carried(made) <= 8 * case.world_size)
    return kit.unless(fits, "a count, and nothing else", kit.listed(made))


TOKENS = Task(
    **kit.about("museum.tokens"),
    draw=each_world(tokens_case),
    observe=observe_tokens,
    own={"logits": along(0), "labels": along(0)},
    essential=("gradient",),
    properties={
        "gradient": Property(3, kit.equals("gradient", of_counted_tokens, of=1)),
        "mean of the losses": Property(1, averages_to_the_mean),
        "what travels": Property(1, a_count_travels),
    },
)


# --- museum.micro ---


def micro_case(rng: random.Random, world: int) -> dict:
    micro_batches = rng.randrange(2, 5) if world > 1 else 1
    return {"gradients": numbers(rng, world, micro_batches, world * rng.randrange(2, 4))}


def observe_micro(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = kit.tensor(case.inputs["gradients"][rank])
    with Recorder() as record:
        shard = function(list(gradients))
    return kit.noted(record, shard=shard)


def shards(case: Case) -> list[np.ndarray]:
    return np.split(case.inputs["gradients"].astype(np.float64).mean((0, 1)), case.world_size)


@kit.each_rank
def only_shards_arrive(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Reduce-scatters of one gradient each, of every micro-batch or of their sum."""
    size, most, made = case.inputs["gradients"][0, 0].nbytes, case.inputs["gradients"].shape[1], made_by(seen, rank)
    if case.world_size == 1:
        return near(seen, "shard", shards(case))
    fits = set(made) == {f"reduce_scatter {size}"} and len(made) <= most
    return kit.unless(fits, f"reduce_scatter {size}, {most} times at most", kit.listed(made, "nothing"))


MICRO = Task(
    **kit.about("museum.micro"),
    draw=each_world(micro_case),
    observe=observe_micro,
    own={"gradients": along(0)},
    essential=("shard",),
    properties={"shard": Property(3, kit.equals("shard", shards)), "reduce-scatter": Property(1, only_shards_arrive)},
)


# --- museum.twice ---

STEPS = 2


def twice_case(rng: random.Random, world: int) -> dict:
    """Factors by rank, step and use; of three weights the middle one is used twice."""
    return {"factors": numbers(rng, world, STEPS, 4, rng.randrange(2, 4))}


def observe_twice(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Each step is two backwards, as where a module is computed anew for its second use."""
    factors = kit.tensor(case.inputs["factors"][rank])
    weights = [torch.zeros(factors.shape[-1], requires_grad=True) for _ in range(3)]
    traces: dict[str, list] = {"once": [], "twice": []}
    with Recorder() as record:
        finish = function(weights)
        for step, (first, middle, again, last) in enumerate(factors):
            record.note("begins")
            (last @ weights[2] + again @ weights[1]).backward()
            (first @ weights[0] + middle @ weights[1]).backward()
            record.note(f"backward of step {step}")
            finish()
            once, twice, other = (weight.grad.clone() for weight in weights if weight.grad is not None)
            traces["once"].append(torch.stack((once, other)))
            traces["twice"].append(twice)
            for weight in weights:
                weight.grad = None
    dist.barrier()
    return kit.noted(record, **{name: torch.stack(values) for name, values in traces.items()})


def mean_by_uses(case: Case) -> dict[str, np.ndarray]:
    mean = case.inputs["factors"].astype(np.float64).mean(0)
    return {"once": mean[:, [0, 3]], "twice": mean[:, 1] + mean[:, 2]}


@kit.each_rank
def leave_during_backward(case: Case, seen: Seen, rank: int) -> Miss | None:
    """At least those that are used once are on their way before the backward ends; no wait before it."""
    if miss := waited_for(events(seen, rank), rank):
        return miss
    early, finished = 0, 0
    for event in events(seen, rank):
        if event.startswith("backward"):
            if early < 3:
                return Miss(f"3 all-reduces or more before the backward of step {finished} ends", str(early))
            early, finished = 0, finished + 1
        elif event in ("begins", "wait"):
            early = 0
        elif event.startswith("all_reduce"):
            early += 1
    return kit.unless(finished == STEPS, f"{STEPS} steps", str(finished))


TWICE = Task(
    **kit.about("museum.twice"),
    draw=each_world(twice_case),
    observe=observe_twice,
    own={"factors": along(0)},
    essential=("used twice",),
    properties={
        "used once": Property(1, kit.equals("once", mean_by_uses, of="once", on_all=True)),
        "used twice": Property(3, kit.equals("twice", mean_by_uses, of="twice", on_all=True)),
        "during backward": Property(2, leave_during_backward),
    },
)
