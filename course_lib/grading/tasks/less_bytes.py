"""Lesson 18: gradients that are made small before they travel: a sum in 8 bits, and matrices as two thin ones."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, made_by, near, only, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.less import LESSON

# --- less.int8 ---

FINITE, BROKEN, HALF = "float32", "float32, not all finite", "bfloat16"
SIZES = (1e-12, 1e-3, 1.0, 1e3)


def int8_case(rng: random.Random, world: int, kind: str, blocks: int) -> dict:
    """Blocks of very different size, the third of zeros alone, on ranks of different size; the last block is short."""
    block = rng.randrange(4, 9)
    values = numbers(rng, world, block * blocks + rng.randrange(1, block))
    for first in range(0, values.shape[1], block):
        values[:, first : first + block] *= 0 if first == 2 * block else SIZES[(first // block + world) % 4]
    values *= 4.0 ** np.arange(world)[:, None]
    if kind == BROKEN:
        values[world - 1, 1], values[0, -1] = np.inf, np.nan
    if kind == HALF:
        values = torch.from_numpy(values).bfloat16().float().numpy()
    return {"kind": kind, "block": block, "values": list(values.astype(np.float32))}


def draw_int8(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks; fewer blocks than ranks; numbers that are not finite; and bf16."""
    kinds = [
        *((world, FINITE, rng.randrange(4, 7)) for world in worlds),
        (worlds[-1], FINITE, 1),
        (2, BROKEN, 4),
        (2, HALF, 5),
    ]
    return [Case(world, int8_case(rng, world, kind, blocks)) for world, kind, blocks in kinds]


