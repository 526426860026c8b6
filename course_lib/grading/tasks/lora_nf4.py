"""Lesson 19: a weight in 4 bits, two to a byte, with a scale for each 64."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from course_lib.grading.rules import Seen, array, dtype_of, number, of_dtype, same
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn, reals
from course_lib.grading.tasks.lora_layer import BF16, FP32
from course_lib.grading.work import Work

BLOCK = 64
SLACK = 256
"""Bytes that an object may hold beside codes and scales: small tables."""
BELOW = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
ABOVE = (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
NF4_LEVELS = BELOW + ABOVE
"""Dettmers et al. 2023, *QLoRA* (arXiv 2305.14314), appendix E."""
USUAL, ON_LEVELS, SMALL = "usual", "on levels", "zeros and small blocks"


# --- lora.nf4 ---


def nf4_case(rng: random.Random, place: int) -> dict:
    """In turn: blocks of very different sizes, the last one short; weights on the levels; zeros and tiny blocks.

    The levels are NF4's, or others in whose place no table of one's own helps.
    """
    kind = (USUAL, ON_LEVELS, USUAL, SMALL)[place % 4]
    levels = np.array(NF4_LEVELS, np.float32)
    if place % 2:
        inner = np.sort(reals(rng, 13).clip(-3, 3) / 4)
        levels = np.sort(np.concatenate([inner, [-1, 0, 1]])).astype(np.float32)
    rows, columns = rng.randrange(9, 15), 2 * rng.randrange(20, 30) + 1
    rows += (rows % 2 == 0) if place % 4 == 0 else (rows % 2)  # an odd number of weights, or an even one
    count = rows * columns
    if place % 4 == 3:
        rows, columns = rng.randrange(4, 7), BLOCK * rng.randrange(2, 4)  # whole blocks
        count = rows * columns
    flat = reals(rng, count)
    starts = range(0, count, BLOCK)
    for number_, start in enumerate(starts):
        block = flat[start : start + BLOCK]
        block *= np.float32(2.0 ** (2 * number_ - len(starts)))
        if kind == ON_LEVELS:
            block[:] = levels[np.random.default_rng(rng.randrange(2**32)).integers(0, 16, len(block))]
            block[rng.randrange(len(block))] = rng.choice((-1, 1))
            block *= np.float32(2.0 ** rng.randrange(-9, 3))
        if kind == SMALL and number_ % 3 < 2:
            block *= np.float32(2.0**-110 if number_ % 3 else 0)
    return {
        "kind": kind,
        "levels": levels,
        "weight": flat.reshape(rows, columns),
        "dtype": BF16 if kind == USUAL and place % 4 == 2 else FP32,
    }


def weight_of(case: Case) -> nn.Parameter:
    """In its dtype; its rows do not lie one behind the other in memory."""
    columns = kit.tensor(case.inputs["weight"].T).to(getattr(torch, case.inputs["dtype"]))
    return nn.Parameter(columns.T)


def observe_nf4(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Pack and unpack; then unpack once more when every code and scale has been written anew."""
    weight, levels = weight_of(case), kit.tensor(case.inputs["levels"])
    with Work() as work:
        packed = function(weight, levels)
        held = work.held
        unpacked = packed.dequantize()
    made = {"codes": packed.codes, "scales": packed.scales, "unpacked": unpacked}
    seen = {name: plain(values) for name, values in made.items()}
    seen |= {f"dtype of {name}": dtype_of(values) for name, values in made.items()}
    seen |= {"held": held, "largest": work.largest}
    packed.codes.bitwise_not_()
    packed.scales.mul_(2)
    return seen | {"again": plain(packed.dequantize())}


def scales_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The weights in a row, fp64, and the largest magnitude of each one's block."""
    flat = weight_of(case).detach().double().numpy().reshape(-1)
    largest = np.array([np.abs(flat[start : start + BLOCK]).max() for start in range(0, len(flat), BLOCK)])
    return flat, largest


