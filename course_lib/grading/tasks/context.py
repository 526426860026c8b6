"""Lesson 14: attention over a sequence that several ranks share, its layout and its loss."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, events, items, made_by, near, number, result, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import alone, along, each_world, in_turn, numbers, whole

LESSON = "14_long_contexts"
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
    blocks = [
        (torch.from_numpy(output.copy()), torch.from_numpy(sums.copy()))
        for output, sums in zip(case.inputs["outputs"], case.inputs["log_sums"], strict=True)
    ]
    output, log_sum = function(blocks)
    return {"output": plain(output), "log_sum": plain(log_sum)}


def merged(case: Case) -> tuple[np.ndarray, np.ndarray]:
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
        return np.asarray(output), np.log(total) + most


def merged_output(kind: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = [merged(case)[0]]
        array(seen, 0, "output", right[0].shape)
        return near(seen, "output", right) if case.inputs["kind"] == kind else None

    return rule


def merged_log_sum(case: Case, seen: Seen) -> Miss | None:
    right = merged(case)[1]
    actual = array(seen, 0, "log_sum", right.shape)
    for query, (one, other) in enumerate(zip(right, actual, strict=True)):
        if one != other and not (np.isfinite(one) and abs(one - other) <= 1e-4 * max(1.0, abs(one))):
            return Miss(f"log_sum[{query}] = {one:.5g}", f"{other:.5g}")
    return None


MERGE = Task(
    name="context.merge",
    lesson=LESSON,
    function="merge_blocks",
    title="One attention out of several",
    difficulty=2,
    importance=5,
    minutes=20,
    draw=in_turn(merge_case, 6),
    observe=observe_merge,
    needs_ranks=False,
    essential=("output", "large scores"),
    properties={
        "output": Property(2, merged_output(USUAL)),
        "log of the sum": Property(1, merged_log_sum),
        "large scores": Property(2, merged_output(LARGE)),
        "queries that see nothing": Property(1, merged_output(BLIND)),
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
    return None if actual == right else Miss(f"order {short(right)}", short(actual))


def counted_pairs(case: Case, seen: Seen) -> Miss | None:
    right = [sum(token + 1 for token in part) for part in dealt(case)]
    actual = integers(seen[0].get("pairs"))
    return None if actual == right else Miss(f"pairs {right}", short(actual))


ZIGZAG = Task(
    name="context.zigzag",
    lesson=LESSON,
    function="zigzag",
    title="Deal so that all work alike",
    difficulty=1,
    importance=4,
    minutes=15,
    draw=alone(zigzag_case),
    observe=observe_zigzag,
    needs_ranks=False,
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
    logits, labels = (np.split(case.inputs[name], case.world_size)[rank].copy() for name in ("logits", "labels"))
    leaf = torch.from_numpy(logits).requires_grad_()
    with Recorder() as record:
        share = function(leaf, torch.from_numpy(labels))
    share.backward()
    return {"share": plain(share), "gradient": plain(leaf.grad), "events": record.events}


def by_whole_sequence(case: Case) -> tuple[list[float], list[np.ndarray]]:
    """Each rank's share of the mean loss, and the gradient of its logits."""
    logits = torch.from_numpy(case.inputs["logits"].copy()).double().requires_grad_()
    targets = torch.full((len(logits),), IGNORED)
    targets[:-1] = torch.from_numpy(case.inputs["labels"].copy())[1:]
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none") / (targets >= 0).sum()
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return (
        [float(part.sum().detach()) for part in losses.chunk(case.world_size)],
        np.split(gradient.numpy(), case.world_size),
    )


def shares_add_up(case: Case, seen: Seen) -> Miss | None:
    right, total = sum(by_whole_sequence(case)[0]), sum(number(seen, rank, "share") for rank in range(case.world_size))
    return (
        None
        if abs(right - total) <= 1e-4 * max(1.0, right)
        else Miss(f"shares that sum to {right:.5g}", f"{total:.5g}")
    )


def few_bytes(case: Case, seen: Seen) -> Miss | None:
    limit = 8 * (2 + case.world_size)
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if sum(int(event.split()[1]) for event in made) > limit or (case.world_size > 1 and not made):
            return Miss(f"at most {limit} bytes: a label and a count", short(", ".join(made) or "nothing"), rank)
    number(seen, 0, "share")
    return None


