"""Lesson 14: attention over a sequence that several ranks share, its layout and its loss."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, events, items, number, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import alone, along, each_world, in_turn, numbers, whole

USUAL, LARGE, BLIND = "usual", "large", "blind"


# --- context.merge ---


def merge_case(rng: random.Random, place: int) -> dict:
    """Blocks of scores: of usual size, with exponentials that overflow or vanish, or with queries that see no key."""
    kind = (USUAL, LARGE, BLIND)[place % 3]
    queries, width, blocks = rng.randrange(3, 6), rng.randrange(2, 4), rng.randrange(2, 5)
    outputs = [numbers(rng, queries, width) for _ in range(blocks)]
    log_sums = [numbers(rng, queries) for _ in range(blocks)]
    if kind == LARGE:
        for sums in log_sums:
            sums += np.where(np.arange(queries) % 2, np.float32(1000), np.float32(-1000))
    if kind == BLIND:
        for block in range(blocks):
            blind = (np.arange(queries) + block) % 2 == 0
            blind[0] = True  # the first query sees nothing at all
            outputs[block][blind], log_sums[block][blind] = 0, -np.inf
    return {"kind": kind, "outputs": outputs, "log_sums": log_sums}


def observe_merge(function: Callable[..., Any], case: Case, rank: int) -> dict:
    pairs = zip(case.inputs["outputs"], case.inputs["log_sums"], strict=True)
    output, log_sum = function([(kit.tensor(output), kit.tensor(sums)) for output, sums in pairs])
    return {"output": plain(output), "log_sum": plain(log_sum)}


def merged(case: Case) -> dict[str, np.ndarray]:
    """In float64, by shares of the sum of exponentials."""
    sums = np.stack([one.astype(np.float64) for one in case.inputs["log_sums"]])
    most = np.where(np.isneginf(sums.max(0)), 0.0, sums.max(0))
    worth = np.exp(sums - most)
    total = worth.sum(0)
    output = sum(
        (share / np.where(total > 0, total, 1))[:, None] * one
        for share, one in zip(worth, case.inputs["outputs"], strict=True)
    )
    with np.errstate(divide="ignore"):
        return {"output": np.asarray(output), "log_sum": np.log(total) + most}


def merged_log_sum(case: Case, seen: Seen) -> Miss | None:
    right = merged(case)["log_sum"]
    actual = array(seen, 0, "log_sum", right.shape)
    for query, (one, other) in enumerate(zip(right, actual, strict=True)):
        if one != other and not (np.isfinite(one) and abs(one - other) <= 1e-4 * max(1.0, abs(one))):
            return Miss(f"log_sum[{query}] = {one:.5g}", f"{other:.5g}")
    return None


MERGE = Task(
    **kit.about("context.merge"),
    draw=in_turn(merge_case, 6),
    observe=observe_merge,
    essential=("output", "large scores"),
    properties={
        "output": Property(2, kit.equals("output", merged, USUAL, of="output", on_all=True)),
        "log of the sum": Property(1, merged_log_sum),
        "large scores": Property(2, kit.equals("output", merged, LARGE, of="output", on_all=True)),
        "queries that see nothing": Property(1, kit.equals("output", merged, BLIND, of="output", on_all=True)),
    },
)


# --- context.zigzag ---


def zigzag_case(rng: random.Random) -> dict:
    ranks = rng.randrange(2, 6)
    return {"tokens": 2 * ranks * rng.randrange(2, 5), "ranks": ranks}


def observe_zigzag(function: Callable[..., Any], case: Case, rank: int) -> dict:
    positions, order, pairs = function(**case.inputs)
    return {"positions": plain(positions), "order": plain(order), "pairs": plain(pairs)}


def dealt(case: Case) -> list[list[int]]:
    """The tokens of each rank: chunk r, then chunk 2 N - 1 - r."""
    ranks = case.inputs["ranks"]
    chunks = np.split(np.arange(case.inputs["tokens"]), 2 * ranks)
    return [[int(token) for token in (*chunks[rank], *chunks[2 * ranks - 1 - rank])] for rank in range(ranks)]


def integers(values: Any) -> list[Any]:
    """A list or an array of whole numbers as a list; raises Malformed."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise Malformed(Miss("whole numbers", short(values)))
    return values


def dealt_right(case: Case, seen: Seen) -> Miss | None:
    right, actual = dealt(case), items(seen, 0, "positions", (list, np.ndarray))
    if len(actual) != len(right):
        return Miss(f"positions of {len(right)} ranks", f"of {len(actual)}")
    for rank, (one, other) in enumerate(zip(right, map(integers, actual), strict=True)):
        if one != other:
            return Miss(f"{short(one)} on rank {rank}", short(other))
    return None


def put_in_order(case: Case, seen: Seen) -> Miss | None:
    held = [token for part in dealt(case) for token in part]
    right = [held.index(token) for token in range(len(held))]
    actual = integers(seen[0].get("order"))
    return kit.unless(actual == right, f"order {short(right)}", short(actual))


def counted_pairs(case: Case, seen: Seen) -> Miss | None:
    right = [sum(token + 1 for token in part) for part in dealt(case)]
    actual = integers(seen[0].get("pairs"))
    return kit.unless(actual == right, f"pairs {right}", short(actual))


ZIGZAG = Task(
    **kit.about("context.zigzag"),
    draw=alone(zigzag_case),
    observe=observe_zigzag,
    essential=("positions",),
    properties={
        "positions": Property(2, dealt_right),
        "order": Property(2, put_in_order),
        "pairs": Property(1, counted_pairs),
    },
)


