"""Lesson 04, to build: a metric that counts on each rank, and says the same on all of them at any time."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, made_by, near, short
from course_lib.grading.task import Case, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks.drawing import entry, numbers, whole

LESSON = "04_distributed_evaluation"
NO_LABEL = -100
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
    given: dict[str, Any] = {
        "predictions": [[] for _ in range(world)],
        "labels": [[] for _ in range(world)],
        "losses": [[] for _ in range(world)],
    }
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


def draw_metrics(rng: random.Random, worlds: Sequence[int] | None = None) -> list[Case]:
    """The public numbers of rows, or for each number of ranks some of each kind; and rows of which none has a label."""
    totals = (
        TOTALS
        if worlds is None
        else {
            world: (
                rng.choice((1, world - 1)),
                rng.randrange(2, 5) * world,
                rng.randrange(3, 6) * world + rng.randrange(1, world),
            )
            for world in worlds
        }
    )
    return [
        *(Case(world, metric_case(rng, world, total)) for world, mine in totals.items() for total in mine),
        Case(2, metric_case(rng, 2, 3, is_labelled=False)),
    ]


def key(name: str, call: int) -> str:
    """Name of a score in an observation."""
    return f"{name} of compute() number {call}"


def observe_metric(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, called = case.inputs, 0
    seen: dict[str, Any] = {}
    columns = [given[name][rank] for name in ("predictions", "labels", "losses")]

    def compute() -> None:
        nonlocal called
        record.note("compute")
        scores = metric.compute()
        record.note("computed")
        called += 1
        kinds = [type(scores[name]).__name__ for name in SCORES]
        confusion = scores["confusion"]
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
                metric.update(
                    *(torch.from_numpy(column[epoch][start : start + given["batch"]].copy()) for column in columns)
                )
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
    for name in ("predictions", "labels", "losses"):
        ranks = [given[name][rank][call == NEXT][:rows] for rank in range(world)]
        columns[name] = np.stack(ranks, axis=1).reshape(-1)[: given["total"]]
    counts = columns["labels"] != NO_LABEL
    predictions, labels, losses = (columns[name][counts] for name in ("predictions", "labels", "losses"))
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


def one_collective(case: Case, seen: Seen) -> Miss | None:
    """One in each call of `compute`, of the counts alone, and none elsewhere."""
    limit = 8 * (case.inputs["classes"] ** 2 + 4)
    for rank in range(case.world_size):
        made, happened = made_by(seen, rank), items(seen, rank, "events", str)
        inside, within = False, []
        for event in happened:
            inside = event == "compute" or (inside and event != "computed")
            within += [event] * (inside and event in made)
        if happened.count("compute") != 4 or len(within) != len(made):
            return Miss("collectives in compute() alone", short(", ".join(happened)), rank)
        most = max((int(event.split()[1]) for event in made), default=0)
        if not (len(made) == 4 or (case.world_size == 1 and not made)) or most > limit:
            return Miss(
                f"in each of 4 calls of compute() a collective of at most {limit} bytes",
                short(", ".join(made) or "none"),
                rank,
            )
    return None


def types_are(case: Case, seen: Seen) -> Miss | None:
    right = ["float", "float", "float", "torch.int64"]
    for rank in range(case.world_size):
        for call in (MIDDLE, END, AGAIN, NEXT):
            if (kinds := items(seen, rank, f"types {call}", str)) != right:
                return Miss(
                    f"accuracy, macro_f1, loss and confusion as {', '.join(right)}", short(", ".join(kinds)), rank
                )
    return None


METRIC = Task(
    name="evaluation.metric",
    lesson=LESSON,
    function="Metric",
    title="Build it: a metric of all ranks",
    difficulty=4,
    importance=5,
    minutes=45,
    draw=draw_metrics,
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

ALL = (METRIC,)
