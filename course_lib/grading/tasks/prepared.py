"""Lesson 03: what Accelerate does for a script, done by hand."""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from course_lib.grading.recorder import Others, Recorder
from course_lib.grading.rules import Seen, array, items, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry, in_turn, numbers, whole

# --- accelerate.rows ---


def rows_case(rng: random.Random, place: int) -> dict:
    """In turn: several rounds, less than half of one, a single row, several rounds that are all full."""
    ranks, size = rng.randrange(1 if place % 4 == 0 else 2, 5), rng.randrange(2, 5)
    full = ranks * size
    totals = rng.randrange(2 * full, 5 * full), rng.randrange(1, max(2, -(-full // 2))), 1, rng.randrange(1, 4) * full
    return {"total": totals[place % 4], "batch_size": size, "ranks": ranks}


def observe_rows(function: Callable[..., Any], case: Case, rank: int) -> dict:
    total, size, ranks = (case.inputs[name] for name in ("total", "batch_size", "ranks"))
    return {"batches": [plain(function(total, size, r, ranks)) for r in range(ranks)]}


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
    return kit.unless(len(shapes) == 1 and full, "the same number of full batches on each rank", short(shapes))


def all_rows(case: Case, seen: Seen) -> Miss | None:
    dealt_rows = {row for batches in dealt(case, seen) for batch in batches for row in batch}
    missing = set(range(case.inputs["total"])) - dealt_rows
    return kit.unless(not missing, "every row on some rank", f"rows {short(sorted(missing))} on none")


ROWS = Task(
    **kit.about("accelerate.rows"),
    draw=in_turn(rows_case, 6),
    observe=observe_rows,
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
    losses, mask = (kit.tensor(case.inputs[key][rank]) for key in ("losses", "masks"))
    with Recorder() as record:
        mean = function(losses, mask)
    return kit.noted(record, mean=mean)


def global_mean(case: Case) -> float:
    losses, masks = (np.concatenate(case.inputs[key]) for key in ("losses", "masks"))
    return float((losses * masks).sum() / masks.sum())


LOSS = Task(
    **kit.about("accelerate.loss"),
    draw=each_world(loss_case),
    observe=observe_loss,
    own={"losses": entry, "masks": entry},
    essential=("mean",),
    properties={
        "mean": Property(3, kit.equals("mean", global_mean, on_all=True)),
        "few bytes": Property(1, kit.few_bytes(32)),
    },
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


@kit.each_rank
def prepared_once(case: Case, seen: Seen, rank: int) -> Miss | None:
    calls = int((array(seen, rank, "happened") > 0).sum())
    return kit.unless(calls == (rank == 0), f"{'one call' if rank == 0 else 'no call'} of prepare", f"{calls}")


@kit.each_rank
def read_afterwards(case: Case, seen: Seen, rank: int) -> Miss | None:
    ready = [stamp for other in range(case.world_size) for stamp in array(seen, other, "happened").flat if stamp > 0]
    read = [-stamp for stamp in array(seen, rank, "happened").flat if stamp < 0]
    fits = read and ready and min(read) >= min(ready)
    return kit.unless(fits, "read after prepare has ended", "read before" if read else "no read")


MAIN_FIRST = Task(
    **kit.about("accelerate.main_first"),
    draw=each_world(first_case),
    observe=observe_first,
    essential=("afterwards",),
    properties={
        "once": Property(1, prepared_once),
        "afterwards": Property(2, read_afterwards),
        "value": Property(1, kit.equals("value", lambda case: case.inputs["content"], on_all=True)),
    },
)
