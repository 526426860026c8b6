"""Lesson 15: a router with a capacity, an uneven all-to-all, whose gradients are summed, and a layer of experts."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, dtype_of, events, made_by, near, of_dtype, result, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, along, each_world, in_turn, numbers

LESSON = "15_experts"
ROOMY, TIGHT, LARGE = "roomy", "tight", "large"


# --- experts.route ---


def route_case(rng: random.Random, place: int) -> dict:
    """Logits of tokens: with room for all copies, with too little, or so large that exponentials overflow."""
    kind = (ROOMY, TIGHT, LARGE)[place % 3]
    tokens, experts, k = rng.randrange(6, 10), rng.randrange(3, 6), rng.randrange(2, 4)
    logits = numbers(rng, tokens, experts) + np.arange(experts, dtype=np.float32) / 1024  # no two are equal
    logits[:, rng.randrange(experts)] += 1  # a popular one
    if kind == LARGE:
        logits += 1000
    capacity = ceil(tokens * k / experts) if kind == TIGHT else tokens
    return {"kind": kind, "logits": logits.astype(np.float32), "k": min(k, experts - 1), "capacity": capacity}


def observe_route(function: Callable[..., Any], case: Case, rank: int) -> dict:
    chosen, weights, kept = function(
        torch.from_numpy(case.inputs["logits"].copy()), case.inputs["k"], case.inputs["capacity"]
    )
    return {"chosen": plain(chosen), "weights": plain(weights), "kept": plain(kept)}


def routed(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, k) experts, weights in float64, and whether there was room; token by token."""
    logits, k = case.inputs["logits"].astype(np.float64), case.inputs["k"]
    chosen = np.argsort(-logits, axis=1)[:, :k]
    best = np.take_along_axis(logits, chosen, 1)
    worth = np.exp(best - best.max(1, keepdims=True))
    taken, kept = Counter[int](), np.zeros(chosen.shape)
    for choice in range(k):
        for token, expert in enumerate(chosen[:, choice]):
            kept[token, choice] = taken[expert] < case.inputs["capacity"]
            taken[expert] += 1
    return chosen, worth / worth.sum(1, keepdims=True), kept


def chosen_right(case: Case, seen: Seen) -> Miss | None:
    return near(seen, "chosen", [routed(case)[0]])


def weighed(large: bool) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = [routed(case)[1]]
        array(seen, 0, "weights", right[0].shape)
        return near(seen, "weights", right) if (case.inputs["kind"] == LARGE) == large else None

    return rule


def kept_right(case: Case, seen: Seen) -> Miss | None:
    return near(seen, "kept", [routed(case)[2]])


ROUTE = Task(
    name="experts.route",
    lesson=LESSON,
    function="route",
    title="Choose, weigh, and drop",
    difficulty=2,
    importance=4,
    minutes=20,
    draw=in_turn(route_case, 6),
    observe=observe_route,
    needs_ranks=False,
    essential=("weights", "kept"),
    properties={
        "chosen": Property(1, chosen_right),
        "weights": Property(2, weighed(large=False)),
        "large scores": Property(1, weighed(large=True)),
        "kept": Property(2, kept_right),
    },
)


# --- experts.dispatch ---


def dispatch_case(rng: random.Random, world: int, dtype: str = "float32") -> dict:
    """Tokens with their experts; most choose among a few, and the second of all gets none, nor, in bfloat16, any of the
    last rank's."""
    own, tokens = rng.randrange(2, 4), world * rng.randrange(4, 7)
    liked = [expert for expert in range(own * (world - (dtype == "bfloat16"))) if expert != 1]
    chosen = [rng.choice(liked if rng.random() < 0.5 else liked[:2]) for _ in range(tokens)]
    return {
        "tokens": numbers(rng, tokens, rng.randrange(2, 4)).clip(-3.5, 3.5),
        "chosen": np.array(chosen),
        "experts": world * own,
        "dtype": dtype,
    }


