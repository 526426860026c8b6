"""Lesson 04, to build: a metric that counts on each rank, and says the same on all of them at any time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, made_by, near
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_total, entry, numbers, whole

NO_LABEL = -100
COLUMNS = ("predictions", "labels", "losses")
SCORES = ("accuracy", "macro_f1", "loss")
MIDDLE, END, AGAIN, NEXT = range(1, 5)
"""Calls of `compute`: amid the first epoch, twice at its end, and at the end of the second one."""
TOTALS = {1: (5,), 2: (1, 9), 3: (2, 6, 13)}
"""By number of ranks: fewer rows than ranks, as many on each, and some left over."""


def metric_case(rng: random.Random, world: int, total: int, is_labelled: bool = True) -> dict:
    """Two epochs of ``total`` rows as a `DistributedSampler` deals them, the first ones repeated to fill it up.

    Unless ``is_labelled``, no row of the first epoch has a label.
    """
    classes = rng.randrange(3, 6)
    places = [[(rank + world * i) % total for i in range(-(-total // world))] for rank in range(world)]
    given: dict[str, Any] = {name: [[] for _ in range(world)] for name in COLUMNS}
    for epoch in range(2):
        absent = rng.randrange(classes)
        present = np.array([label for label in range(classes) if label != absent])
        drawn = {name: present[whole(rng, 0, len(present), total)] for name in ("predictions", "labels")}
        drawn["losses"] = np.abs(numbers(rng, total))
        if total > 4:
            drawn["labels"][rng.randrange(1, total)] = NO_LABEL
        if epoch == 0 and not is_labelled:
            drawn["labels"][:] = NO_LABEL
        for name, rows in drawn.items():
            for rank in range(world):
                given[name][rank].append(rows[places[rank]])
    return {"classes": classes, "total": total, "batch": rng.randrange(2, 4), **given}


def key(name: str, call: int) -> str:
    """Name of a score in an observation."""
    return f"{name} of compute() number {call}"


def observe_metric(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, called = case.inputs, 0
    seen: dict[str, Any] = {}
    columns = [given[name][rank] for name in COLUMNS]

    def compute() -> None:
        nonlocal called
        record.note("compute")
        scores = metric.compute()
        record.note("computed")
        called += 1
        kinds, confusion = [type(scores[name]).__name__ for name in SCORES], scores["confusion"]
        seen.update({key(name, called): plain(scores[name]) for name in (*SCORES, "confusion")})
        seen[f"types {called}"] = [*kinds, str(getattr(confusion, "dtype", type(confusion).__name__))]

    with Recorder() as record:
        metric = function(given["classes"], given["total"])
        for epoch in range(2):
            if epoch:
                metric.reset()
            length = len(columns[0][epoch])
            for number, start in enumerate(range(0, length, given["batch"])):
                if epoch == 0 and number == 1:
                    compute()
                metric.update(*(kit.tensor(column[epoch][start : start + given["batch"]]) for column in columns))
            if epoch == 0 and length <= given["batch"]:
                compute()
            compute()
            if epoch == 0:
                compute()
    return {**seen, "events": record.events}


def counted(case: Case, call: int) -> dict[str, Any]:
    """The scores that are due in a call."""
    given, world = case.inputs, case.world_size
    rows = min(given["batch"], len(given["labels"][0][0])) if call == MIDDLE else None
    columns = {}
    for name in COLUMNS:
        ranks = [given[name][rank][call == NEXT][:rows] for rank in range(world)]
        columns[name] = np.stack(ranks, axis=1).reshape(-1)[: given["total"]]
    counts = columns["labels"] != NO_LABEL
    predictions, labels, losses = (columns[name][counts] for name in COLUMNS)
    confusion = np.zeros((given["classes"], given["classes"]))
    np.add.at(confusion, (labels, predictions), 1)
    hits, named = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
    return {
        "confusion": confusion,
        "accuracy": hits.sum() / max(len(labels), 1),
        "macro_f1": float(np.mean(2 * hits / np.maximum(named, 1))),
        "loss": float(losses.sum()) / max(len(labels), 1),
    }


def scores_are(names: Sequence[str], calls: Sequence[int]) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        for call in calls:
            right = counted(case, call)
            for name in names:
                if (miss := near(seen, key(name, call), [right[name]] * case.world_size)) is not None:
                    if name == "confusion" and "a sum over them" in miss.note:
                        miss = replace(miss, note="is each row counted once per rank, or added up twice?")
                    return miss
        return None

    return rule


@kit.each_rank
def one_collective(case: Case, seen: Seen, rank: int) -> Miss | None:
    """One in each call of `compute`, of the counts alone, and none elsewhere."""
    limit = 8 * (case.inputs["classes"] ** 2 + 4)
    made, happened = made_by(seen, rank), items(seen, rank, "events", str)
    calls = kit.by_step(seen, rank, "compute")
    inside = [event for call in calls for event in call[: call.index("computed") if "computed" in call else None]]
    if len(calls) != 4 or sum(event in made for event in inside) != len(made):
        return Miss("collectives in compute() alone", kit.listed(happened, ""))
    fits = len(made) == 4 or (case.world_size == 1 and not made)
    said = f"in each of 4 calls of compute() a collective of at most {limit} bytes"
    return kit.unless(fits and kit.largest(made) <= limit, said, kit.listed(made, "none"))


@kit.each_rank
def types_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    right = ["float", "float", "float", "torch.int64"]
    for call in (MIDDLE, END, AGAIN, NEXT):
        if (kinds := items(seen, rank, f"types {call}", str)) != right:
            return Miss(f"accuracy, macro_f1, loss and confusion as {', '.join(right)}", kit.listed(kinds, ""))
    return None


METRIC = Task(
    **kit.about("evaluation.metric"),
    draw=each_total(metric_case, TOTALS, 3, (2, 3, False)),  # of the last no row has a label
    observe=observe_metric,
    own={"predictions": entry, "labels": entry, "losses": entry},
    essential=("counts", "scores"),
    properties={
        "counts": Property(3, scores_are(("confusion",), (END,))),
        "scores": Property(3, scores_are(SCORES, (END,))),
        "goes on": Property(2, scores_are(("confusion", *SCORES), (MIDDLE, AGAIN))),
        "next epoch": Property(1, scores_are(("confusion", *SCORES), (NEXT,))),
        "one collective": Property(2, one_collective),
        "types": Property(1, types_are),
    },
)
