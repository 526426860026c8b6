"""Lesson 15: a router with a capacity, an uneven all-to-all, whose gradients are summed, and a layer of experts."""

import random
from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, dtype_of, events, made_by, near, of_dtype, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import LAST, along, each_world, in_turn, numbers

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
    given = case.inputs
    chosen, weights, kept = function(kit.tensor(given["logits"]), given["k"], given["capacity"])
    return {"chosen": plain(chosen), "weights": plain(weights), "kept": plain(kept)}


def routed(case: Case) -> dict[str, np.ndarray]:
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
    return {"chosen": chosen, "weights": worth / worth.sum(1, keepdims=True), "kept": kept}


def as_routed(key: str, *kinds: str) -> Rule:
    return kit.equals(key, routed, *kinds, of=key, on_all=True)


ROUTE = Task(
    **kit.about("experts.route"),
    draw=in_turn(route_case, 6),
    observe=observe_route,
    essential=("weights", "kept"),
    properties={
        "chosen": Property(1, as_routed("chosen")),
        "weights": Property(2, as_routed("weights", ROOMY, TIGHT)),
        "large scores": Property(1, as_routed("weights", LARGE)),
        "kept": Property(2, as_routed("kept")),
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


def observe_dispatch(function: Callable[..., Any], case: Case, rank: int) -> dict:
    tokens, chosen = (kit.part(case, name, rank) for name in ("tokens", "chosen"))
    with Recorder() as record:
        rows, per_expert = function(tokens.to(getattr(torch, case.inputs["dtype"])), chosen, case.inputs["experts"])
    return kit.noted(record, rows=rows, per_expert=per_expert) | {"dtype of rows": dtype_of(rows)}


def arrived(case: Case) -> tuple[list[np.ndarray], list[list[int]]]:
    """By rank: the rows for its experts, one after the other and from rank 0 on, and how many for each."""
    own = case.inputs["experts"] // case.world_size
    by_expert = [case.inputs["tokens"][case.inputs["chosen"] == expert] for expert in range(case.inputs["experts"])]
    parts = [by_expert[rank * own : (rank + 1) * own] for rank in range(case.world_size)]
    return [np.concatenate(part) for part in parts], [list(map(len, part)) for part in parts]


def rows_are(case: Case, seen: Seen) -> Miss | None:
    return near(seen, "rows", arrived(case)[0]) or of_dtype(seen, "rows", case.inputs["dtype"])


@kit.each_rank
def counted(case: Case, seen: Seen, rank: int) -> Miss | None:
    right, counts = arrived(case)[1][rank], seen[rank].get("per_expert")
    counts = counts.tolist() if isinstance(counts, np.ndarray) else counts
    if not isinstance(counts, list) or not all(type(number) is int for number in counts):
        raise Malformed(Miss("whole numbers as counts", short(counts), rank))
    return kit.unless(counts == right, f"counts {right}", short(counts))


def handed_in(case: Case, most: int, made: list[str]) -> Miss | None:
    """Only all-to-alls, into which a rank hands so many bytes at most."""
    fits = kit.count(made, "all_to_all") == len(made) and kit.carried(made) <= most and (case.world_size == 1 or made)
    return kit.unless(fits, f"all-to-alls of {most} bytes at most", kit.listed(made))


@kit.each_rank
def only_what_goes(case: Case, seen: Seen, rank: int) -> Miss | None:
    """The counts and each token once."""
    array(seen, 0, "rows")
    width = getattr(torch, case.inputs["dtype"]).itemsize
    most = 8 * case.inputs["experts"] + width * case.inputs["tokens"].size // case.world_size
    return handed_in(case, most, made_by(seen, rank))


DISPATCH = Task(
    **kit.about("experts.dispatch"),
    draw=each_world(dispatch_case, (LAST, "bfloat16")),
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


def observe_gradients(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = (kit.tensor(case.inputs[name][rank]) for name in ("router", "experts"))
    with Recorder() as record:
        router, experts = function(*mine, case.inputs["size"])
    return kit.noted(record, router=router, experts=experts)


def of_the_mean(case: Case) -> list[np.ndarray]:
    """The experts' gradients by rank: summed where they are the same experts, over the number of all ranks."""
    given, size = case.inputs["experts"].astype(np.float64), case.inputs["size"]
    return [given[rank % size :: size].sum(0) / case.world_size for rank in range(case.world_size)]


def both_gradients(case: Case) -> int:
    """The bytes of a rank's two gradients."""
    return (case.inputs["router"].nbytes + case.inputs["experts"].nbytes) // case.world_size


GRADIENTS = Task(
    **kit.about("experts.gradients"),
    draw=each_world(gradients_case, worlds=(1, 2, 4)),
    observe=observe_gradients,
    own={"router": along(0), "experts": along(0)},
    essential=("experts",),
    properties={
        "router": Property(1, kit.equals("router", lambda case: case.inputs["router"].mean(0), on_all=True)),
        "experts": Property(3, kit.equals("experts", of_the_mean)),
        "each once": Property(
            2,
            kit.all_of(
                kit.bytes_at_most(both_gradients, "{} bytes in collectives at most", "no collective"),
                kit.reads("experts"),
            ),
        ),
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


def observe_layer(function: Callable[..., Any], case: Case, rank: int) -> dict:
    leaves = {
        name: kit.tensor(case.inputs[name]) if name == "router" else kit.part(case, name, rank) for name in LEAVES
    }
    with Recorder() as record:
        output = function(*(leaf.requires_grad_() for leaf in leaves.values()), case.inputs["k"])
        record.note("backward")
        output.square().sum().backward()
    return kit.noted(record, output=output, **kit.gradients(leaves))


def by_one_process(case: Case) -> dict[str, list[np.ndarray]]:
    """In float64, by rank: the output, the gradients, and (chosen) which experts its tokens chose."""
    tokens, router, up, down = (kit.tensor(case.inputs[name]).double().requires_grad_() for name in LEAVES)
    routers = [router.detach().clone().requires_grad_() for _ in range(case.world_size)]  # each rank's own gradient
    outputs, chosen = [], []
    for part, own in zip(tokens.chunk(case.world_size), routers, strict=True):
        best, choice = (part @ own.T).topk(case.inputs["k"], -1)
        hidden = torch.relu(torch.einsum("tkiw,tw->tki", up[choice], part))
        outputs.append((best.softmax(-1)[..., None] * torch.einsum("tkwi,tki->tkw", down[choice], hidden)).sum(1))
        chosen.append(choice.flatten().numpy())
    torch.cat(outputs).square().sum().backward()
    wholes = kit.gradients({"tokens": tokens, "up": up, "down": down})
    return {
        "output": [output.detach().numpy() for output in outputs],
        "chosen": chosen,
        "router": [own.grad.numpy() for own in routers if own.grad is not None],
        **{name: np.split(whole.numpy(), case.world_size) for name, whole in wholes.items()},
    }


def as_one_process(key: str) -> Rule:
    return kit.equals(key, by_one_process, of=key)


@kit.each_rank
def copies_alone(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Forward the counts, the copies of a rank's tokens and the outputs that it owes; backward their gradients."""
    array(seen, 0, "output")
    chosen, experts = by_one_process(case)["chosen"], len(case.inputs["router"])
    owners = [choice // (experts // case.world_size) for choice in chosen]
    most = case.inputs["tokens"][0].nbytes * (len(chosen[rank]) + sum(int((own == rank).sum()) for own in owners))
    happened, made = events(seen, rank), made_by(seen, rank)
    turn = happened.index("backward") if "backward" in happened else len(happened)
    forward = len([event for event in happened[:turn] if event in made])
    return handed_in(case, 8 * experts + most, made[:forward]) or handed_in(case, most, made[forward:])


LAYER = Task(
    **kit.about("experts.layer"),
    draw=each_world(layer_case, (2, True)),  # two ranks of which nobody chooses the last one
    observe=observe_layer,
    own={"tokens": along(0), "up": along(0), "down": along(0)},
    essential=("output", "gradients of experts", "copies alone travel"),
    properties={
        "output": Property(2, as_one_process("output")),
        "gradient of tokens": Property(1, as_one_process("tokens")),
        "gradient of the router": Property(1, as_one_process("router")),
        "gradients of experts": Property(3, kit.all_of(as_one_process("up"), as_one_process("down"))),
        "copies alone travel": Property(2, copies_alone),
    },
)