LOSS = Task(
    name="context.loss",
    lesson=LESSON,
    function="share_of_loss",
    title="The label behind the cut",
    difficulty=3,
    importance=5,
    minutes=30,
    draw=each_world(loss_case),
    observe=observe_loss,
    own={"logits": along(0), "labels": along(0)},
    essential=("the mean", "gradient"),
    properties={
        "the mean": Property(2, shares_add_up),
        "each share": Property(1, result("share", lambda case: by_whole_sequence(case)[0])),
        "gradient": Property(2, result("gradient", lambda case: by_whole_sequence(case)[1])),
        "bytes": Property(1, few_bytes),
    },
)


# --- context.ring ---

NAMES = ("query", "key", "value")


def ring_case(rng: random.Random, world: int) -> dict:
    shape = (rng.randrange(1, 3), world * rng.randrange(2, 4), rng.randrange(2, 5))
    return {name: numbers(rng, *shape) for name in NAMES}


def observe_ring(function: Callable[..., Any], case: Case, rank: int) -> dict:
    leaves = [
        torch.from_numpy(np.split(case.inputs[name], case.world_size, 1)[rank].copy()).requires_grad_()
        for name in NAMES
    ]
    with Recorder() as record:
        output = function(*leaves)
        record.note("backward")
        output.square().sum().backward()
    return {
        "output": plain(output),
        "events": record.events,
        **{name: plain(leaf.grad) for name, leaf in zip(NAMES, leaves, strict=True)},
    }


def by_one_process(case: Case) -> dict[str, list[np.ndarray]]:
    """Of whole sequences, in float64: the output and the gradients, by rank."""
    leaves = [torch.from_numpy(case.inputs[name].copy()).double().requires_grad_() for name in NAMES]
    query, key, value = leaves
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    output.square().sum().backward()
    wholes = {"output": output.detach().numpy()}
    wholes |= {name: leaf.grad.numpy() for name, leaf in zip(NAMES, leaves, strict=True) if leaf.grad is not None}
    return {name: np.split(one, case.world_size, 1) for name, one in wholes.items()}


def of_keys_and_values(case: Case, seen: Seen) -> Miss | None:
    right = by_one_process(case)
    return near(seen, "key", right["key"]) or near(seen, "value", right["value"])


def in_a_ring(case: Case, seen: Seen) -> Miss | None:
    """Messages to the next rank and from the one before alone, none larger than a block, as many bytes as needed."""
    ranks, block = case.world_size, 2 * case.inputs["key"].nbytes // case.world_size
    most = {"forward": (ranks - 1) * block, "backward": (2 * ranks - 1) * block if ranks > 1 else 0}
    for rank in range(ranks):
        sent, part = dict.fromkeys(most, 0), "forward"
        for event in events(seen, rank):
            name, *said = event.split()
            if name == "backward":
                part = name
            elif name != "wait":
                size = int(said[0]) if said and said[0].isdecimal() else -1
                neighbour = {"send": f"to {(rank + 1) % ranks}", "recv": f"from {(rank - 1) % ranks}"}.get(name)
                if neighbour is None or " ".join(said[1:]) != neighbour or not 0 <= size <= block:
                    return Miss(f"messages of {block} bytes at most, to the next rank", short(event), rank)
                sent[part] += size * (name == "send")
        for part, bound in most.items():
            if sent[part] > bound or (ranks > 1 and not sent[part]):
                return Miss(f"{bound} bytes sent in the {part} at most", f"{sent[part]} bytes", rank)
    array(seen, 0, "output")
    return None


RING = Task(
    name="context.ring",
    lesson=LESSON,
    function="ring_attention",
    title="Build it: ring attention",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=each_world(ring_case),
    observe=observe_ring,
    own={name: along(1) for name in NAMES},
    essential=("output", "gradients of keys and values", "a ring"),
    properties={
        "output": Property(2, result("output", lambda case: by_one_process(case)["output"])),
        "gradient of queries": Property(1, result("query", lambda case: by_one_process(case)["query"])),
        "gradients of keys and values": Property(3, of_keys_and_values),
        "a ring": Property(2, in_a_ring),
    },
)

ALL = (MERGE, ZIGZAG, LOSS, RING)
