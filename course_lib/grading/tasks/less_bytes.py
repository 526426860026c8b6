"""Lesson 18: gradients that are made small before they travel: a sum in 8 bits, and matrices as two thin ones."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, made_by, near, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers

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
    usual = [(world, FINITE, rng.randrange(4, 7)) for world in worlds]
    kinds = [*usual, (worlds[-1], FINITE, 1), (2, BROKEN, 4), (2, HALF, 5)]
    return [Case(world, int8_case(rng, world, kind, blocks)) for world, kind, blocks in kinds]


def observe_int8(function: Callable[..., Any], case: Case, rank: int) -> dict:
    mine = kit.tensor(case.inputs["values"][rank])
    with Recorder() as record:
        total = function(mine.bfloat16() if case.inputs["kind"] == HALF else mine, case.inputs["block"])
    return kit.noted(record, total=total, dtype=str(total.dtype))


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

    @kit.each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        right, allowed = summed(case)
        total, dtype = array(seen, rank, "total", right.shape), seen[rank].get("dtype")
        if (case.inputs["kind"] == HALF) != (kind == HALF):
            return None
        if dtype != f"torch.{case.inputs['kind'].split(',')[0]}":
            return Miss(f"a sum in {case.inputs['kind']}", short(dtype))
        with np.errstate(invalid="ignore"):
            wrong = np.isfinite(allowed) & ~(np.abs(total - right) <= allowed)
        place = int(np.argmax(wrong))
        miss = kit.first_wrong(wrong, "total", right, total, said=f", at most {allowed[place]:.2g} off")
        return kit.explained(miss, f"in block {place // case.inputs['block']}")

    return rule


@kit.each_rank
def broken_blocks(case: Case, seen: Seen, rank: int) -> Miss | None:
    right, allowed = summed(case)
    total = array(seen, rank, "total", right.shape)
    still = ~np.isfinite(allowed) & ~np.isnan(total)
    note = f"in block {int(np.argmax(still)) // case.inputs['block']} a rank has a number that is not finite"
    return kit.explained(kit.first_wrong(still, "total", np.full(right.shape, np.nan), total), note)


def same_bits(key: str) -> Rule:
    """A rule: all ranks have what rank 0 has, to the last bit."""

    @kit.each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        first = array(seen, 0, key)
        value = array(seen, rank, key, first.shape)
        apart = (value != first) & ~(np.isnan(value) & np.isnan(first))
        return kit.first_wrong(apart, key, first, value, 9, " as on rank 0")

    return rule


@kit.each_rank
def quarter_of_the_bytes(case: Case, seen: Seen, rank: int) -> Miss | None:
    """An all-to-all and an all-gather of a byte per element of whole blocks, and four per block."""
    array(seen, 0, "total")
    ranks, block, made = case.world_size, case.inputs["block"], made_by(seen, rank)
    most = ranks * -(-len(case.inputs["values"][0]) // (ranks * block)) * (block + 4)
    by_name = {name: [event for event in made if event.split()[0] == name] for name in ("all_to_all", "all_gather")}
    for name, mine in by_name.items():
        fits = sum(map(len, by_name.values())) == len(made) and kit.carried(mine) <= most and (ranks == 1 or mine)
        if not fits:
            return Miss(f"{name} of {most} bytes in all", kit.listed(made))
    return None


INT8 = Task(
    **kit.about("less.int8"),
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
    q, mine = kit.tensor(case.inputs["q"]), kit.tensor(case.inputs["gradients"][rank])
    left_out, means, rests = torch.zeros_like(mine[0]), [], []
    with Recorder() as record:
        for gradient in mine:
            mean, q, left_out = function(gradient.clone(), q, left_out)
            means.append(plain(mean))
            rests.append(plain(left_out))
    return kit.noted(record, mean=np.stack(means), left_out=np.stack(rests))


def mean_gradients(case: Case) -> np.ndarray:
    """In float64, by step."""
    return np.mean(np.stack(case.inputs["gradients"]).astype(np.float64), axis=0)


def by_projection(case: Case) -> tuple[np.ndarray, float]:
    """In float64: what stands for the mean gradient in each step, and the worst condition of a P.

    The mean is enough: all that PowerSGD does is linear in the ranks' matrices.
    """
    gradients = mean_gradients(case)
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
    first = mean_gradients(case)[0] @ case.inputs["q"]
    return by_projection(case)[1] < 30 and float(np.linalg.norm(first)) > 0.1


def approximated(kind: str) -> Rule:
    return kit.equals("mean", by_projection, kind, of=0, on_all=True, tolerance=1e-3, first_step=1)


def thin_matrices(case: Case) -> list[str]:
    """P and Q in each step."""
    steps, *sides = case.inputs["gradients"][0].shape
    return [f"all_reduce {4 * size * case.inputs['q'].shape[1]}" for size in sides] * steps


def late_not_lost(case: Case, seen: Seen) -> Miss | None:
    """After each step what was applied so far, and the mean of what waits, are all gradients so far."""
    right = np.cumsum(mean_gradients(case), axis=0)
    waits, applied = (
        [array(seen, rank, key, right.shape) for rank in range(case.world_size)] for key in ("left_out", "mean")
    )
    where = "applied + mean of left_out"
    with np.errstate(all="ignore"):
        expected = np.cumsum(applied[0], axis=0) + np.mean(waits, axis=0)
    return near([{where: expected}], where, [right], 1e-3, first_step=1)


POWERSGD = Task(
    **kit.about("less.powersgd"),
    draw=draw_powersgd,
    observe=observe_powersgd,
    own={"gradients": entry},
    essential=("approximation", "bytes"),
    properties={
        "approximation": Property(3, approximated(ANY)),
        "rank 1 is exact": Property(1, approximated(ONE)),
        "zeros stay zeros": Property(1, approximated(ZEROS)),
        "nothing is lost": Property(2, late_not_lost),
        "bytes": Property(2, kit.made_are(thin_matrices)),
    },
)
