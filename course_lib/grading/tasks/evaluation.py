"""Lesson 04: metrics of all rows, each counted once."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, dtype_of, made_by, near, of_dtype
from course_lib.grading.task import Case, Miss, Property, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_total, each_world, entry, every_nth, numbers, whole

# --- evaluation.gather ---


def gather_case(rng: random.Random, world: int, total: int) -> dict:
    """An even number of rows: predictions, whole numbers that float32 does not hold."""
    shape = total, rng.randrange(1, 4)
    return {"rows": numbers(rng, *shape) if total % 2 else whole(rng, 2**40, 2**50, *shape)}


TOTALS = {1: (4,), 2: (1, 7), 3: (2, 6, 10)}
"""By number of ranks: fewer rows than ranks, as many on each, and some left over."""


def observe_gather(function: Callable[..., Any], case: Case, rank: int) -> dict:
    rows = case.inputs["rows"]
    mine = kit.tensor(rows[rank :: case.world_size])
    with Recorder() as record:
        gathered = function(mine, len(rows))
    return kit.noted(record, rows=gathered) | {"dtype of rows": dtype_of(gathered)}


def rows_are(case: Case, seen: Seen) -> Miss | None:
    right = case.inputs["rows"]
    return near(seen, "rows", [right] * case.world_size, 1e-12) or of_dtype(seen, "rows", str(right.dtype))


@kit.each_rank
def no_pickle(case: Case, seen: Seen, rank: int) -> Miss | None:
    """At most the padded rows travel, as tensors: pickled objects are larger."""
    rows, made = case.inputs["rows"], made_by(seen, rank)
    limit = -(-len(rows) // case.world_size) * case.world_size * rows[0].nbytes + 8 * case.world_size
    return kit.unless(made and kit.carried(made) <= limit, f"at most {limit} bytes", kit.listed(made, "nothing"))


GATHER = Task(
    **kit.about("evaluation.gather"),
    draw=each_total(gather_case, TOTALS, 2),
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


def observe_f1(function: Callable[..., Any], case: Case, rank: int) -> dict:
    predictions, labels = (kit.tensor(case.inputs[key][rank]) for key in ("predictions", "labels"))
    with Recorder() as record:
        score = function(predictions, labels, case.inputs["classes"])
    return kit.noted(record, score=score)


def f1(case: Case) -> float:
    predictions, labels = (np.concatenate(case.inputs[key]) for key in ("predictions", "labels"))
    scores = []
    for label in range(case.inputs["classes"]):
        hits = int(((predictions == label) & (labels == label)).sum())
        among = int((predictions == label).sum() + (labels == label).sum())
        scores.append(2 * hits / among if among else 0.0)
    return sum(scores) / len(scores)


MACRO_F1 = Task(
    **kit.about("evaluation.macro_f1"),
    draw=each_world(f1_case, (2, 0)),  # two ranks without a row
    observe=observe_f1,
    own={"labels": entry, "predictions": entry},
    essential=("score",),
    properties={
        "score": Property(3, kit.equals("score", f1, on_all=True)),
        "few bytes": Property(1, kit.few_bytes(8 * 16)),
    },
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
    return kit.noted(record, perplexity=value)


def perplexity(case: Case) -> float:
    return math.exp(sum(case.inputs["sums"]) / sum(case.inputs["tokens"]))


PERPLEXITY = Task(
    **kit.about("evaluation.perplexity"),
    draw=each_world(perplexity_case),
    observe=observe_perplexity,
    own={"sums": entry, "tokens": entry},
    essential=("perplexity",),
    properties={
        "perplexity": Property(3, kit.equals("perplexity", perplexity, on_all=True)),
        "few bytes": Property(1, kit.few_bytes(32)),
    },
)
