"""Lesson 16's museum: gradients that are brought together over ranks, in forms that were written wrong."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, calls, made_by, near
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import along, each_world, numbers

# --- museum.mixture ---

SHARED = (
    "embedding.weight",
    "layers.0.attention.weight",
    "layers.0.mlp.gate.weight",
    "layers.0.mlp.shared_experts.up.weight",
    "head.weight",
)
EXPERT = ("layers.0.mlp.experts.up.weight", "layers.0.mlp.experts.down.weight")
KINDS = {
    "router": (SHARED[2],),
    "experts": EXPERT,
    "all others": (SHARED[0], SHARED[1], SHARED[4]),
    "shared experts": (SHARED[3],),
}


def mixture_case(rng: random.Random, world: int) -> dict:
    names = [*SHARED, *EXPERT]
    rng.shuffle(names)
    return {"names": names, "gradients": numbers(rng, world, len(names), rng.randrange(2, 5))}


def observe_mixture(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = dict(zip(case.inputs["names"], map(kit.tensor, case.inputs["gradients"][rank]), strict=True))
    function(gradients)
    return {kind: plain(torch.stack([gradients[name] for name in names])) for kind, names in KINDS.items()}


def mean_of(kind: str) -> Rule:
    def oracle(case: Case) -> list[np.ndarray]:
        chosen = [case.inputs["names"].index(name) for name in KINDS[kind]]
        ours = case.inputs["gradients"].astype(np.float64)[:, chosen] / case.world_size
        return list(ours) if kind == "experts" else [ours.sum(0)] * case.world_size

    return kit.equals(kind, oracle)


MIXTURE = Task(
    **kit.about("museum.mixture"),
    draw=each_world(mixture_case),
    observe=observe_mixture,
    own={"gradients": along(0)},
    essential=("router", "experts"),
    properties={
        "router": Property(3, mean_of("router")),
        "experts": Property(2, mean_of("experts")),
        "shared experts": Property(1, mean_of("shared experts")),
        "all others": Property(1, mean_of("all others")),
    },
)


# --- museum.experts ---


def experts_case(rng: random.Random, world: int) -> dict:
    expert_ranks = {1: 1, 2: 2, 4: 2, 6: rng.choice((2, 3))}[world]
    return {"expert_ranks": expert_ranks, "gradient": numbers(rng, world, rng.randrange(2, 5), 3)}


def copies(case: Case, rank: int) -> list[int]:
    """The ranks with the same experts."""
    return list(range(rank % case.inputs["expert_ranks"], case.world_size, case.inputs["expert_ranks"]))


def observe_experts(function: Callable[..., Any], case: Case, rank: int) -> dict:
    groups = [dist.new_group(copies(case, first)) for first in range(case.inputs["expert_ranks"])]
    gradient = kit.tensor(case.inputs["gradient"][rank])
    with Recorder() as record:
        function(gradient, groups[rank % case.inputs["expert_ranks"]])
    # Of one copy alone there is nothing to send, so nothing that the grader could find on the wire.
    return {"gradient": plain(gradient), "events": record.events if len(copies(case, rank)) > 1 else []}


def sent_to_copies(case: Case) -> list[str]:
    """The ranks of a case have equally many copies."""
    return [f"all_reduce {case.inputs['gradient'][0].nbytes}"] * (len(copies(case, 0)) > 1)


def mean_over_copies(case: Case) -> list[np.ndarray]:
    whole = case.inputs["gradient"].astype(np.float64)
    return [whole[copies(case, rank)].sum(0) / case.world_size for rank in range(case.world_size)]


EXPERTS = Task(
    **kit.about("museum.experts"),
    draw=each_world(experts_case, worlds=(1, 2, 4)),  # that can be laid out as copies of ranks with different experts
    observe=observe_experts,
    own={"gradient": along(0)},
    essential=("gradient",),
    properties={
        "gradient": Property(3, kit.equals("gradient", mean_over_copies)),
        "one all-reduce": Property(1, kit.made_are(sent_to_copies)),
    },
)


# --- museum.buckets ---


def buckets_case(rng: random.Random, world: int) -> dict:
    """Gradients smaller than a bucket, as large as one, and larger; in each case one of each at least."""
    limit = rng.randrange(6, 12)
    sizes = [limit, limit + rng.randrange(1, 5), *(rng.randrange(1, limit) for _ in range(rng.randrange(3, 6)))]
    rng.shuffle(sizes)
    return {"limit": limit, "gradients": [numbers(rng, world, size) for size in sizes]}


def parts_of(gradients: list[np.ndarray], rank: int, world_size: int) -> list[np.ndarray]:
    """A rank's part of a list of arrays with an entry for each rank."""
    return [along(0)(gradient, rank, world_size) for gradient in gradients]