def draw_dispatch(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks; and on the last once more, where its last rank gets no token."""
    return [*each_world(dispatch_case)(rng, worlds), Case(worlds[-1], dispatch_case(rng, worlds[-1], "bfloat16"))]


def observe_dispatch(function: Callable[..., Any], case: Case, rank: int) -> dict:
    tokens, chosen = (
        torch.from_numpy(np.split(case.inputs[name], case.world_size)[rank].copy()) for name in ("tokens", "chosen")
    )
    with Recorder() as record:
        rows, per_expert = function(tokens.to(getattr(torch, case.inputs["dtype"])), chosen, case.inputs["experts"])
    return {
        "rows": plain(rows),
        "dtype of rows": dtype_of(rows),
        "per_expert": plain(per_expert),
        "events": record.events,
    }


def arrived(case: Case) -> tuple[list[np.ndarray], list[list[int]]]:
    """By rank: the rows for its experts, one after the other and from rank 0 on, and how many for each."""
    own = case.inputs["experts"] // case.world_size
    by_expert = [case.inputs["tokens"][case.inputs["chosen"] == expert] for expert in range(case.inputs["experts"])]
    parts = [by_expert[rank * own : (rank + 1) * own] for rank in range(case.world_size)]
    return [np.concatenate(part) for part in parts], [list(map(len, part)) for part in parts]


def rows_are(case: Case, seen: Seen) -> Miss | None:
    return near(seen, "rows", arrived(case)[0]) or of_dtype(seen, "rows", case.inputs["dtype"])


def counted(case: Case, seen: Seen) -> Miss | None:
    for rank, right in enumerate(arrived(case)[1]):
        counts = seen[rank].get("per_expert")
        counts = counts.tolist() if isinstance(counts, np.ndarray) else counts
        if not isinstance(counts, list) or not all(type(number) is int for number in counts):
            raise Malformed(Miss("whole numbers as counts", short(counts), rank))
        if counts != right:
            return Miss(f"counts {right}", short(counts), rank)
    return None


def handed_in(seen: Seen, rank: int, most: int, part: Sequence[str]) -> Miss | None:
    """Only all-to-alls, into which a rank hands so many bytes at most."""
    others = [event for event in part if not event.startswith("all_to_all ")]
    total = sum(int(event.split()[1]) for event in part)
    if others or total > most or (len(seen) > 1 and not part):
        return Miss(f"all-to-alls of {most} bytes at most", short(", ".join(part) or "no collective"), rank)
    return None


def only_what_goes(case: Case, seen: Seen) -> Miss | None:
    """The counts and each token once."""
    width = getattr(torch, case.inputs["dtype"]).itemsize
    most = 8 * case.inputs["experts"] + width * case.inputs["tokens"].size // case.world_size
    for rank in range(case.world_size):
        if miss := handed_in(seen, rank, most, made_by(seen, rank)):
            return miss
    array(seen, 0, "rows")
    return None


DISPATCH = Task(
    name="experts.dispatch",
    lesson=LESSON,
    function="dispatch",
    title="To the experts, unevenly",
    difficulty=4,
    importance=5,
    minutes=40,
    draw=draw_dispatch,
    observe=observe_dispatch,
    own={"tokens": along(0), "chosen": along(0)},
    essential=("rows", "nothing else travels"),
    properties={
        "rows": Property(3, rows_are),
        "counts": Property(1, counted),
        "nothing else travels": Property(2, only_what_goes),
    },
)


# --- experts.gradients ---


def gradients_case(rng: random.Random, world: int) -> dict:
    size = 2 if world == 4 else rng.choice([size for size in (1, 2, 3) if world % size == 0])
    return {
        "size": size,
        "router": numbers(rng, world, rng.randrange(3, 6)),
        "experts": numbers(rng, world, rng.randrange(5, 8)),
    }


def draw_gradients(rng: random.Random, worlds: Sequence[int] = (1, 2, 4)) -> list[Case]:
    return [Case(world, gradients_case(rng, world)) for world in worlds]


def observe_gradients(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = (torch.from_numpy(case.inputs[name][rank].copy()) for name in ("router", "experts"))
    with Recorder() as record:
        router, experts = function(*mine, case.inputs["size"])
    return {"router": plain(router), "experts": plain(experts), "events": record.events}


def of_the_mean(case: Case) -> list[np.ndarray]:
    """The experts' gradients by rank: summed where they are the same experts, over the number of all ranks."""
    given, size = case.inputs["experts"].astype(np.float64), case.inputs["size"]
    return [given[rank % size :: size].sum(0) / case.world_size for rank in range(case.world_size)]


def each_once(case: Case, seen: Seen) -> Miss | None:
    """No rank hands in more than its two gradients."""
    most = (case.inputs["router"].nbytes + case.inputs["experts"].nbytes) // case.world_size
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if sum(int(event.split()[1]) for event in made) > most or (case.world_size > 1 and not made):
            return Miss(f"{most} bytes in collectives at most", short(", ".join(made) or "no collective"), rank)
    array(seen, 0, "experts")
    return None


GRADIENTS = Task(
    name="experts.gradients",
    lesson=LESSON,
    function="reduce_gradients",
    title="Whose gradient is it?",
    difficulty=3,
    importance=5,
    minutes=25,
    draw=draw_gradients,
    observe=observe_gradients,
    own={"router": along(0), "experts": along(0)},
    essential=("experts",),
    properties={
        "router": Property(1, result("router", lambda case: [case.inputs["router"].mean(0)] * case.world_size)),
        "experts": Property(3, result("experts", of_the_mean)),
        "each once": Property(2, each_once),
    },
)


# --- experts.layer ---

LEAVES = ("tokens", "router", "up", "down")


def layer_case(rng: random.Random, world: int, idle: bool = False) -> dict:
    """Tokens whose first number is 1, so that the router's first column makes experts popular; the last gets nobody.

    With ``idle``, all experts of the last rank get none.
    """
    own, width, inner = rng.randrange(2, 4) if world > 1 else 3, rng.randrange(3, 5), rng.randrange(2, 4)
    experts, tokens = world * own, numbers(rng, world * rng.randrange(4, 7), width)
    tokens[:, 0] = 1
    router = numbers(rng, experts, width)
    router[-own if idle else -1 :, 0] = -50
    return {
        "tokens": tokens,
        "router": router,
        "up": numbers(rng, experts, inner, width),
        "down": numbers(rng, experts, width, inner),
        "k": rng.randrange(1, 3),
    }


def draw_layers(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks, and two ranks of which nobody chooses the last one."""
    return [*each_world(layer_case)(rng, worlds), Case(2, layer_case(rng, 2, idle=True))]


def part_of(case: Case, rank: int) -> list[torch.Tensor]:
    parts = [
        case.inputs[name] if name == "router" else np.split(case.inputs[name], case.world_size)[rank] for name in LEAVES
    ]
    return [torch.from_numpy(part.copy()).requires_grad_() for part in parts]


def observe_layer(function: Callable[..., Any], case: Case, rank: int) -> dict:
    leaves = part_of(case, rank)
    with Recorder() as record:
        output = function(*leaves, case.inputs["k"])
        record.note("backward")
        output.square().sum().backward()
    return {
        "output": plain(output),
        "events": record.events,
        **{name: plain(leaf.grad) for name, leaf in zip(LEAVES, leaves, strict=True)},
    }


def by_one_process(case: Case) -> dict[str, list[np.ndarray]]:
    """In float64, by rank: the output, the gradients, and (chosen) which experts its tokens chose."""
    tokens, router, up, down = (torch.from_numpy(case.inputs[name].copy()).double().requires_grad_() for name in LEAVES)
    routers = [router.detach().clone().requires_grad_() for _ in range(case.world_size)]  # each rank's own gradient
    outputs, chosen = [], []
    for part, own in zip(tokens.chunk(case.world_size), routers, strict=True):
        best, choice = (part @ own.T).topk(case.inputs["k"], -1)
        hidden = torch.relu(torch.einsum("tkiw,tw->tki", up[choice], part))
        outputs.append((best.softmax(-1)[..., None] * torch.einsum("tkwi,tki->tkw", down[choice], hidden)).sum(1))
        chosen.append(choice.flatten().numpy())
    torch.cat(outputs).square().sum().backward()
    wholes = {
        name: np.split(leaf.grad.numpy(), case.world_size)
        for name, leaf in (("tokens", tokens), ("up", up), ("down", down))
        if leaf.grad is not None
    }
    return {
        "output": [output.detach().numpy() for output in outputs],
        "chosen": chosen,
        **wholes,
        "router": [own.grad.numpy() for own in routers if own.grad is not None],
    }


def of_experts(case: Case, seen: Seen) -> Miss | None:
    right = by_one_process(case)
    return near(seen, "up", right["up"]) or near(seen, "down", right["down"])


def copies_alone(case: Case, seen: Seen) -> Miss | None:
    """Forward the counts, the copies of a rank's tokens and the outputs that it owes; backward their gradients."""
    chosen, ranks = by_one_process(case)["chosen"], case.world_size
    owners = [choice // (len(case.inputs["router"]) // ranks) for choice in chosen]
    row = case.inputs["tokens"][0].nbytes
    for rank in range(ranks):
        copies = len(chosen[rank]) + sum(int((owner == rank).sum()) for owner in owners)
        noted = events(seen, rank)
        turn = noted.index("backward") if "backward" in noted else len(noted)
        made = set(made_by(seen, rank))
        for part, most in ((noted[:turn], 8 * len(case.inputs["router"]) + copies * row), (noted[turn:], copies * row)):
            if miss := handed_in(seen, rank, most, [event for event in part if event in made]):
                return miss
    array(seen, 0, "output")
    return None


LAYER = Task(
    name="experts.layer",
    lesson=LESSON,
    function="experts_layer",
    title="Build it: a layer of experts",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=draw_layers,
    observe=observe_layer,
    own={"tokens": along(0), "up": along(0), "down": along(0)},
    essential=("output", "gradients of experts", "copies alone travel"),
    properties={
        "output": Property(2, result("output", lambda case: by_one_process(case)["output"])),
        "gradient of tokens": Property(1, result("tokens", lambda case: by_one_process(case)["tokens"])),
        "gradient of the router": Property(1, result("router", lambda case: by_one_process(case)["router"])),
        "gradients of experts": Property(3, of_experts),
        "copies alone travel": Property(2, copies_alone),
    },
)

ALL = (ROUTE, DISPATCH, GRADIENTS, LAYER)
