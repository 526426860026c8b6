"""Lesson 19: two thin matrices beside a frozen layer, added to its weight and taken away again."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from course_lib.grading.rules import Seen, array, dtype_of, near, number, of_dtype, ratio, same
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn, numbers, reals
from course_lib.grading.work import Work

FP32, BF16, DROPPED = "float32", "bfloat16", "dropout"
EXACT = {FP32: 1e-4, BF16: 2e-2}
"""By the dtype of the base, how far an output may be off: bf16 has 8 bits, and sums may be rounded twice."""


# --- lora.layer ---


def layer_case(rng: random.Random, place: int) -> dict:
    """In turn: a base in fp32 with a bias, one in bf16 without, and dropout, of which A and B show each number.

    alpha / r is a power of two, so that the products are exact in whatever order they are made.
    """
    kind = (FP32, BF16, DROPPED)[place % 3]
    r, tokens = rng.randrange(2, 4), rng.randrange(2, 4)
    inputs, outputs = rng.sample(range(14, 22), 2)
    if kind == DROPPED:
        r = inputs = outputs = 8
    case: dict[str, Any] = {
        "kind": kind,
        "dtype": BF16 if kind == BF16 else FP32,
        "r": r,
        "alpha": r * rng.choice((0.25, 0.5, 2, 4)),
        "dropout": rng.choice((0.25, 0.5)) if kind == DROPPED else 0.0,
        "seed": rng.randrange(2**31),
        "weight": reals(rng, outputs, inputs),
        "bias": None if kind == BF16 else numbers(rng, outputs),
        "A": numbers(rng, r, inputs),
        "B": numbers(rng, outputs, r),
        "x": numbers(rng, 2, tokens, inputs),
        "gradient": numbers(rng, 2, tokens, outputs),
    }
    if kind == DROPPED:
        case |= {
            "A": np.triu(np.ones((r, r), np.float32)),
            "B": np.tril(np.ones((r, r), np.float32)),
            "x": np.abs(case["x"]) + np.float32(0.5),
        }
    return case


def base_of(case: Case) -> nn.Linear:
    """The frozen layer, in its dtype."""
    weight, bias = case.inputs["weight"], case.inputs["bias"]
    base = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    base.weight.data = kit.tensor(weight)
    if bias is not None:
        base.bias.data = kit.tensor(bias)
    return base.to(getattr(torch, case.inputs["dtype"]))


def tensor(case: Case, name: str) -> torch.Tensor:
    """x or the gradient of the output, in the base's dtype."""
    return kit.tensor(case.inputs[name]).to(getattr(torch, case.inputs["dtype"]))


