"""Lesson 16's museum: losses and micro-batches, in forms that were written wrong."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, made_by, near, number, result, short, waited_for
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import along, each_world, numbers, whole

LESSON = "16_gradient_audit"

# --- museum.context ---


def context_case(rng: random.Random, world: int) -> dict:
    rows, tokens, width = rng.randrange(1, 3), rng.randrange(2, 4), rng.randrange(2, 4)
    return {
        "data_ranks": {4: 2}.get(world, 1 if world == 2 else rng.choice((1, world))),
        "x": numbers(rng, world, rows, tokens, width),
        "target": numbers(rng, world, rows, tokens),
        "weight": numbers(rng, width),
    }


def draw_context(rng: random.Random, worlds: Sequence[int] = (1, 2, 4)) -> list[Case]:
    """Context ranks alone on 2, on 4 with data ranks too."""
    return each_world(context_case)(rng, worlds)


def observe_context(function: Callable[..., Any], case: Case, rank: int) -> dict:
    weight = torch.from_numpy(case.inputs["weight"].copy()).requires_grad_()
    x, target = (torch.from_numpy(case.inputs[name][rank].copy()) for name in ("x", "target"))
    told = function(weight, x, target, case.inputs["data_ranks"])
    return {"loss": plain(told), "gradient": plain(weight.grad)}


def of_all_tokens(case: Case) -> tuple[float, np.ndarray]:
    """The mean over the tokens of all rows, and its gradient."""
    x, target, weight = (case.inputs[name].astype(np.float64) for name in ("x", "target", "weight"))
    off = x @ weight - target
    return float((off**2).mean()), 2 * (off[..., None] * x).reshape(-1, len(weight)).mean(0)


CONTEXT = Task(
    name="museum.context",
    lesson=LESSON,
    function="backward_of_part",
    title="Exhibit 9: rows on several ranks",
    difficulty=2,
    importance=4,
    minutes=20,
    draw=draw_context,
    observe=observe_context,
    own={"x": along(0), "target": along(0)},
    essential=("gradient",),
    properties={
        "gradient": Property(3, result("gradient", lambda case: [of_all_tokens(case)[1]] * case.world_size)),
        "loss": Property(1, result("loss", lambda case: [np.array(of_all_tokens(case)[0])] * case.world_size)),
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
    logits = torch.from_numpy(case.inputs["logits"][rank].copy()).requires_grad_()
    with Recorder() as record:
        loss = function(logits, torch.from_numpy(case.inputs["labels"][rank].copy()))
    loss.backward()
    return {"loss": plain(loss), "gradient": plain(logits.grad), "events": record.events}


def of_counted_tokens(case: Case) -> tuple[float, list[np.ndarray]]:
    """The mean over all ranks' tokens that count; its gradient, times the ranks, since DDP will average."""
    logits = torch.from_numpy(case.inputs["logits"].copy()).double().requires_grad_()
    labels = torch.from_numpy(case.inputs["labels"].copy())
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(mean, logits)
    return float(mean.detach()), list(case.world_size * gradient.numpy())


def averages_to_the_mean(case: Case, seen: Seen) -> Miss | None:
    right = of_counted_tokens(case)[0]
    loss = sum(number(seen, rank, "loss") for rank in range(case.world_size)) / case.world_size
    return (
        None
        if abs(loss - right) <= 1e-4 * max(1.0, right)
        else Miss(f"losses with a mean of {right:.5g}", f"{loss:.5g}")
    )


