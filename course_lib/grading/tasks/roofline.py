"""Lesson 17: what a machine would allow: FLOPs, bytes and bounds of kernels, and a step's MFU."""

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.rules import Seen, items, number, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
SIZES = dict(zip(DTYPES, (4, 2, 1), strict=True))
ADAMW = [["m", "m", "g"], ["v", "v", "g"], ["d", "v"], ["u", "m", "d"], ["w", "w", "u"]]


# --- roofline.bounds ---


def chain(rng: random.Random) -> dict:
    """AdamW, or pointwise operators on any tensors, some of which are written twice or read twice by one operator."""
    if rng.random() < 0.25:
        return {"steps": ADAMW, "keep": ["w", "m", "v"]}
    steps = [
        [rng.choice("abcde"), *(rng.choice("abcde") for _ in range(rng.randrange(1, 4)))]
        for _ in range(rng.randrange(2, 6))
    ]
    steps.append([steps[-1][0], steps[-1][0], steps[-1][0]])
    written = list(dict.fromkeys(step[0] for step in steps))
    return {"steps": steps, "keep": sorted(rng.sample(written, rng.randrange(1, len(written) + 1)))}


def operator(rng: random.Random, kind: str, small: bool) -> dict:
    """A matrix product, a chain or an attention; a small one hardly computes, and moves next to nothing."""
    about: dict[str, Any] = {"kind": kind, "dtype": rng.choice(DTYPES), "again": rng.random() < 0.3}
    if kind == "matmul":
        m, k, n = (rng.randrange(1, 4) if small else rng.randrange(1, 60) * 2 ** rng.randrange(8) for _ in range(3))
        same = rng.random() < 0.4
        return about | {"m": m, "k": k, "n": m if same else n, "same": same}
    if kind == "pointwise":
        elements = rng.randrange(1, 4) if small else rng.randrange(1, 1000) * 2 ** rng.randrange(12)
        return about | {"elements": elements} | chain(rng) | {"fused": rng.random() < 0.5}
    kv_heads = rng.randrange(1, 4)
    tokens, width = (rng.randrange(1, 4), 2) if small else (rng.randrange(16, 800), rng.randrange(8, 100))
    return about | {
        "batch": rng.randrange(1, 5),
        "heads": kv_heads * rng.choice((1, 2, 4)),
        "kv_heads": kv_heads,
        "tokens": tokens,
        "width": width,
        "fused": rng.random() < 0.5,
    }


def bounds_case(rng: random.Random, place: int) -> dict:
    """Three operators of each kind, fused and not; in every fifth case small ones."""
    operators = [operator(rng, kind, place % 5 == 4) for kind in ("matmul", "pointwise", "attention") for _ in range(3)]
    for number_of, about in enumerate(operators):
        if number_of % 3 < 2 and "fused" in about:
            about["fused"] = number_of % 3 == 0
        about["again"] = about["again"] and number_of % 3 != 0
    operators[1] |= {"same": True, "n": operators[1]["m"], "dtype": "bfloat16"}
    rng.shuffle(operators)
    memory = rng.uniform(1e10, 1e11)
    rate = memory * rng.uniform(20, 40)
    return {
        "operators": operators,
        "seconds": rng.uniform(0.05, 0.2),
        "peaks": {
            "flops": {"float32": rate, "bfloat16": rate * rng.uniform(2, 4), "float8_e4m3fn": rate * rng.uniform(5, 8)},
            "memory": memory,
            "launch": rng.uniform(2e-6, 1e-5),
        },
    }


def observe_bounds(function: Callable[..., Any], case: Case, rank: int) -> dict:
    kernels, floor, mfu = function(**case.inputs)
    return {"kernels": plain(kernels), "floor": plain(floor), "mfu": plain(mfu)}


