"""Lesson 03: what Accelerate does for a script, done by hand."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Others, Recorder
from course_lib.grading.rules import Seen, array, items, made_by, near, result, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import each_world, entry, in_turn, numbers, whole

LESSON = "03_accelerate"


# --- accelerate.rows ---


def rows_case(rng: random.Random, place: int) -> dict:
    """In turn: several rounds, less than half of one, a single row, several rounds that are all full."""
    ranks, size = rng.randrange(1 if place % 4 == 0 else 2, 5), rng.randrange(2, 5)
    full = ranks * size
    totals = rng.randrange(2 * full, 5 * full), rng.randrange(1, max(2, -(-full // 2))), 1, rng.randrange(1, 4) * full
    return {"total": totals[place % 4], "batch_size": size, "ranks": ranks}


def observe_rows(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given = case.inputs
    return {
        "batches": [
            plain(function(given["total"], given["batch_size"], r, given["ranks"])) for r in range(given["ranks"])
        ]
    }


def dealt(case: Case, seen: Seen) -> list[list[list[int]]]:
    by_rank = items(seen, 0, "batches", list)
    if len(by_rank) != case.inputs["ranks"] or not all(
        isinstance(batch, list) and all(type(row) is int and 0 <= row < case.inputs["total"] for row in batch)
        for batches in by_rank
        for batch in batches
    ):
        raise Malformed(Miss("for each rank a list of batches of row numbers", short(by_rank)))
    return by_rank


def as_accelerate_deals(case: Case, seen: Seen) -> Miss | None:
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    given = case.inputs
    for rank, batches in enumerate(dealt(case, seen)):
        sampler = BatchSampler(range(given["total"]), given["batch_size"], drop_last=False)
        right = [list(map(int, batch)) for batch in BatchSamplerShard(sampler, given["ranks"], rank)]
        if batches != right:
            return Miss(f"{short(right)} for rank {rank} of {given['ranks']}", short(batches))
    return None


def equally_many(case: Case, seen: Seen) -> Miss | None:
    shapes = {tuple(len(batch) for batch in batches) for batches in dealt(case, seen)}
    full = all(size == case.inputs["batch_size"] for shape in shapes for size in shape)
    return None if len(shapes) == 1 and full else Miss("the same number of full batches on each rank", short(shapes))


def all_rows(case: Case, seen: Seen) -> Miss | None:
    dealt_rows = {row for batches in dealt(case, seen) for batch in batches for row in batch}
    missing = set(range(case.inputs["total"])) - dealt_rows
    return Miss("every row on some rank", f"rows {short(sorted(missing))} on none") if missing else None


ROWS = Task(
    name="accelerate.rows",
    lesson=LESSON,
    function="my_batches",
    title="Which rows are mine",
    difficulty=2,
    importance=4,
    minutes=20,
    draw=in_turn(rows_case, 6),
    observe=observe_rows,
    needs_ranks=False,
    essential=("as Accelerate",),
    properties={
        "every row": Property(1, all_rows),
        "full batches": Property(1, equally_many),
        "as Accelerate": Property(2, as_accelerate_deals),
    },
)


# --- accelerate.loss ---


def loss_case(rng: random.Random, world: int) -> dict:
    counts = [rng.randrange(3, 9) for _ in range(world)]
    if world % 2 == 0:
        counts[-1] = 0  # a rank without a single loss
    masks = [whole(rng, 0, 2, count) for count in counts]
    masks[0][0] = 1
    if world > 2:
        masks[1][:] = 0  # one with padding alone
    return {"losses": [numbers(rng, count) for count in counts], "masks": masks}


def observe_loss(function: Callable[..., Any], case: Case, rank: int) -> dict:
    losses, mask = (torch.from_numpy(case.inputs[key][rank].copy()) for key in ("losses", "masks"))
    with Recorder() as record:
        mean = function(losses, mask)
    return {"mean": plain(mean), "events": record.events}


def global_mean(case: Case) -> list[float]:
    total = sum(
        float((losses * mask).sum()) for losses, mask in zip(case.inputs["losses"], case.inputs["masks"], strict=True)
    )
    return [total / sum(int(mask.sum()) for mask in case.inputs["masks"])] * case.world_size


def few_bytes(limit: int) -> Callable[[Case, Seen], Miss | None]:
    """A rule: the collectives carry no more than so many bytes in all, and on several ranks some."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        for rank in range(case.world_size):
            made = made_by(seen, rank)
            carried = sum(int(event.split()[1]) for event in made)
            if carried > limit or (case.world_size > 1 and not carried):
                return Miss(f"collectives of at most {limit} bytes in all", short(", ".join(made) or "none"), rank)
        return None

    return rule


LOSS = Task(
    name="accelerate.loss",
    lesson=LESSON,
    function="mean_loss",
    title="The mean loss of uneven ranks",
    difficulty=2,
    importance=5,
    minutes=15,
    draw=each_world(loss_case),
    observe=observe_loss,
    own={"losses": entry, "masks": entry},
    essential=("mean",),
    properties={"mean": Property(3, result("mean", global_mean)), "few bytes": Property(1, few_bytes(32))},
)


# --- accelerate.main_first ---


def first_case(rng: random.Random, world: int) -> dict:
    return {"content": rng.randrange(1000)}


def observe_first(function: Callable[..., Any], case: Case, rank: int) -> dict:
    happened: list[float] = []

    def prepare() -> None:
        settle.wait()
        happened.append(time.monotonic())

    def read() -> int:
        settle.say()
        happened.append(-time.monotonic())
        return case.inputs["content"]

    with Others(case.world_size, rank) as settle:
        value = function(prepare, read)
    return {"value": plain(value), "happened": np.asarray(happened)}


def prepared_once(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        calls = int((array(seen, rank, "happened") > 0).sum())
        if calls != (rank == 0):
            return Miss(f"{'one call' if rank == 0 else 'no call'} of prepare", f"{calls}", rank)
    return None


def read_afterwards(case: Case, seen: Seen) -> Miss | None:
    ready = [stamp for rank in range(case.world_size) for stamp in array(seen, rank, "happened").flat if stamp > 0]
    for rank in range(case.world_size):
        read = [-stamp for stamp in array(seen, rank, "happened").flat if stamp < 0]
        if not read or not ready or min(read) < min(ready):
            return Miss("read after prepare has ended", "read before" if read else "no read", rank)
    return None


MAIN_FIRST = Task(
    name="accelerate.main_first",
    lesson=LESSON,
    function="main_first",
    title="One rank prepares, the others wait",
    difficulty=2,
    importance=3,
    minutes=15,
    draw=each_world(first_case),
    observe=observe_first,
    essential=("afterwards",),
    properties={
        "once": Property(1, prepared_once),
        "afterwards": Property(2, read_afterwards),
        "value": Property(1, lambda case, seen: near(seen, "value", [case.inputs["content"]] * case.world_size)),
    },
)

ALL = (ROWS, LOSS, MAIN_FIRST)