def observe_buckets(function: Callable[..., Any], case: Case, rank: int) -> dict:
    gradients = [kit.tensor(gradient[rank]) for gradient in case.inputs["gradients"]]
    with Recorder() as record:
        function(gradients, case.inputs["limit"])
    return kit.noted(record, gradients=gradients)


def sizes_of(case: Case) -> list[int]:
    return [gradient.shape[1] for gradient in case.inputs["gradients"]]


def mean_of_size(chosen: Callable[[int, int], bool]) -> Rule:
    """The means of the gradients whose size and the limit are so."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        lists = [observed.get("gradients") for observed in seen]
        for place, size in enumerate(sizes_of(case)):
            right = case.inputs["gradients"][place].astype(np.float64).mean(0)
            for rank, held in enumerate(lists):
                mine = held[place] if isinstance(held, list) and len(held) == len(sizes_of(case)) else None
                miss = near([{"gradient": mine}], "gradient", [right])
                if miss and chosen(size, case.inputs["limit"]):
                    return Miss(f"{miss.expected} of {size} numbers", miss.found, rank, miss.note)
        return None

    return rule


@kit.each_rank
def few_messages(case: Case, seen: Seen, rank: int) -> Miss | None:
    """None larger than a bucket but those of larger gradients, and together no more than neighbours would need."""
    limit, sizes = case.inputs["limit"], sizes_of(case)
    larger = sorted(4 * size for size in sizes if size > limit)
    buckets, filled = 0, limit + 1
    for size in (size for size in sizes if size <= limit):
        buckets, filled = (buckets + 1, size) if filled + size > limit else (buckets, filled + size)
    made, total = calls(seen, rank, "all_reduce"), len(made_by(seen, rank))
    if sorted(size for size in made if size > 4 * limit) != larger:
        return Miss(f"no bucket of more than {limit} numbers", f"messages of {sorted(made)} bytes")
    fits = len(larger) < len(made) <= len(larger) + buckets and len(made) == total
    return kit.unless(fits, f"at most {len(larger) + buckets} messages", f"{total}")


BUCKETS = Task(
    **kit.about("museum.buckets"),
    draw=each_world(buckets_case),
    observe=observe_buckets,
    own={"gradients": parts_of},
    essential=("as large as a bucket",),
    properties={
        "smaller than a bucket": Property(1, mean_of_size(lambda size, limit: size < limit)),
        "as large as a bucket": Property(3, mean_of_size(lambda size, limit: size == limit)),
        "larger than a bucket": Property(1, mean_of_size(lambda size, limit: size > limit)),
        "messages": Property(2, few_messages),
    },
)


# --- museum.outer ---

STEPS = 2


def outer_case(rng: random.Random, world: int) -> dict:
    size = rng.randrange(2, 5)
    return {
        "before": numbers(rng, size),
        "walks": numbers(rng, world, STEPS, size),
        "rate": rng.choice((0.25, 0.5, 0.75)),
        "beta": rng.choice((0.25, 0.5)),
    }


def observe_outer(function: Callable[..., Any], case: Case, rank: int) -> dict:
    before = kit.tensor(case.inputs["before"])
    momentum = torch.zeros_like(before)
    seen: dict[str, list] = {"weights": [], "momentum": []}
    with Recorder() as record:
        for walk in case.inputs["walks"][rank]:
            weights = before + kit.tensor(walk)  # what the rank's own steps made of them
            function(weights, before, momentum, case.inputs["rate"], case.inputs["beta"])
            seen["weights"].append(weights.clone())
            seen["momentum"].append(momentum.clone())
            before = weights.clone()
    return kit.noted(record, **{name: torch.stack(values) for name, values in seen.items()})


def by_outer_steps(case: Case) -> dict[str, np.ndarray]:
    """In float64, by step."""
    weights, momentum = case.inputs["before"].astype(np.float64), 0.0
    traces: dict[str, list] = {"weights": [], "momentum": []}
    for walk in case.inputs["walks"].astype(np.float64).mean(0):
        momentum = case.inputs["beta"] * momentum - walk
        weights = weights - case.inputs["rate"] * momentum
        traces["weights"].append(weights)
        traces["momentum"].append(momentum)
    return {name: np.stack(values) for name, values in traces.items()}


def one_in_each_step(case: Case) -> list[str]:
    return [f"all_reduce {case.inputs['before'].nbytes}"] * STEPS


def of_outer_steps(name: str) -> Rule:
    return kit.equals(name, by_outer_steps, of=name, on_all=True, first_step=0)


OUTER = Task(
    **kit.about("museum.outer"),
    draw=each_world(outer_case),
    observe=observe_outer,
    own={"walks": along(0)},
    essential=("weights",),
    properties={
        "weights": Property(3, of_outer_steps("weights")),
        "momentum": Property(2, of_outer_steps("momentum")),
        "one all-reduce": Property(1, kit.made_are(one_in_each_step)),
    },
)
