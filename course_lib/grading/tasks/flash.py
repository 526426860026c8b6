"""Lesson 17: attention in blocks, exactly, without the matrix of its scores."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.grading.rules import Seen, array, number
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn, numbers
from course_lib.grading.work import Work

USUAL, LARGE, BLIND, LONG = "usual", "large", "blind", "long"


# --- flash.attention ---


def flash_case(rng: random.Random, place: int) -> dict:
    """In turn: usual scores; some of ±16000; queries that see no key; one head and many tokens.

    Large scores are exact in fp32: a shift by query and half of the keys, of the small ones.
    """
    kind = (USUAL, LARGE, BLIND, LONG)[place % 4]
    batch, kv_heads, shared = rng.randrange(1, 3), rng.randrange(1, 3), rng.randrange(1, 3)
    width, block, causal = rng.choice((4, 16)), rng.randrange(4, 9), (place + place // 4) % 2 == 0
    tokens = block * rng.randrange(2, 4) + rng.randrange(1, block)
    if kind == USUAL:
        kv_heads = shared = 2
        tokens = tokens if causal else block * rng.randrange(1, 4)
    if kind == BLIND:
        batch = 2
    if kind == LONG:
        batch, kv_heads, shared, width, causal = 1, 1, 1, 4, True
        tokens = block * rng.randrange(6, 9) + rng.randrange(1, block)
    q, k, v = (numbers(rng, batch, heads, tokens, width) for heads in (kv_heads * shared, kv_heads, kv_heads))
    keep = np.ones((batch, tokens), bool)
    keep[-1, tokens - rng.randrange(1, block) :] = False
    if kind == LARGE:
        q, k = (np.round(4 * one) / 4 for one in (q, k))
        q[..., -1] = np.where(np.arange(tokens) % 2, 128, -128) * width**0.5
        k[..., -1] = np.where(np.arange(tokens) < tokens // 2, 128, -128)
    if kind == BLIND:
        keep[0, : rng.randrange(block + 1, 2 * block)] = False  # with a causal mask the first queries see none
        keep[1] = False
    return {"kind": kind, "q": q, "k": k, "v": v, "keep": keep, "causal": causal, "block": block}


def observe_flash(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = {name: kit.tensor(case.inputs[name]) for name in ("q", "k", "v", "keep")}
    with Work() as work:
        output, log_sum = function(*given.values(), case.inputs["causal"], case.inputs["block"])
    changed = not all(np.array_equal(case.inputs[name], tensor.numpy()) for name, tensor in given.items())
    return {
        "output": plain(output),
        "log_sum": plain(log_sum),
        "largest": work.largest,
        "flops": work.flops,
        "changed": changed,
    }


def visible(case: Case) -> np.ndarray:
    """(batch, queries, keys): which key a query sees."""
    keep = case.inputs["keep"]
    seen = np.repeat(keep[:, None, :], keep.shape[1], 1)
    return np.tril(seen) if case.inputs["causal"] else seen


def by_matrix(case: Case) -> dict[str, np.ndarray]:
    """Output and log-sum-exp in float64, with the whole matrix."""
    q, k, v = (case.inputs[name].astype(np.float64) for name in ("q", "k", "v"))
    k, v = (np.repeat(one, q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = np.where(visible(case)[:, None], q @ k.swapaxes(2, 3) / q.shape[-1] ** 0.5, -np.inf)
    most = scores.max(-1, keepdims=True)
    most = np.where(np.isneginf(most), 0.0, most)
    worth = np.exp(scores - most)
    total = worth.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return {"output": worth / np.where(total > 0, total, 1) @ v, "log_sum": (most + np.log(total))[..., 0]}


def attended(*kinds: str) -> Rule:
    """A rule: the output, in cases of some kinds."""
    return kit.equals("output", by_matrix, *kinds, of="output", on_all=True, tolerance=2e-5)


def untouched(case: Case, seen: Seen) -> Miss | None:
    array(seen, 0, "output", case.inputs["q"].shape)
    return kit.unless(seen[0].get("changed") is False, "q, k, v and keep as they were", "one of them was written into")


def log_sums(case: Case, seen: Seen) -> Miss | None:
    right = by_matrix(case)["log_sum"]
    actual = array(seen, 0, "log_sum", right.shape)
    with np.errstate(invalid="ignore"):
        near_it = np.isfinite(right) & (np.abs(actual - right) <= 2e-5 * np.maximum(1, np.abs(right)))
    return kit.first_wrong((actual != right) & ~near_it, "log_sum", right, actual, 6)


def no_matrix(case: Case, seen: Seen) -> Miss | None:
    """No tensor is larger than q, in whole blocks, or than the scores of a block of queries and one of keys."""
    batch, heads, tokens, width = case.inputs["q"].shape
    block = case.inputs["block"]
    array(seen, 0, "output", (batch, heads, tokens, width))
    most = batch * heads * max(-(-tokens // block) * block * width, block**2)
    actual = number(seen, 0, "largest")
    note = f"q has {case.inputs['q'].size} elements, the matrix of scores {batch * heads * tokens**2}"
    return kit.unless(0 < actual <= most, f"no tensor of more than {most} elements", f"one of {actual:g}", note)


def needed_products(case: Case, seen: Seen) -> Miss | None:
    """Two products for each block that some query sees by the causal mask, none for another."""
    (batch, heads, tokens, width), block = case.inputs["q"].shape, case.inputs["block"]
    array(seen, 0, "output", (batch, heads, tokens, width))
    starts = range(0, tokens, block)
    pairs = sum(
        (min(row + block, tokens) - row) * (min(column + block, tokens) - column)
        for row in starts
        for column in starts
        if column <= row or not case.inputs["causal"]
    )
    most, least = 4 * width * heads * batch * pairs, 4 * width * heads * int(visible(case).sum())
    actual = number(seen, 0, "flops")
    said = f"{most} FLOPs in matrix products at most, {least} at least"
    return kit.unless(least <= actual <= most, said, f"{actual:g}")


ATTENTION = Task(
    **kit.about("flash.attention"),
    draw=in_turn(flash_case, 8),
    observe=observe_flash,
    essential=("output", "large scores", "no matrix"),
    properties={
        "output": Property(3, kit.all_of(untouched, attended(USUAL, LONG))),
        "log of the sum": Property(1, log_sums),
        "large scores": Property(2, attended(LARGE)),
        "queries that see nothing": Property(1, attended(BLIND)),
        "no matrix": Property(2, no_matrix),
        "no block beyond the diagonal": Property(2, needed_products),
    },
)
