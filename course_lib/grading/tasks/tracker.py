"""Lesson 11, to build: a tracker of all ranks that outlives its backend's outages and its own process."""

import random
from collections.abc import Callable
from typing import Any

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, made_by, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import each_world, entry

METRICS = ("train/loss", "train/norm", "eval/loss")


def tracker_case(rng: random.Random, world: int) -> dict:
    """A run that is killed and resumed some steps earlier, with an outage in each process."""
    killed = rng.randrange(6, 9)
    resumed = killed - rng.randrange(2, 4)
    last = killed + rng.randrange(4, 7)
    return {
        "name": f"run-{rng.randrange(1000)}",
        "killed": killed,
        "resumed": resumed,
        "last": last,
        "outages": [[0, 1], [killed - 1, killed + 1], [last - 2, last - 1]],
        "values": [[[rng.randrange(64) / 8 for _ in METRICS] for _ in range(last)] for _ in range(world)],
        "order": [rng.sample(range(len(METRICS)), len(METRICS)) for _ in range(world)],
    }


class Backend:
    """A tracking service that is not always there; ConnectionError where it is not."""

    def __init__(self) -> None:
        self.offline = False
        self.starts: list[list[str]] = []
        self.rows: dict[str, list[list[Any]]] = {}
        self.finished: list[str] = []

    def start(self, name: str, id: str) -> "KeptRun":
        """Open a run, or go on with the one that has this id."""
        self.reach()
        self.starts.append([str(name), str(id)])
        self.rows.setdefault(str(id), [])
        return KeptRun(self, str(id))

    def reach(self) -> None:
        """Raise where the service is not there."""
        if self.offline:
            raise ConnectionError("the tracking service cannot be reached")


class KeptRun:
    """A run that keeps its rows."""

    def __init__(self, backend: Backend, id: str):
        self.backend, self.id = backend, id

    def log(self, row: dict[str, float], step: int) -> None:
        """Keep a row."""
        self.backend.reach()
        self.backend.rows[self.id].append([plain(step), {str(name): float(value) for name, value in row.items()}])

    def finish(self) -> None:
        """Close the run."""
        self.backend.reach()
        self.backend.finished.append(self.id)


def observe_tracker(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, backend = case.inputs, Backend()
    store: dict[str, str] = {}
    with Recorder() as record:
        for steps in (range(given["killed"]), range(given["resumed"], given["last"])):
            backend.offline = any(first <= steps[0] <= end for first, end in given["outages"])
            tracker = function(backend, store, given["name"])
            for step in steps:
                backend.offline = any(first <= step <= end for first, end in given["outages"])
                record.note("log")
                tracker.log(step, {METRICS[i]: given["values"][rank][step][i] for i in given["order"][rank]})
        backend.offline = False
        tracker.finish()
    return kit.noted(
        record,
        starts=backend.starts,
        rows=list(backend.rows.values()),
        finished=backend.finished,
        store=len(store),
        texts=all(type(text) is str for text in store.values()),
    )


@kit.each_rank
def rows_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Each step once, in order, with the mean of the ranks."""
    values, world, runs = case.inputs["values"], case.world_size, items(seen, rank, "rows", list)
    if len(runs) != (rank == 0) or rank:
        return kit.unless(len(runs) == (rank == 0), f"{int(rank == 0)} runs", f"{len(runs)}")
    steps = [row[0] for row in runs[0] if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)]
    if steps != list(range(case.inputs["last"])) or len(runs[0]) != len(steps):
        return Miss(f"steps 0 to {case.inputs['last'] - 1}, each once, in order", short(steps))
    for step, (_, row) in enumerate(runs[0]):
        for i, name in enumerate(METRICS):
            right, actual = sum(of_rank[step][i] for of_rank in values) / world, row.get(name)
            if set(row) != set(METRICS) or type(actual) is not float or abs(actual - right) > 1e-6:
                is_number = type(actual) is float and right
                note = f"{actual / right:.4g} times the mean of {world} ranks" if is_number else ""
                return Miss(f"{name} {right:.5g} in step {step}", short(row), note=note)
    return None


@kit.each_rank
def one_run(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Opened by rank 0 alone, once in each process, under one id."""
    starts = items(seen, rank, "starts", list)
    if rank:
        return kit.unless(not starts, "no run", short(starts))
    names, ids = [start[:1] for start in starts], [start[1:] for start in starts]
    fits = names == [[case.inputs["name"]]] * 2 and len(ids[0]) == 1 and ids[0] == ids[1]
    return kit.unless(fits, "a run opened once in each of 2 processes, under one id", short(starts))


@kit.each_rank
def one_collective(case: Case, seen: Seen, rank: int) -> Miss | None:
    calls, most = case.inputs["killed"] + case.inputs["last"] - case.inputs["resumed"], 8 * len(METRICS)
    made = made_by(seen, rank)
    fits = (len(made) == calls and kit.largest(made) <= most) or (case.world_size == 1 and not made)
    said = f"a collective of {most} bytes at most in each of {calls} calls of log"
    return kit.unless(fits, said, kit.listed(made, "none"))


@kit.each_rank
def finishes(case: Case, seen: Seen, rank: int) -> Miss | None:
    finished = len(items(seen, rank, "finished", str))
    return kit.unless(finished == (rank == 0), f"{int(rank == 0)} runs finished", f"{finished}")


@kit.each_rank
def store_is(case: Case, seen: Seen, rank: int) -> Miss | None:
    kept, texts = seen[rank].get("store"), seen[rank].get("texts")
    fits = type(kept) is int and (kept > 0) == (rank == 0) and texts is True
    return kit.unless(fits, "texts in rank 0's store, and nothing in the others'", short(kept))


TRACKER = Task(
    **kit.about("tracking.tracker"),
    draw=each_world(tracker_case),
    observe=observe_tracker,
    own={"values": entry},
    essential=("rows",),
    properties={
        "rows": Property(4, rows_are),
        "one run": Property(2, one_run),
        "one collective": Property(2, one_collective),
        "finished": Property(1, finishes),
        "store": Property(1, store_is),
    },
)
