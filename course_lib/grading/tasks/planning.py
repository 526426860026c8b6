"""Lesson 09: what a model holds, what a message costs, and the search over layouts; no ranks, no torch."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.grading import own_code
from course_lib.grading.rules import Seen, items, number, raised, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn

SEVEN_BILLION = {"layers": 32, "width": 4096, "intermediate": 11008, "vocabulary": 32000, "heads": 32, "kv_heads": 32}
"""LLaMA-7B's, arXiv 2302.13971 table 2 and its config.json."""


def refused(refusal: ValueError, function: Callable[..., Any]) -> dict[str, str]:
    """Note of a ValueError: its message, and the line that raised it, which may be no refusal."""
    return {"refusal": str(refusal)[:200], "raised": own_code.told(refusal, own_code.file_of(function))}


def says_least(seen: Seen, least: int, unit: str, instead: Any) -> Miss | None:
    """Whether an answer has refused with a ValueError that says what is needed at least."""
    said = str(seen[0].get("refusal") or "")
    is_said = re.search(rf"\b{least}\b", said)
    return kit.unless(is_said, f"a ValueError that says {least} {unit}", short(raised(seen) or instead))


def exactly(actual: float, right: float) -> bool:
    """Whether two numbers are the same except for rounding."""
    return abs(actual - right) <= 1e-9 * max(abs(right), 1e-12)


# --- plan.memory ---


def memory_case(rng: random.Random, place: int) -> dict:
    groups, shared = rng.randrange(2, 12), rng.choice((1, 2, 4, 8))
    drawn = {
        "layers": rng.randrange(4, 60),
        "width": 128 * groups * shared,
        "intermediate": 64 * rng.randrange(16, 300),
        "vocabulary": 1000 * rng.randrange(8, 200),
        "heads": groups * shared,
        "kv_heads": groups,
    }
    return {
        "sizes": drawn if place else SEVEN_BILLION,
        "gpus": 2 ** rng.randrange(1, 8),
        "stage": 3 - place % 4,
        "micro_batch": rng.randrange(1, 9),
        "sequence": 512 * rng.randrange(1, 17),
        "checkpointing": place % 4 in (1, 2),
    }


def observe_memory(function: Callable[..., Any], case: Case, rank: int) -> dict:
    held = function(**{**case.inputs, "sizes": dict(case.inputs["sizes"])})
    return {key: plain(held[key]) for key in ("count", "parameters", "gradients", "optimizer", "activations", "logits")}


def memory(case: Case) -> dict[str, float]:
    given, sizes = case.inputs, case.inputs["sizes"]
    width, layers, words = sizes["width"], sizes["layers"], sizes["vocabulary"]
    inside, heads, shared_width = sizes["intermediate"], sizes["heads"], width * sizes["kv_heads"] // sizes["heads"]
    block = 2 * width**2 + 2 * width * shared_width + 3 * width * inside + 2 * width
    count = layers * block + (2 * words + 1) * width
    shared = [given["gpus"] if given["stage"] >= stage else 1 for stage in (3, 2, 1)]
    states = {
        key: count * size / by
        for key, size, by in zip(("parameters", "gradients", "optimizer"), (2, 2, 12), shared, strict=True)
    }
    tokens = given["micro_batch"] * given["sequence"]
    # two norms, inputs of attention and MLP, queries, attention's result with a sum per head, keys and values, the MLP
    kept = (12 + 4 + 2 + 2) * width + 4 * heads + 4 * shared_width + 8 * inside
    blocks = 2 * layers * width + kept if given["checkpointing"] else layers * kept
    return {"count": count, **states, "activations": tokens * (blocks + 4 * width), "logits": tokens * 12 * words}


