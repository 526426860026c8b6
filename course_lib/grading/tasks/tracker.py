"""Lesson 11, to build: a tracker of all ranks that outlives its backend's outages and its own process."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, made_by, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry
from course_lib.grading.tasks.tracking import LESSON

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


def draw_trackers(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    return [Case(world, tracker_case(rng, world)) for world in worlds]


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
    return {
        "starts": backend.starts,
        "rows": list(backend.rows.values()),
        "finished": backend.finished,
        "store": len(store),
        "texts": all(type(text) is str for text in store.values()),
        "events": record.events,
    }


def rows_are(case: Case, seen: Seen) -> Miss | None:
    """Each step once, in order, with the mean of the ranks."""
    values, world = case.inputs["values"], case.world_size
    for rank in range(world):
        runs = items(seen, rank, "rows", list)
        if len(runs) != (rank == 0):
            return Miss(f"{int(rank == 0)} runs", f"{len(runs)}", rank)
        if rank:
            continue
        steps = [row[0] for row in runs[0] if isinstance(row, list) and len(row) == 2 and isinstance(row[1], dict)]
        if steps != list(range(case.inputs["last"])) or len(runs[0]) != len(steps):
            return Miss(f"steps 0 to {case.inputs['last'] - 1}, each once, in order", short(steps), 0)
        for step, (_, row) in enumerate(runs[0]):
            for i, name in enumerate(METRICS):
                right = sum(of_rank[step][i] for of_rank in values) / world
                actual = row.get(name)
                if set(row) != set(METRICS) or type(actual) is not float or abs(actual - right) > 1e-6:
                    is_number = type(actual) is float and right
                    note = f"{actual / right:.4g} times the mean of {world} ranks" if is_number else ""
                    return Miss(f"{name} {right:.5g} in step {step}", short(row), 0, note)
    return None


def one_run(case: Case, seen: Seen) -> Miss | None:
    """Opened by rank 0 alone, once in each process, under one id."""
    for rank in range(case.world_size):
        starts = items(seen, rank, "starts", list)
        names, ids = [start[:1] for start in starts], [start[1:] for start in starts]
        fits = not starts
        if rank == 0:
            fits = names == [[case.inputs["name"]]] * 2 and len(ids[0]) == 1 and ids[0] == ids[1]
        if not fits:
            return Miss(
                "a run opened once in each of 2 processes, under one id" if rank == 0 else "no run", short(starts), rank
            )
    return None


def one_collective(case: Case, seen: Seen) -> Miss | None:
    calls = case.inputs["killed"] + case.inputs["last"] - case.inputs["resumed"]
    for rank in range(case.world_size):
        made = made_by(seen, rank)
        fits = len(made) == calls and all(int(event.split()[1]) <= 8 * len(METRICS) for event in made)
        if not fits and not (case.world_size == 1 and not made):
            return Miss(
                f"a collective of {8 * len(METRICS)} bytes at most in each of {calls} calls of log",
                short(", ".join(made) or "none"),
                rank,
            )
    return None


def finishes(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        if (finished := len(items(seen, rank, "finished", str))) != (rank == 0):
            return Miss(f"{int(rank == 0)} runs finished", f"{finished}", rank)
    return None


def store_is(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        kept, texts = seen[rank].get("store"), seen[rank].get("texts")
        if type(kept) is not int or (kept > 0) != (rank == 0) or texts is not True:
            return Miss("texts in rank 0's store, and nothing in the others'", short(kept), rank)
    return None


TRACKER = Task(
    name="tracking.tracker",
    lesson=LESSON,
    function="Tracker",
    title="Build it: a tracker that loses nothing",
    difficulty=4,
    importance=4,
    minutes=45,
    draw=draw_trackers,
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

ALL = (TRACKER,)