# --- context.loss ---

IGNORED = -100


def loss_case(rng: random.Random, world: int) -> dict:
    tokens, classes = rng.randrange(3, 6), rng.randrange(4, 7)
    labels = whole(rng, 0, classes, world * tokens)
    labels[1 + rng.randrange(tokens - 1)] = IGNORED  # the first rank has fewer targets than the others
    if world > 2:
        labels[tokens + 1 : 2 * tokens + 1] = IGNORED  # the second none at all
    labels[-1] = rng.randrange(classes)
    return {"logits": numbers(rng, world * tokens, classes), "labels": labels}


def observe_loss(function: Callable[..., Any], case: Case, rank: int) -> dict:
    logits, labels = (kit.part(case, name, rank) for name in ("logits", "labels"))
    logits.requires_grad_()
    with Recorder() as record:
        share = function(logits, labels)
    share.backward()
    return kit.noted(record, share=share, gradient=logits.grad)


def by_whole_sequence(case: Case) -> dict[str, list[Any]]:
    """Each rank's share of the mean loss, and the gradient of its logits."""
    logits = kit.tensor(case.inputs["logits"]).double().requires_grad_()
    targets = torch.full((len(logits),), IGNORED)
    targets[:-1] = kit.tensor(case.inputs["labels"])[1:]
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none") / (targets >= 0).sum()
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return {
        "share": [float(part.sum().detach()) for part in losses.chunk(case.world_size)],
        "gradient": np.split(gradient.numpy(), case.world_size),
    }


def shares_add_up(case: Case, seen: Seen) -> Miss | None:
    right = sum(by_whole_sequence(case)["share"])
    total = sum(number(seen, rank, "share") for rank in range(case.world_size))
    return kit.unless(abs(right - total) <= 1e-4 * max(1.0, right), f"shares that sum to {right:.5g}", f"{total:.5g}")


LOSS = Task(
    **kit.about("context.loss"),
    draw=each_world(loss_case),
    observe=observe_loss,
    own={"logits": along(0), "labels": along(0)},
    essential=("the mean", "gradient"),
    properties={
        "the mean": Property(2, shares_add_up),
        "each share": Property(1, kit.equals("share", by_whole_sequence, of="share")),
        "gradient": Property(2, kit.equals("gradient", by_whole_sequence, of="gradient")),
        "bytes": Property(
            1,
            kit.all_of(
                kit.bytes_at_most(lambda case: 8 * (2 + case.world_size), "at most {} bytes: a label and a count"),
                kit.reads(lambda case, seen: number(seen, 0, "share")),
            ),
        ),
    },
)


# --- context.ring ---

NAMES = ("query", "key", "value")


def ring_case(rng: random.Random, world: int) -> dict:
    shape = (rng.randrange(1, 3), world * rng.randrange(2, 4), rng.randrange(2, 5))
    return {name: numbers(rng, *shape) for name in NAMES}


def observe_ring(function: Callable[..., Any], case: Case, rank: int) -> dict:
    leaves = {name: kit.part(case, name, rank, 1).requires_grad_() for name in NAMES}
    with Recorder() as record:
        output = function(*leaves.values())
        record.note("backward")
        output.square().sum().backward()
    return kit.noted(record, output=output, **kit.gradients(leaves))


def by_one_process(case: Case) -> dict[str, list[np.ndarray]]:
    """Of whole sequences, in float64: the output and the gradients, by rank."""
    leaves = {name: kit.tensor(case.inputs[name]).double().requires_grad_() for name in NAMES}
    query, key, value = leaves.values()
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output.square().sum().backward()
    wholes = {"output": output.detach(), **kit.gradients(leaves)}
    return {name: np.split(one.numpy(), case.world_size, 1) for name, one in wholes.items()}


@kit.each_rank
def in_a_ring(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Messages to the next rank and from the one before alone, none larger than a block, as many bytes as needed."""
    array(seen, 0, "output")
    ranks, block = case.world_size, 2 * case.inputs["key"].nbytes // case.world_size
    most = {"forward": (ranks - 1) * block, "backward": (2 * ranks - 1) * block if ranks > 1 else 0}
    sent, half = dict.fromkeys(most, 0), "forward"
    for event in events(seen, rank):
        name, *said = event.split()
        if name == "backward":
            half = name
        elif name != "wait":
            size = int(said[0]) if said and said[0].isdecimal() else -1
            neighbour = {"send": f"to {(rank + 1) % ranks}", "recv": f"from {(rank - 1) % ranks}"}.get(name)
            if neighbour is None or " ".join(said[1:]) != neighbour or not 0 <= size <= block:
                return Miss(f"messages of {block} bytes at most, to the next rank", short(event))
            sent[half] += size * (name == "send")
    for half, bound in most.items():
        if sent[half] > bound or (ranks > 1 and not sent[half]):
            return Miss(f"{bound} bytes sent in the {half} at most", f"{sent[half]} bytes")
    return None


RING = Task(
    **kit.about("context.ring"),
    draw=each_world(ring_case),
    observe=observe_ring,
    own={name: along(1) for name in NAMES},
    essential=("output", "gradients of keys and values", "a ring"),
    properties={
        "output": Property(2, kit.equals("output", by_one_process, of="output")),
        "gradient of queries": Property(1, kit.equals("query", by_one_process, of="query")),
        "gradients of keys and values": Property(
            3, kit.all_of(*(kit.equals(name, by_one_process, of=name) for name in ("key", "value")))
        ),
        "a ring": Property(2, in_a_ring),
    },
)