def codes_of(case: Case, seen: Seen) -> np.ndarray:
    """The code of each weight, from the bytes that were observed: of two the first is in the upper four bits."""
    count = case.inputs["weight"].size
    codes = array(seen, 0, "codes", (-(-count // 2),))
    if not ((codes >= 0) & (codes < 256)).all():
        codes = np.zeros_like(codes)
    return np.stack([codes // 16, codes % 16], 1).reshape(-1)[:count].astype(int)


def scales(case: Case, seen: Seen) -> Miss | None:
    right = scales_of(case)[1]
    actual = array(seen, 0, "scales", right.shape)
    said = f", the largest magnitude of block {int(np.argmax(actual != right))}"
    return kit.first_wrong(actual != right, "scales", right, actual, 6, said)


def nearest(*kinds: str) -> Rule:
    """A rule: each weight has a code whose level no other comes closer to, in cases of some kinds."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        codes, (flat, largest) = codes_of(case, seen), scales_of(case)
        if case.inputs["kind"] not in kinds:
            return None
        levels, of_each = case.inputs["levels"].astype(np.float64), np.repeat(largest, BLOCK)[: len(flat)]
        off = np.abs(levels[codes] * of_each - flat)
        least = np.abs(levels[:, None] * of_each - flat).min(0)
        wrong = off > least * (1 + 1e-5) + 1e-6 * of_each
        if not wrong.any():
            return None
        place = int(np.argmax(wrong))
        return Miss(
            f"weight {place}, {flat[place] / of_each[place]:.4f} of its block's scale, as code "
            f"{np.abs(levels * of_each[place] - flat[place]).argmin()}",
            f"code {codes[place]}",
            note=f"{wrong.sum()} of {len(flat)} weights have another level than the nearest",
        )

    return rule


def comes_back(case: Case, seen: Seen) -> Miss | None:
    """Level times scale, in the weight's shape and dtype; and of other codes and scales what they say."""
    right = array(seen, 0, "unpacked", case.inputs["weight"].shape)
    if miss := of_dtype(seen, "unpacked", case.inputs["dtype"]):
        return miss
    levels, codes = case.inputs["levels"].astype(np.float64), codes_of(case, seen)
    tolerance = 1e-2 if case.inputs["dtype"] == BF16 else 1e-5
    for key, read, factor in (("unpacked", codes, 1), ("again", 15 - codes, 2)):
        of_each = np.repeat(array(seen, 0, "scales", scales_of(case)[1].shape), BLOCK)[: len(codes)]
        right = (levels[read] * of_each * factor).reshape(right.shape)
        actual = array(seen, 0, key, right.shape)
        off = ~(np.abs(actual - right) <= tolerance * np.abs(right))
        if miss := kit.first_wrong(off, "weight", right, actual, 6):
            note = "" if key == "unpacked" else "after other numbers were written into codes and scales"
            return kit.explained(miss, note)
    return None


def exact_on_levels(case: Case, seen: Seen) -> Miss | None:
    right = weight_of(case).detach().float().numpy()
    actual = array(seen, 0, "unpacked", right.shape)
    differs = (actual != right) & (case.inputs["kind"] == ON_LEVELS)
    return kit.first_wrong(differs, "weight", right, actual, 9, ", which is a level times its scale")


def zeros_and_small(case: Case, seen: Seen) -> Miss | None:
    """Zeros come back as zeros, and have the code of zero; a block of tiny weights has codes like any other."""
    right = array(seen, 0, "unpacked", case.inputs["weight"].shape).reshape(-1)
    if case.inputs["kind"] != SMALL:
        return None
    levels = case.inputs["levels"][codes_of(case, seen)]
    for block, scale in enumerate(scales_of(case)[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        if scale == 0 and ((right[part] != 0).any() or levels[part].any()):
            return Miss(
                f"block {block} as zeros, with the code of zero",
                f"numbers up to {np.abs(right[part]).max():.3g}, and levels up to {levels[part].max():.3g}",
            )
    return nearest(SMALL)(case, seen)


def in_bytes(case: Case, seen: Seen) -> Miss | None:
    """Half a byte a weight and 4 bytes a block, and little else is held."""
    count = case.inputs["weight"].size
    blocks = -(-count // BLOCK)
    codes_of(case, seen)
    if miss := same(seen, "dtype of codes", ["uint8"]) or same(seen, "dtype of scales", [FP32]):
        return miss
    right, actual = -(-count // 2) + 4 * blocks, number(seen, 0, "held")
    shown = f"{actual:g}, {8 * actual / count:.2f} bits a weight"
    return kit.unless(right <= actual <= right + SLACK, f"{right} bytes held, for {count} weights", shown)


def no_table(case: Case, seen: Seen) -> Miss | None:
    count = case.inputs["weight"].size
    codes_of(case, seen)
    most, actual = -(-count // BLOCK) * BLOCK, number(seen, 0, "largest")
    return kit.unless(0 < actual <= most, f"no tensor of more than {most} elements on the way", f"{actual:g}")


NF4 = Task(
    **kit.about("lora.nf4"),
    draw=in_turn(nf4_case, 4),
    observe=observe_nf4,
    essential=("nearest level", "comes back", "bytes"),
    properties={
        "scales": Property(1, scales),
        "nearest level": Property(2, nearest(USUAL, ON_LEVELS)),
        "comes back": Property(2, comes_back),
        "exact on levels": Property(1, exact_on_levels),
        "zeros and small blocks": Property(1, zeros_and_small),
        "bytes": Property(2, in_bytes),
        "no table": Property(1, no_table),
    },
)