def observe_layer(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """At the start; with A and B of the case, forward and backward; merged and unmerged."""
    base, x = base_of(case), tensor(case, "x")
    seen = {"bare": plain(base(x)), "whole": plain(base.weight)}
    torch.manual_seed(case.inputs["seed"])
    layer = function(base, *(case.inputs[name] for name in ("r", "alpha", "dropout")))
    seen |= {
        "drawn": plain(layer.A),
        "zeros": plain(layer.B),
        "start": plain(layer(x)),
        "trained": sorted(f"{list(p.shape)} {dtype_of(p)}" for p in layer.parameters() if p.requires_grad),
    }
    with torch.no_grad():
        for name in "AB":
            getattr(layer, name).copy_(kit.tensor(case.inputs[name]))
    seen["training"] = plain(layer(x))
    layer.eval()
    x.requires_grad_()
    with Work() as work:
        activation = x * 1
        output = layer(activation)
        del activation
        seen |= {"held": work.held_beside(output), "forward": work.flops}
        output.backward(tensor(case, "gradient"))
        seen |= {"flops": work.flops, "largest": work.largest}
    seen |= {
        "output": plain(output),
        "dtype of output": dtype_of(output),
        "of_x": plain(x.grad),
        "of_A": plain(layer.A.grad),
        "of_B": plain(layer.B.grad),
        "of_base": sum(p.grad is not None for p in base.parameters()),
    }
    return seen | observe_merging(layer, base.weight, x)


def observe_merging(layer: Any, weight: torch.Tensor, x: torch.Tensor) -> dict:
    """Merged twice, unmerged twice, merged once more with B of the other sign."""
    place = weight.data_ptr()

    def written() -> Any:
        is_there = layer.base.weight is weight and weight.data_ptr() == place
        return plain(weight) if is_there else None

    layer.merge()
    seen = {"merged": written()}
    with Work() as work:
        seen |= {"merged_output": plain(layer(x.detach())), "merged_flops": work.flops}
    layer.merge()
    seen["merged twice"] = written()
    layer.unmerge()
    seen |= {"unmerged": written(), "unmerged_output": plain(layer(x))}
    layer.unmerge()
    seen["unmerged twice"] = written()
    with torch.no_grad():
        layer.B.neg_()
    layer.merge()
    seen["merged anew"] = written()
    return seen


def begins_at_the_base(case: Case, seen: Seen) -> Miss | None:
    """B is zero, A uniform within 1 / sqrt(n), and the output the base's own, to the bit, also in training."""
    r, (outputs, inputs) = case.inputs["r"], case.inputs["weight"].shape
    bound = inputs**-0.5
    drawn, zeros = array(seen, 0, "drawn", (r, inputs)), array(seen, 0, "zeros", (outputs, r))
    if zeros.any() or not bound / 2 < np.abs(drawn).max() <= bound or len(np.unique(drawn)) < drawn.size / 2:
        return Miss(
            f"B of zeros, and A between -{bound:.3f} and {bound:.3f}",
            f"B up to {np.abs(zeros).max():.3g}, and A from {drawn.min():.3g} to {drawn.max():.3g}",
        )
    return same_numbers("start", array(seen, 0, "bare", case.inputs["gradient"].shape), seen)


def same_numbers(key: str, right: np.ndarray, seen: Seen) -> Miss | None:
    """Whether what was observed are these numbers, to the bit."""
    actual = array(seen, 0, key, right.shape)
    return kit.explained(kit.first_wrong(actual != right, key, right, actual, 9), ratio(actual, right, 1))


def exactly(case: Case) -> dict[str, np.ndarray]:
    """Output and gradients, in float64, of the weight as its dtype has it."""
    weight, x, gradient = (
        values.detach().double().numpy()
        for values in (base_of(case).weight, tensor(case, "x"), tensor(case, "gradient"))
    )
    a, b = (case.inputs[name].astype(np.float64) for name in "AB")
    scaling = case.inputs["alpha"] / case.inputs["r"]
    bias = 0 if case.inputs["bias"] is None else case.inputs["bias"].astype(np.float64)
    rows, behind = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    return {
        "output": x @ (weight + scaling * b @ a).T + bias,
        "of_x": gradient @ (weight + scaling * b @ a),
        "of_A": scaling * (behind @ b).T @ rows,
        "of_B": scaling * behind.T @ (rows @ a.T),
    }


def output(case: Case, seen: Seen) -> Miss | None:
    dtype, right = case.inputs["dtype"], exactly(case)["output"]
    array(seen, 0, "output", right.shape)
    return of_dtype(seen, "output", dtype) or near(seen, "output", [right], EXACT[dtype])


def gradients(case: Case, seen: Seen) -> Miss | None:
    right, tolerances = exactly(case), {"of_A": 1e-4, "of_B": 1e-4, "of_x": EXACT[case.inputs["dtype"]]}
    misses = (near(seen, key, [right[key]], tolerance) for key, tolerance in tolerances.items())
    return next(filter(None, misses), None)


def frozen(case: Case, seen: Seen) -> Miss | None:
    """A and B alone are trained, in fp32."""
    r, (outputs, inputs) = case.inputs["r"], case.inputs["weight"].shape
    right = sorted([f"[{r}, {inputs}] {FP32}", f"[{outputs}, {r}] {FP32}"])
    if miss := same(seen, "trained", [right]):
        return miss
    actual = number(seen, 0, "of_base")
    return kit.unless(not actual, "no gradient at the base", f"{actual:g} of its parameters have one")


def never_the_product(case: Case, seen: Seen) -> Miss | None:
    """FLOPs of the base and of two thin products, no tensor of the weight's size; x and A x kept for the backward."""
    r, (outputs, inputs) = case.inputs["r"], case.inputs["weight"].shape
    tokens = case.inputs["x"].size // inputs
    thin, base = 2 * tokens * r * (inputs + outputs), 2 * tokens * inputs * outputs
    kept = 4 * tokens * (inputs + 2 * r)
    limits = {
        "forward": (thin + base, "FLOPs in the forward"),
        "flops": (3 * thin + 2 * base, "FLOPs in a step"),
        "held": (kept, "bytes kept for the backward"),
        "largest": (max(tokens, r) * max(inputs, outputs), "elements in a tensor"),
    }
    note = f"the weight and B A have {outputs * inputs} elements, and x has {tokens} rows"
    for key, (most, what) in limits.items():
        actual = number(seen, 0, key)
        if case.inputs["kind"] != DROPPED and not 0 < actual <= most:
            return Miss(f"{most} {what} at most", f"{actual:g}", note=note)
    return None


def dropout(case: Case, seen: Seen) -> Miss | None:
    """In training each number of x is left out or scaled up on its way to A, and on no other way."""
    training, whole = (array(seen, 0, key, case.inputs["gradient"].shape) for key in ("training", "bare"))
    share = case.inputs["dropout"]
    if case.inputs["kind"] != DROPPED:
        return near(seen, "training", [exactly(case)["output"]], EXACT[case.inputs["dtype"]])
    a, b = (case.inputs[name].astype(np.float64) for name in "AB")
    scaling = case.inputs["alpha"] / case.inputs["r"]
    passed = (training - whole) / scaling @ np.linalg.inv(b).T @ np.linalg.inv(a).T
    x = case.inputs["x"].astype(np.float64)
    left_out, scaled = np.abs(passed) < 1e-3, np.abs(passed - x / (1 - share)) < 1e-3
    return kit.unless(
        (left_out | scaled).all() and left_out.any() and scaled.any(),
        f"in training A gets each number of x as 0 or {1 / (1 - share):.3g} times",
        f"{left_out.sum()} of {x.size} as 0, {scaled.sum()} times {1 / (1 - share):.3g}",
    )


def merged(case: Case, seen: Seen) -> Miss | None:
    """W + (alpha / r) B A, written in place, once; and the forward is the base's alone.

    A sum in fp32 that is rounded to the base's dtype once is off by half of its last bit at most, and in fp32 the sum's
    own rounding comes on top, in whatever order it is made.
    """
    weight = base_of(case).weight.detach().double().numpy()
    tokens = case.inputs["x"].size // weight.shape[1]
    added = case.inputs["alpha"] / case.inputs["r"] * (case.inputs["B"].astype(np.float64) @ case.inputs["A"])
    for key, sign in (("merged", 1), ("merged twice", 1), ("merged anew", -1)):
        right = weight + sign * added
        last_bit = 2.0 ** (np.floor(np.log2(np.abs(right) + 1e-30)) - (7 if case.inputs["dtype"] == BF16 else 23))
        actual = array(seen, 0, key, right.shape)
        off = ~(np.abs(actual - right) <= last_bit / 2 + 2.0**-22 * (np.abs(weight) + np.abs(added)))
        if miss := kit.first_wrong(off, key, right, actual, 7, ", rounded once"):
            return kit.explained(miss, ratio(actual, right, 1))
    if miss := near(seen, "merged_output", [exactly(case)["output"]], EXACT[case.inputs["dtype"]]):
        return miss
    least, flops = 2 * tokens * weight.size, number(seen, 0, "merged_flops")
    return kit.unless(flops == least, f"{least} FLOPs in the forward of a merged layer", f"{flops:g}")


def unmerged(case: Case, seen: Seen) -> Miss | None:
    """The bits of before, and the forward has its adapter again."""
    before = base_of(case).weight.detach().float().numpy()
    return (
        same_numbers("unmerged", before, seen)
        or same_numbers("unmerged twice", before, seen)
        or near(seen, "unmerged_output", [exactly(case)["output"]], EXACT[case.inputs["dtype"]])
    )


LAYER = Task(
    **kit.about("lora.layer"),
    draw=in_turn(layer_case, 6),
    observe=observe_layer,
    essential=("output", "never B A", "merged"),
    properties={
        "begins at the base": Property(1, begins_at_the_base),
        "output": Property(2, output),
        "gradients": Property(1, gradients),
        "base is frozen": Property(1, frozen),
        "never B A": Property(2, never_the_product),
        "dropout": Property(1, dropout),
        "merged": Property(2, merged),
        "unmerged": Property(1, unmerged),
    },
)