def memory_is(*keys: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = memory(case)
        for key in keys:
            if not exactly(actual := number(seen, 0, key), right[key]):
                return Miss(f"{key} {right[key]:,.0f}", f"{actual:,.0f} for {case.inputs}")
        return None

    return rule


MEMORY = Task(
    **kit.about("plan.memory"),
    draw=in_turn(memory_case),
    observe=observe_memory,
    properties={
        "count": Property(1, memory_is("count")),
        "model states": Property(2, memory_is("parameters", "gradients", "optimizer")),
        "activations": Property(2, memory_is("activations", "logits")),
    },
)


# --- plan.all_reduce ---


def links_case(rng: random.Random, place: int) -> dict:
    machines, gpus = [(rng.randrange(2, 9), rng.randrange(2, 9)), (1, rng.randrange(2, 9)), (rng.randrange(2, 9), 1)][
        place % 3
    ]
    return {
        "size": rng.randrange(1, 4000) * 1_000_000,
        "machines": machines,
        "gpus": gpus,
        "inside": [rng.randrange(2, 6) * 1e-6, rng.randrange(100, 450) * 1e9],
        "between": [rng.randrange(8, 30) * 1e-6, rng.randrange(5, 50) * 1e9],
    }


def observe_seconds(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in case.inputs.items()}
    ring, by_level = function(**given)
    return {"ring": plain(ring), "by level": plain(by_level)}


def all_reduce_seconds(case: Case) -> dict[str, float]:
    size, machines, gpus = (case.inputs[key] for key in ("size", "machines", "gpus"))

    def steps(count: int, part: float, link: list[float]) -> float:
        return count * (link[0] + part / link[1])

    ranks, inside, between = machines * gpus, case.inputs["inside"], case.inputs["between"]
    return {
        "ring": steps(2 * (ranks - 1), size / ranks, between if machines > 1 else inside),
        "by level": (steps(2 * (gpus - 1), size / gpus, inside) + steps(2 * (machines - 1), size / ranks, between)),
    }


def seconds_are(key: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right, actual = all_reduce_seconds(case)[key], number(seen, 0, key)
        return kit.unless(exactly(actual, right), f"{right:.6g} s {key}", f"{actual:.6g} s for {case.inputs}")

    return rule


ALL_REDUCE = Task(
    **kit.about("plan.all_reduce"),
    draw=in_turn(links_case, 6),
    observe=observe_seconds,
    properties={"one ring": Property(2, seconds_are("ring")), "by level": Property(2, seconds_are("by level"))},
)


# --- plan.search ---

Layout = tuple[int, int, int]


def layouts(gpus: int) -> list[Layout]:
    """All (data, tensors, stages) whose product is the number of GPUs."""
    return [
        (gpus // tensors // stages, tensors, stages)
        for tensors in range(1, gpus + 1)
        for stages in range(1, gpus + 1)
        if gpus % (tensors * stages) == 0
    ]


def legal(given: dict) -> list[Layout]:
    """The layouts that the model and the machines allow."""
    return [
        layout
        for layout in layouts(given["gpus"])
        if layout[1] <= given["gpus_per_machine"]
        and given["heads"] % layout[1] == 0
        and given["layers"] % layout[2] == 0
    ]


def name_of(layout: Sequence[int]) -> str:
    return "x".join(map(str, layout))


def search_case(rng: random.Random, place: int) -> dict:
    """In turn: one layout is the fastest, two are as fast, nothing fits."""
    is_one_machine = place > 0 and place % 3 == 0  # and the fastest has its tensors over all of it
    gpus = 8 if is_one_machine else 2 ** rng.randrange(3, 6)
    given: dict[str, Any] = {
        "gpus": gpus,
        "gpus_per_machine": 8 if is_one_machine else 4,
        "layers": 4 * rng.choice((3, 6, 10)),
        "heads": rng.choice((24, 40)) if place % 3 == 0 else 6,
    }
    allowed = legal(given)
    chosen = rng.sample(allowed, 4)
    if is_one_machine:
        chosen[0] = (1, gpus, 1)
        chosen[1:] = rng.sample([layout for layout in allowed if layout != chosen[0]], 3)
    given["memory_GiB"] = {name_of(layout): rng.randrange(90, 200) for layout in layouts(gpus)}
    given["step_seconds"] = {name_of(layout): rng.randrange(40, 400) / 16 for layout in layouts(gpus)}
    given["capacity_GiB"] = 80
    if place % 3 < 2:
        for layout in chosen:
            given["memory_GiB"][name_of(layout)] = rng.randrange(20, 81)
        given["memory_GiB"][name_of(chosen[0])] = 80  # what just fits, fits
        best = min(given["step_seconds"].values())
        for layout in chosen[: 1 + place % 3]:
            given["step_seconds"][name_of(layout)] = best
        for layout in set(layouts(gpus)) - set(allowed):  # tempting, were they allowed
            given["memory_GiB"][name_of(layout)], given["step_seconds"][name_of(layout)] = 10, best / 2
    return given


def observe_search(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, asked = case.inputs, []

    def look_up(table: str, layout: Layout) -> float:
        name = name_of(layout)
        if name not in given[table]:
            raise LookupError(f"{layout} is no layout of {given['gpus']} GPUs")
        return given[table][name]

    def seconds(layout: Layout) -> float:
        asked.append(name_of(layout))
        return look_up("step_seconds", layout)

    try:
        machines = (given[name] for name in ("gpus", "gpus_per_machine", "layers", "heads"))
        choice = function(*machines, lambda layout: look_up("memory_GiB", layout), seconds, given["capacity_GiB"])
    except ValueError as refusal:
        return {"layout": [], **refused(refusal, function), "asked": asked}
    return {"layout": plain(choice), "refusal": "", "asked": asked}


def fitting(case: Case) -> list[Layout]:
    """The legal layouts that fit, from the one to be returned to the slowest."""
    given = case.inputs
    able = [layout for layout in legal(given) if given["memory_GiB"][name_of(layout)] <= given["capacity_GiB"]]
    return sorted(able, key=lambda layout: (given["step_seconds"][name_of(layout)], layout[1], layout[2]))


def one_that_fits(case: Case, seen: Seen) -> Layout | None:
    """The layout found; None in a case in which nothing fits.

    Raises:
        Malformed: it is none that fits.
    """
    if not (able := fitting(case)):
        return None
    layout = tuple(items(seen, 0, "layout", int))
    if layout not in able:
        why = short(raised(seen)) if not layout else f"{layout} on {case.inputs['gpus']} GPUs"
        raise Malformed(Miss("a layout (data, tensors, stages) that is allowed and fits", why))
    return layout  # type: ignore[return-value]  # it is one of able


def is_fastest(case: Case, seen: Seen) -> Miss | None:
    if (layout := one_that_fits(case, seen)) is None:
        return None
    best, seconds = fitting(case)[0], case.inputs["step_seconds"]
    if seconds[name_of(layout)] > seconds[name_of(best)]:
        return Miss(f"{best} with {seconds[name_of(best)]} s", f"{layout} with {seconds[name_of(layout)]} s")
    return None


def is_simplest(case: Case, seen: Seen) -> Miss | None:
    if (miss := is_fastest(case, seen)) is not None:
        return miss
    layout, able = one_that_fits(case, seen), fitting(case)
    if layout is None or layout == able[0]:
        return None
    return Miss(f"{able[0]}, as fast and simpler", f"{layout}")


def refuses(case: Case, seen: Seen) -> Miss | None:
    if one_that_fits(case, seen) is not None:
        return None
    least = min(case.inputs["memory_GiB"][name_of(layout)] for layout in legal(case.inputs))
    return says_least(seen, least, "GiB", seen[0].get("layout"))


def asks_only_what_fits(case: Case, seen: Seen) -> Miss | None:
    one_that_fits(case, seen)
    right, asked = {name_of(layout) for layout in fitting(case)}, set(items(seen, 0, "asked", str))
    odd = [f"{name} asked" for name in sorted(asked - right)] + [f"{name} not asked" for name in sorted(right - asked)]
    return kit.unless(not odd, "the seconds of each layout that fits, and of no other", "".join(odd[:1]))


SEARCH = Task(
    **kit.about("plan.search"),
    draw=in_turn(search_case, 6),
    observe=observe_search,
    essential=("fits", "fastest"),
    properties={
        "fits": Property(2, kit.reads(one_that_fits)),
        "fastest": Property(2, is_fastest),
        "ties": Property(1, is_simplest),
        "refuses": Property(1, refuses),
        "asks little": Property(1, asks_only_what_fits),
    },
)