def kernels_of(about: dict) -> list[tuple[int, int, int]]:
    """Of each kernel of an operator: FLOPs, elements that it reads and writes, and FLOPs of matrix products."""
    if about["kind"] == "matmul":
        m, k, n = about["m"], about["k"], about["n"]
        flops = 2 * m * k * n
        return [(flops, m * k + k * n * (not about["same"]) + m * n, flops)]
    if about["kind"] == "pointwise":
        size, steps = about["elements"], about["steps"]
        if not about["fused"]:
            return [(size, size * (len(set(inputs)) + 1), 0) for _, *inputs in steps]
        read = {
            name
            for place, (_, *inputs) in enumerate(steps)
            for name in inputs
            if name not in {output for output, *_ in steps[:place]}
        }
        return [(size * len(steps), size * (len(read) + len(about["keep"])), 0)]
    scores = about["batch"] * about["heads"] * about["tokens"] ** 2
    queries, keys = (
        about["batch"] * about[heads] * about["tokens"] * about["width"] for heads in ("heads", "kv_heads")
    )
    product = 2 * scores * about["width"]
    if about["fused"]:
        return [(2 * product, 2 * queries + 2 * keys, 2 * product)]
    return [
        (product, queries + keys + scores, product),
        (scores, 2 * scores, 0),
        (product, scores + keys + queries, product),
    ]


def by_hand(case: Case) -> tuple[list[tuple[int, int, float, str]], float, float]:
    """(FLOPs, bytes, seconds and roof of each kernel; seconds of all; MFU)."""
    peaks, rows, model = case.inputs["peaks"], [], 0
    for about in case.inputs["operators"]:
        for flops, elements, products in kernels_of(about):
            size = elements * SIZES[about["dtype"]]
            seconds, roof = max(
                (flops / peaks["flops"][about["dtype"]], "compute"),
                (size / peaks["memory"], "memory"),
                (peaks["launch"], "launch"),
            )
            rows.append((flops, size, seconds, roof))
            model += products * (not about["again"])
    return rows, sum(row[2] for row in rows), model / case.inputs["seconds"] / max(peaks["flops"].values())


def kernel_rows(case: Case, seen: Seen) -> list[list[Any]]:
    """A row of four for each kernel; raises Malformed."""
    right = by_hand(case)[0]
    rows = items(seen, 0, "kernels", list)
    if len(rows) != len(right) or any(len(row) != 4 for row in rows):
        raise Malformed(Miss(f"{len(right)} kernels, each with 4 entries", f"{len(rows)} rows"))
    return rows


def is_near(value: Any, right: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value - right) <= 1e-6 * right


def owner_of(case: Case, kernel: int) -> str:
    """Operator that a kernel is of."""
    owners = [place for place, about in enumerate(case.inputs["operators"]) for _ in kernels_of(about)]
    place = owners[kernel]
    about = case.inputs["operators"][place]
    form = "" if "fused" not in about else " fused" if about["fused"] else " not fused"
    return f"kernel {kernel} (operators[{place}], {about['kind']}{form})"


def column(place: int, unit: str) -> Rule:
    """A rule: one number of each kernel."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        for kernel, (row, right) in enumerate(zip(kernel_rows(case, seen), by_hand(case)[0], strict=True)):
            count = right[:2][place]
            if not is_near(row[place], count):
                return Miss(f"{owner_of(case, kernel)}: {count:.6g} {unit}", short(row[place]))
        return None

    return rule


def roofs(case: Case, seen: Seen) -> Miss | None:
    """Seconds and roof of each kernel, and the sum of the seconds."""
    right, floor, _ = by_hand(case)
    for kernel, (row, (_, _, seconds, roof)) in enumerate(zip(kernel_rows(case, seen), right, strict=True)):
        if not is_near(row[2], seconds) or not isinstance(row[3], str) or row[3] != roof:
            return Miss(f"{owner_of(case, kernel)}: {seconds:.6g} s, {roof}", short(row[2:]))
    actual = number(seen, 0, "floor")
    return kit.unless(is_near(actual, floor), f"{floor:.6g} s in all", f"{actual:.6g}")


def utilization(case: Case, seen: Seen) -> Miss | None:
    kernel_rows(case, seen)
    right, actual = by_hand(case)[2], number(seen, 0, "mfu")
    return kit.unless(is_near(actual, right), f"an MFU of {right:.6g}", f"{actual:.6g}")


BOUNDS = Task(
    **kit.about("roofline.bounds"),
    draw=in_turn(bounds_case, 5),
    observe=observe_bounds,
    essential=("bytes", "roofs"),
    properties={
        "FLOPs": Property(1, column(0, "FLOPs")),
        "bytes": Property(3, column(1, "bytes")),
        "roofs": Property(2, roofs),
        "MFU": Property(1, utilization),
    },
)