def a_count_travels(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        number(seen, rank, "loss")
        made = made_by(seen, rank)
        if case.world_size > 1 and (not made or sum(int(event.split()[1]) for event in made) > 8 * case.world_size):
            return Miss("a count, and nothing else", short(", ".join(made) or "no collective"), rank)
    return None


TOKENS = Task(
    name="museum.tokens",
    lesson=LESSON,
    function="loss_for_ddp",
    title="Exhibit 10: a mean over tokens",
    difficulty=2,
    importance=5,
    minutes=20,
    draw=each_world(tokens_case),
    observe=observe_tokens,
    own={"logits": along(0), "labels": along(0)},
    essential=("gradient",),
    properties={
        "gradient": Property(3, result("gradient", lambda case: of_counted_tokens(case)[1])),
        "mean of the losses": Property(1, averages_to_the_mean),
        "what travels": Property(1, a_count_travels),
    },
)


# --- museum.micro ---


def micro_case(rng: random.Random, world: int) -> dict:
    micro_batches = rng.randrange(2, 5) if world > 1 else 1
    return {"gradients": numbers(rng, world, micro_batches, world * rng.randrange(2, 4))}


def observe_micro(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = torch.from_numpy(case.inputs["gradients"][rank].copy())
    with Recorder() as record:
        shard = function(list(gradients))
    return {"shard": plain(shard), "events": record.events}


def shards(case: Case) -> list[np.ndarray]:
    return np.split(case.inputs["gradients"].astype(np.float64).mean((0, 1)), case.world_size)


def only_shards_arrive(case: Case, seen: Seen) -> Miss | None:
    """Reduce-scatters of one gradient each, of every micro-batch or of their sum."""
    size, micro_batches = case.inputs["gradients"][0, 0].nbytes, case.inputs["gradients"].shape[1]
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if case.world_size > 1 and (set(made) != {f"reduce_scatter {size}"} or len(made) > micro_batches):
            return Miss(
                f"reduce_scatter {size}, {micro_batches} times at most", short(", ".join(made) or "nothing"), rank
            )
    return near(seen, "shard", shards(case)) if case.world_size == 1 else None


MICRO = Task(
    name="museum.micro",
    lesson=LESSON,
    function="sharded_gradient",
    title="Exhibit 11: micro-batches and a shard",
    difficulty=2,
    importance=4,
    minutes=20,
    draw=each_world(micro_case),
    observe=observe_micro,
    own={"gradients": along(0)},
    essential=("shard",),
    properties={"shard": Property(3, result("shard", shards)), "reduce-scatter": Property(1, only_shards_arrive)},
)


# --- museum.twice ---

STEPS = 2


def twice_case(rng: random.Random, world: int) -> dict:
    """Factors by rank, step and use; of three weights the middle one is used twice."""
    return {"factors": numbers(rng, world, STEPS, 4, rng.randrange(2, 4))}


def observe_twice(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Each step is two backwards, as where a module is computed anew for its second use."""
    factors = torch.from_numpy(case.inputs["factors"][rank].copy())
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
    return {name: plain(torch.stack(values)) for name, values in traces.items()} | {"events": record.events}


def mean_by_uses(name: str) -> Rule:
    def oracle(case: Case) -> list[np.ndarray]:
        mean = case.inputs["factors"].astype(np.float64).mean(0)
        right = mean[:, [0, 3]] if name == "once" else mean[:, 1] + mean[:, 2]
        return [right] * case.world_size

    return result(name, oracle)


def leave_during_backward(case: Case, seen: Seen) -> Miss | None:
    """At least those that are used once are on their way before the backward ends; no wait before it."""
    for rank in range(case.world_size):
        if miss := waited_for(events(seen, rank), rank):
            return miss
        early, finished = 0, 0
        for event in events(seen, rank):
            if event.startswith("backward"):
                if early < 3:
                    return Miss(f"3 all-reduces or more before the backward of step {finished} ends", str(early), rank)
                early, finished = 0, finished + 1
            elif event in ("begins", "wait"):
                early = 0
            elif event.startswith("all_reduce"):
                early += 1
        if finished != STEPS:
            return Miss(f"{STEPS} steps", str(finished), rank)
    return None


TWICE = Task(
    name="museum.twice",
    lesson=LESSON,
    function="reduce_as_they_come",
    title="Exhibit 12: a module that is used twice",
    difficulty=4,
    importance=4,
    minutes=30,
    draw=each_world(twice_case),
    observe=observe_twice,
    own={"factors": along(0)},
    essential=("used twice",),
    properties={
        "used once": Property(1, mean_by_uses("once")),
        "used twice": Property(3, mean_by_uses("twice")),
        "during backward": Property(2, leave_during_backward),
    },
)

ALL = (CONTEXT, TOKENS, MICRO, TWICE)