def observe_int8(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = torch.from_numpy(case.inputs["values"][rank].copy())
    with Recorder() as record:
        total = function(mine.bfloat16() if case.inputs["kind"] == HALF else mine, case.inputs["block"])
    return {"total": plain(total), "dtype": str(total.dtype), "events": record.events}


def summed(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """The exact sum, and how far off each element may be: half a scale of each rank, and half of that of the sum."""
    given, block = np.stack(case.inputs["values"]).astype(np.float64), case.inputs["block"]
    padded = np.pad(given, ((0, 0), (0, -given.shape[1] % block))).reshape(len(given), -1, block)
    with np.errstate(invalid="ignore"):
        total = padded.sum(0)
        largest = np.abs(padded).max(-1)  # (ranks, blocks)
        rounded = largest.sum(0) / 254
        most = rounded + (np.abs(total).max(-1) + rounded) / 254 + 1e-6 * largest.sum(0)
    size = given.shape[1]
    allowed = np.repeat(most, block)[:size]
    if case.inputs["kind"] == HALF:
        allowed = allowed + (np.abs(total.reshape(-1)[:size]) + allowed) / 256
    return total.reshape(-1)[:size], allowed


def off_by_half_a_scale(kind: str) -> Rule:
    """A rule: blocks of finite numbers are as near as their scales are fine, of the dtype that was given."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        right, allowed = summed(case)
        for rank in range(case.world_size):
            total = array(seen, rank, "total", right.shape)
            if (case.inputs["kind"] == HALF) != (kind == HALF):
                continue
            if seen[rank].get("dtype") != f"torch.{case.inputs['kind'].split(',')[0]}":
                return Miss(f"a sum in {case.inputs['kind']}", short(seen[rank].get("dtype")), rank)
            with np.errstate(invalid="ignore"):
                wrong = np.isfinite(allowed) & ~(np.abs(total - right) <= allowed)
            if wrong.any():
                place = int(np.argmax(wrong))
                return Miss(
                    f"total[{place}] = {right[place]:.5g}, at most {allowed[place]:.2g} off",
                    f"{total[place]:.5g}",
                    rank,
                    f"in block {place // case.inputs['block']}",
                )
        return None

    return rule


def broken_blocks(case: Case, seen: Seen) -> Miss | None:
    right, allowed = summed(case)
    for rank in range(case.world_size):
        total = array(seen, rank, "total", right.shape)
        still = ~np.isfinite(allowed) & ~np.isnan(total)
        if still.any():
            place = int(np.argmax(still))
            return Miss(
                f"total[{place}] = nan",
                f"{total[place]:.5g}",
                rank,
                f"in block {place // case.inputs['block']} a rank has a number that is not finite",
            )
    return None


def same_bits(key: str) -> Rule:
    """A rule: all ranks have what rank 0 has, to the last bit."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        first = array(seen, 0, key)
        for rank in range(1, case.world_size):
            value = array(seen, rank, key, first.shape)
            apart = (value != first) & ~(np.isnan(value) & np.isnan(first))
            if apart.any():
                place = tuple(map(int, np.argwhere(apart)[0]))
                return Miss(f"{key}{list(place)} = {first[place]:.9g} as on rank 0", f"{value[place]:.9g}", rank)
        return None

    return rule


def quarter_of_the_bytes(case: Case, seen: Seen) -> Miss | None:
    """An all-to-all and an all-gather of a byte per element of whole blocks, and four per block."""
    ranks, block = case.world_size, case.inputs["block"]
    parts = -(-len(case.inputs["values"][0]) // (ranks * block))
    most = ranks * parts * (block + 4)
    for rank in range(ranks):
        made = made_by(seen, rank)
        for name in ("all_to_all", "all_gather"):
            sizes = [int(event.split()[1]) for event in made if event.split()[0] == name]
            others = [event for event in made if event.split()[0] not in ("all_to_all", "all_gather")]
            if others or sum(sizes) > most or (ranks > 1 and not sizes):
                return Miss(f"{name} of {most} bytes in all", short(", ".join(made) or "no collective"), rank)
    array(seen, 0, "total")
    return None


INT8 = Task(
    name="less.int8",
    lesson=LESSON,
    function="int8_all_reduce",
    title="A sum in 8 bits",
    difficulty=4,
    importance=4,
    minutes=45,
    draw=draw_int8,
    observe=observe_int8,
    own={"values": entry},
    essential=("sum", "bytes"),
    properties={
        "sum": Property(3, off_by_half_a_scale(FINITE)),
        "bf16": Property(1, off_by_half_a_scale(HALF)),
        "not finite": Property(1, broken_blocks),
        "same bits": Property(1, same_bits("total")),
        "bytes": Property(2, quarter_of_the_bytes),
    },
)


# --- less.powersgd ---

ANY, ONE, ZEROS = "any", "rank 1", "zeros"


def powersgd_case(rng: random.Random, world: int, kind: str) -> dict:
    """Gradients of three steps: any; the products of a column that all share and a row of each; or zeros."""
    rows, columns, steps = rng.randrange(5, 8), rng.randrange(4, 7), 3
    rank = 1 + world % 2 if kind == ANY else 1
    gradients = [numbers(rng, steps, rows, columns) for _ in range(world)]
    if kind == ONE:
        column = numbers(rng, rows, 1) + np.float32(1 / 128)
        gradients = [column * gradient[:, :1] for gradient in gradients]
    if kind == ZEROS:
        gradients = [0 * gradient[:1] for gradient in gradients]
    return {"kind": kind, "gradients": gradients, "q": numbers(rng, columns, rank)}


def draw_powersgd(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks with any gradient, drawn anew where rounding could show, then the two other kinds."""
    cases = []
    for world, kind in [*((world, ANY) for world in worlds), (2, ONE), (2, ZEROS)]:
        case = Case(world, powersgd_case(rng, world, kind))
        while kind != ZEROS and not well_posed(case):
            case = Case(world, powersgd_case(rng, world, kind))
        cases.append(case)
    return cases


def observe_powersgd(function: Callable[..., Any], case: Case, rank: int) -> dict:
    q = torch.from_numpy(case.inputs["q"].copy())
    mine, means, rests = torch.from_numpy(case.inputs["gradients"][rank].copy()), [], []
    left_out = torch.zeros_like(mine[0])
    with Recorder() as record:
        for gradient in mine:
            mean, q, left_out = function(gradient.clone(), q, left_out)
            means.append(plain(mean))
            rests.append(plain(left_out))
    return {"mean": np.stack(means), "left_out": np.stack(rests), "events": record.events}


def by_projection(case: Case) -> tuple[np.ndarray, float]:
    """In float64: what stands for the mean gradient in each step, and the worst condition of a P.

    The mean is enough: all that PowerSGD does is linear in the ranks' matrices.
    """
    gradients = np.mean(np.stack(case.inputs["gradients"]).astype(np.float64), axis=0)
    q, left_out = case.inputs["q"].astype(np.float64), np.zeros_like(gradients[0])
    means, worst = [], 1.0
    for gradient in gradients:
        matrix = gradient + left_out
        worst = max(worst, float(np.linalg.cond(matrix @ q))) if np.any(matrix) else worst
        basis = np.linalg.qr(matrix @ q).Q
        q = matrix.T @ basis
        means.append(basis @ q.T)
        left_out = matrix - means[-1]
    return np.stack(means), worst


def well_posed(case: Case) -> bool:
    """Whether P's columns are far from dependent, so that rounding does not turn them, and none is nearly zero."""
    gradients = np.mean(np.stack(case.inputs["gradients"]).astype(np.float64), axis=0)
    return by_projection(case)[1] < 30 and float(np.linalg.norm(gradients[0] @ case.inputs["q"])) > 0.1


def approximated(kind: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = by_projection(case)[0]
        array(seen, 0, "mean", right.shape)
        if case.inputs["kind"] != kind:
            return None
        return near(seen, "mean", [right] * case.world_size, 1e-3, first_step=1)

    return rule


def late_not_lost(case: Case, seen: Seen) -> Miss | None:
    """After each step what was applied so far, and the mean of what waits, are all gradients so far."""
    right = np.cumsum(np.mean(np.stack(case.inputs["gradients"]).astype(np.float64), axis=0), axis=0)
    waits, applied = (
        [array(seen, rank, key, right.shape) for rank in range(case.world_size)] for key in ("left_out", "mean")
    )
    where = "applied + mean of left_out"
    with np.errstate(all="ignore"):
        expected = np.cumsum(applied[0], axis=0) + np.mean(waits, axis=0)
    return near([{where: expected}], where, [right], 1e-3, first_step=1)


POWERSGD = Task(
    name="less.powersgd",
    lesson=LESSON,
    function="powersgd_step",
    title="A matrix as two thin ones",
    difficulty=3,
    importance=4,
    minutes=35,
    draw=draw_powersgd,
    observe=observe_powersgd,
    own={"gradients": entry},
    essential=("approximation", "bytes"),
    properties={
        "approximation": Property(3, approximated(ANY)),
        "rank 1 is exact": Property(1, approximated(ONE)),
        "zeros stay zeros": Property(1, approximated(ZEROS)),
        "nothing is lost": Property(2, late_not_lost),
        "bytes": Property(
            2,
            only(
                "all_reduce",
                lambda case: (
                    [4 * size * case.inputs["q"].shape[1] for size in case.inputs["gradients"][0].shape[1:]]
                    * len(case.inputs["gradients"][0])
                ),
            ),
        ),
    },
)

ALL = (INT8, POWERSGD)
