"""Lesson 04: metrics of all rows, each counted once."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, dtype_of, made_by, near, of_dtype, result, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, each_world, entry, every_nth, numbers, whole
from course_lib.grading.tasks.prepared import few_bytes

LESSON = "04_distributed_evaluation"


# --- evaluation.gather ---


def gather_case(rng: random.Random, world: int, total: int) -> dict:
    """An even number of rows: predictions, whole numbers that float32 does not hold."""
    shape = total, rng.randrange(1, 4)
    return {"rows": numbers(rng, *shape) if total % 2 else whole(rng, 2**40, 2**50, *shape)}


TOTALS = {1: (4,), 2: (1, 7), 3: (2, 6, 10)}
"""By number of ranks: fewer rows than ranks, as many on each, and some left over."""


def draw_gather(rng: random.Random, worlds: Sequence[int] | None = None) -> list[Case]:
    """The public numbers of rows, or for each number of ranks some of each kind."""
    totals = (
        TOTALS
        if worlds is None
        else {
            world: (
                rng.choice((1, world - 1)),
                rng.randrange(2, 5) * world,
                rng.randrange(2, 5) * world + rng.randrange(1, world),
            )
            for world in worlds
        }
    )
    return [Case(world, gather_case(rng, world, total)) for world, own in totals.items() for total in own]


def observe_gather(function: Callable[..., Any], case: Case, rank: int) -> dict:
    rows = case.inputs["rows"]
    mine = torch.from_numpy(rows[rank :: case.world_size].copy())
    with Recorder() as record:
        gathered = function(mine, len(rows))
    return {"rows": plain(gathered), "dtype of rows": dtype_of(gathered), "events": record.events}


def rows_are(case: Case, seen: Seen) -> Miss | None:
    right = case.inputs["rows"]
    return near(seen, "rows", [right] * case.world_size, 1e-12) or of_dtype(seen, "rows", str(right.dtype))


def no_pickle(case: Case, seen: Seen) -> Miss | None:
    """At most the padded rows travel, as tensors: pickled objects are larger."""
    rows = case.inputs["rows"]
    limit = -(-len(rows) // case.world_size) * case.world_size * rows[0].nbytes + 8 * case.world_size
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        if sum(int(event.split()[1]) for event in made) > limit or not made:
            return Miss(f"at most {limit} bytes", short(", ".join(made) or "nothing"), rank)
    return None


GATHER = Task(
    name="evaluation.gather",
    lesson=LESSON,
    function="gather_rows",
    title="Gather with an uneven last batch",
    difficulty=3,
    importance=5,
    minutes=25,
    draw=draw_gather,
    observe=observe_gather,
    own={"rows": every_nth},
    essential=("rows",),
    properties={"rows": Property(4, rows_are), "bytes": Property(1, no_pickle)},
)


# --- evaluation.macro_f1 ---


def f1_case(rng: random.Random, world: int, most: int = 20) -> dict:
    """Rows of all classes but one; a rank beyond the first two has no row at all."""
    classes = rng.randrange(3, 6)
    absent = rng.randrange(classes)
    present = np.array([label for label in range(classes) if label != absent])
    counts = [rng.randrange(4, most) if rank < 2 and most else 0 for rank in range(world)]
    labels, predictions = ([present[whole(rng, 0, len(present), count)] for count in counts] for _ in range(2))
    return {"classes": classes, "labels": labels, "predictions": predictions}


def draw_f1(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks, and two ranks without a row."""
    return [*each_world(f1_case)(rng, worlds), Case(2, f1_case(rng, 2, most=0))]


def observe_f1(function: Callable[..., Any], case: Case, rank: int) -> dict:
    predictions, labels = (torch.from_numpy(case.inputs[key][rank].copy()) for key in ("predictions", "labels"))
    with Recorder() as record:
        score = function(predictions, labels, case.inputs["classes"])
    return {"score": plain(score), "events": record.events}


def f1(case: Case) -> list[float]:
    predictions, labels = (np.concatenate(case.inputs[key]) for key in ("predictions", "labels"))
    scores = []
    for label in range(case.inputs["classes"]):
        hits = int(((predictions == label) & (labels == label)).sum())
        among = int((predictions == label).sum() + (labels == label).sum())
        scores.append(2 * hits / among if among else 0.0)
    return [sum(scores) / len(scores)] * case.world_size


MACRO_F1 = Task(
    name="evaluation.macro_f1",
    lesson=LESSON,
    function="macro_f1",
    title="Macro-F1 of all ranks",
    difficulty=2,
    importance=4,
    minutes=20,
    draw=draw_f1,
    observe=observe_f1,
    own={"labels": entry, "predictions": entry},
    essential=("score",),
    properties={"score": Property(3, result("score", f1)), "few bytes": Property(1, few_bytes(8 * 16))},
)


# --- evaluation.perplexity ---


def perplexity_case(rng: random.Random, world: int) -> dict:
    """On an even number of ranks the last one has no token."""
    here = [rank == 0 or world % 2 == 1 or rank < world - 1 for rank in range(world)]
    return {
        "sums": [rng.randrange(10, 200) / 8 * has for has in here],
        "tokens": [rng.randrange(8, 60) * has for has in here],
    }


def observe_perplexity(function: Callable[..., Any], case: Case, rank: int) -> dict:
    with Recorder() as record:
        value = function(case.inputs["sums"][rank], case.inputs["tokens"][rank])
    return {"perplexity": plain(value), "events": record.events}


def perplexity(case: Case) -> list[float]:
    return [math.exp(sum(case.inputs["sums"]) / sum(case.inputs["tokens"]))] * case.world_size


PERPLEXITY = Task(
    name="evaluation.perplexity",
    lesson=LESSON,
    function="perplexity",
    title="The perplexity of all tokens",
    difficulty=1,
    importance=4,
    minutes=10,
    draw=each_world(perplexity_case),
    observe=observe_perplexity,
    own={"sums": entry, "tokens": entry},
    essential=("perplexity",),
    properties={"perplexity": Property(3, result("perplexity", perplexity)), "few bytes": Property(1, few_bytes(32))},
)

ALL = (GATHER, MACRO_F1, PERPLEXITY)
