"""Lesson 17: a linear layer whose products are in 8 bits, and weights that travel in 8 bits."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, dtype_of, items, number, same, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, in_turn, reals
from course_lib.grading.work import Work

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
USUAL, TINY, ZEROS, UNEVEN, EMPTY = "usual", "tiny", "zeros", "uneven", "a rank without a part"


def rounded(values: Tensor, form: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The 8-bit form of values and their scale: a number, or (rows, 1); 1 where all is zero."""
    largest = values.abs().amax(-1, keepdim=True) if by_row else values.abs().max()
    scale = largest / torch.finfo(form).max
    scale = torch.where(scale == 0, 1, scale)
    return (values / scale).to(form), scale


# --- fp8.linear ---


def linear_case(rng: random.Random, place: int) -> dict:
    """In turn: one scale, a scale per row, tiny gradients, and rows or whole tensors of zeros, of either kind.

    Rows and columns differ by more than a scale of all of them can bear, where each row has its own.
    """
    kind = (USUAL, USUAL, TINY, ZEROS)[place % 4]
    by_row = (place + place // 4) % 2 == 1
    out, width = rng.randrange(3, 6), rng.randrange(20, 28)
    tokens = width + rng.randrange(1, 6)
    x, weight, gradient = (reals(rng, *shape) for shape in ((tokens, width), (out, width), (tokens, out)))
    if by_row:
        for values in (x, weight, gradient):
            values[::2] *= np.float32(2.0**-19)
            values[:, 1::2] *= np.float32(2.0**-19)
    if kind == TINY:
        gradient *= np.float32(2.0**-50)
    if kind == ZEROS:
        x[1], gradient[2], weight[2], gradient[:, 1], x[:, 0] = 0, 0, 0, 0, 0
        if not by_row:
            gradient[:] = 0
    return {"kind": kind, "by_row": by_row, "x": x, "weight": weight, "gradient": gradient}


def observe_linear(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Forward and backward; what each product is handed, and what the layer keeps in between."""
    handed: list[dict] = []

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        """a @ b.T, times the scales: (m, k) and (n, k) in 8 bits, scales of one number or (m, 1) and (n, 1) in fp32."""
        for side, scale in ((a, scale_a), (b, scale_b)):
            if scale.numel() != 1 and scale.shape != (len(side), 1):
                raise ValueError(f"a scale of shape {list(scale.shape)} for a side of shape {list(side.shape)}")
        handed.append(
            {
                "sides": " and ".join(f"{list(side.shape)} in {dtype_of(side)}" for side in (a, b)),
                "largest": [plain(side.detach().float().abs().amax(-1)) for side in (a, b)],
            }
        )
        left, right = (
            (side.detach().double() * scale.detach().double()).numpy() for side, scale in ((a, scale_a), (b, scale_b))
        )
        return torch.from_numpy((left @ right.T).astype(np.float32))

    x, weight = kit.tensor(case.inputs["x"]).requires_grad_(), nn.Parameter(kit.tensor(case.inputs["weight"]))
    with Work() as work:
        activation = x * 1
        output = function(activation, weight, product, case.inputs["by_row"])
        del activation
        held = work.held_beside(output)
        # A gradient given to backward() would import half a second of torch, in each case's process.
        (output * kit.tensor(case.inputs["gradient"])).sum().backward()
    return {
        "output": plain(output),
        "of_x": plain(x.grad),
        "of_weight": plain(weight.grad),
        "held": held,
        "flops": work.flops,
        "handed": handed,
    }


def sides_of(case: Case) -> dict[str, tuple[tuple[Tensor, torch.dtype], tuple[Tensor, torch.dtype]]]:
    """By result the two sides of its product, (m, k) and (n, k), each with the format that it is rounded to."""
    x, weight, gradient = (kit.tensor(case.inputs[name]) for name in ("x", "weight", "gradient"))
    return {
        "output": ((x, E4M3), (weight, E4M3)),
        "of_x": ((gradient, E5M2), (weight.T, E4M3)),
        "of_weight": ((gradient.T, E5M2), (x.T, E4M3)),
    }


def in_eight_bits(case: Case, key: str) -> np.ndarray:
    """The product of two sides that are rounded once, in float64."""
    left, right = (
        (eight.double() * scale.double()).numpy()
        for eight, scale in (rounded(side, form, case.inputs["by_row"]) for side, form in sides_of(case)[key])
    )
    return left @ right.T


def product_of(key: str, *kinds: str) -> Rule:
    """A rule: a result is that of rounded sides; where each row has a scale, by the size of each row and column."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        right = in_eight_bits(case, key)
        actual = array(seen, 0, key, right.shape)
        if case.inputs["kind"] not in kinds:
            return None
        left, other = (side.double().numpy() for side, _ in sides_of(case)[key])
        if case.inputs["by_row"]:
            size = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(other, axis=1)
        else:
            size = np.full(right.shape, np.linalg.norm(left) * np.linalg.norm(other) / right.size**0.5)
        wrong = ~(np.abs(actual - right) <= 2e-3 * size)
        unrounded = (left @ other.T)[wrong]
        note = f"without rounding it is {unrounded[0]:.5g}" if unrounded.size else ""
        return kit.explained(kit.first_wrong(wrong, key, right, actual), note)

    return rule


def products_of(kind: str) -> Rule:
    return kit.all_of(*(product_of(key, kind) for key in ("output", "of_x", "of_weight")))


def formats(case: Case, seen: Seen) -> Miss | None:
    """Three products and no other, each of sides in their formats, whose scales use the whole range."""
    calls, others = items(seen, 0, "handed", dict), number(seen, 0, "flops")
    if len(calls) != 3 or others:
        return Miss("3 calls of product, and no other matrix product", f"{len(calls)}, and {others:g} FLOPs in others")
    for key, sides in sides_of(case).items():
        right = " and ".join(f"{list(side.shape)} in {form}" for side, form in sides).replace("torch.", "")
        call = next((call for call in calls if str(call.get("sides")) == right), None)
        if call is None:
            return Miss(f"{key} by a product of {right}", "; ".join(short(call.get("sides")) for call in calls))
        if miss := fills_the_range(case, key, call.get("largest")):
            return miss
    return None


def fills_the_range(case: Case, key: str, largest: Any) -> Miss | None:
    """The largest number in 8 bits of each side, or of each row of it, is its format's largest, unless all is zero."""
    if not isinstance(largest, list) or len(largest) != 2:
        raise Malformed(Miss("two sides", short(largest)))
    for place, (side, form) in enumerate(sides_of(case)[key]):
        right = rounded(side, form, case.inputs["by_row"])[0].float().abs().amax(-1).numpy()
        actual = array([{"rows": largest[place]}], 0, "rows", right.shape)
        if not case.inputs["by_row"]:
            right, actual = right.max(keepdims=True), actual.max(keepdims=True)
        if (wrong := actual != right).any():
            row = int(np.argmax(wrong))
            where = f" in row {row}" if case.inputs["by_row"] else ""
            return Miss(
                f"{key}: {right[row]:g} as the largest number in 8 bits of side {place + 1}{where}", f"{actual[row]:g}"
            )
    return None


def kept(case: Case, seen: Seen) -> Miss | None:
    """A byte for each element of x and of the weight, and their scales."""
    x, weight = case.inputs["x"], case.inputs["weight"]
    array(seen, 0, "output", (len(x), len(weight)))
    most, actual = x.size + weight.size + 4 * (2 * x.shape[1] + 2), number(seen, 0, "held")
    note = f"x has {x.size} elements, the weight {weight.size}"
    return kit.unless(actual <= most, f"{most} bytes kept for the backward at most", f"{actual:g}", note)


LINEAR = Task(
    **kit.about("fp8.linear"),
    draw=in_turn(linear_case, 8),
    observe=observe_linear,
    essential=("output", "gradient of the weight", "formats"),
    properties={
        "output": Property(2, product_of("output", USUAL)),
        "gradient of x": Property(2, product_of("of_x", USUAL)),
        "gradient of the weight": Property(2, product_of("of_weight", USUAL)),
        "tiny gradients": Property(1, products_of(TINY)),
        "zeros": Property(1, products_of(ZEROS)),
        "formats": Property(2, formats),
        "kept in 8 bits": Property(2, kept),
    },
)


# --- fp8.all_gather ---


def gather_case(rng: random.Random, world: int, kind: str) -> dict:
    """A weight in as many equal parts as there are ranks, of which the last may be short or empty.

    The largest number is on any of the ranks, and below zero.
    """
    shape = (rng.randrange(3, 6), rng.randrange(5, 9))
    while kind == UNEVEN and shape[0] * shape[1] % world == 0:
        shape = (rng.randrange(3, 6), rng.randrange(5, 9))
    if kind in (ZEROS, EMPTY):
        shape = (1, world + 1)
    values = reals(rng, shape[0] * shape[1]) * np.float32(2.0 ** -rng.randrange(8))
    part = -(-len(values) // world)
    of_rank = rng.randrange(1 if kind in (ZEROS, EMPTY) else world)
    place = rng.randrange(of_rank * part, min((of_rank + 1) * part, len(values)))
    values[place] = -(np.abs(values).max() * np.float32(rng.uniform(1.5, 3.0)) + np.float32(0.01))
    if kind == ZEROS:
        values[:] = 0
    return {"shape": list(shape), "shards": [values[rank * part : (rank + 1) * part] for rank in range(world)]}


draw_gathers = each_world(gather_case, (2, UNEVEN), (3, UNEVEN), (2, ZEROS), (4, EMPTY), usual=(USUAL,))
"""Each number of ranks; a last part that is short; zeros; and more ranks than there are parts."""


def observe_gather(function: Callable[..., Any], case: Case, rank: int) -> dict:
    shard = kit.tensor(case.inputs["shards"][rank])
    with Recorder() as record:
        weight, scale = function(shard, torch.Size(case.inputs["shape"]))
    return kit.noted(record, bits=weight.contiguous().view(torch.uint8), dtype=dtype_of(weight), scale=scale)


def whole_rounded(case: Case) -> tuple[np.ndarray, float]:
    """The bits of the whole weight, rounded with one scale, and the scale."""
    whole = torch.from_numpy(np.concatenate(case.inputs["shards"]))
    eight, scale = rounded(whole, E4M3, by_row=False)
    return eight.view(torch.uint8).view(case.inputs["shape"]).numpy(), scale.item()


def value_of(bits: np.ndarray) -> np.ndarray:
    """Numbers from the bits of their 8-bit form."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(bits.astype(np.int64) & 255).to(torch.uint8).view(E4M3).double().numpy()


@kit.each_rank
def as_the_whole(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Each rank has the weight in 8 bits, to the last bit."""
    right = whole_rounded(case)[0]
    if miss := same(seen, "dtype", ["float8_e4m3fn"] * case.world_size):
        return miss
    actual = array(seen, rank, "bits", right.shape)
    differs = actual != right
    note = f"{int(differs.sum())} of {right.size} elements differ"
    return kit.explained(kit.first_wrong(differs, "weight", value_of(right), value_of(actual), 6, " in 8 bits"), note)


@kit.each_rank
def one_scale(case: Case, seen: Seen, rank: int) -> Miss | None:
    right, actual = whole_rounded(case)[1], number(seen, rank, "scale")
    return kit.unless(abs(actual - right) <= 1e-6 * right, f"scale {right:.6g}", f"{actual:.6g}")


def scale_then_bytes(case: Case) -> list[str]:
    """An all-reduce of a number, then an all-gather of a byte for each element of equal parts."""
    return ["all_reduce 4", f"all_gather {case.world_size * len(case.inputs['shards'][0])}"]


GATHER = Task(
    **kit.about("fp8.all_gather"),
    draw=draw_gathers,
    observe=observe_gather,
    own={"shards": entry},
    essential=("weight", "bytes"),
    properties={
        "weight": Property(3, as_the_whole),
        "scale": Property(1, one_scale),
        "bytes": Property(2, kit.all_of(kit.made_are(scale_then_bytes), kit.reads("bits"))),
    },
)
