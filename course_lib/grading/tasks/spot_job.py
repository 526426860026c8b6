"""Lesson 12, to build: a job's way there and back, its config as texts, its ranks, and what an interruption leaves."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from course_lib.grading import own_code
from course_lib.grading.rules import Seen, items, kind, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn

LONGEST = 2500
"""Characters of a hyperparameter's value, as SageMaker's API allows."""
PARTS = ("model", "optimizer")
MOST_OPERATIONS = 400


class Interrupted(BaseException):
    """The machine has been taken away; no `except Exception` catches it."""


class SyncedFolder:
    """Files that are copied to the bucket as they are written; of the one that is being written a beginning is left.

    Args:
        files: that the job before has left.
        cut_after: writes and deletions until the machine is taken away; None: never.
    """

    def __init__(self, files: dict[str, str], cut_after: int | None = None):
        self.files, self.operations, self._left = dict(files), 0, cut_after

    def write(self, path: str, text: str) -> None:
        """Write a whole file."""
        if self._is_cut():
            self.files[path] = text[: len(text) * (self.operations % 3) // 3]
            raise Interrupted
        self.files[path] = str(text)

    def read(self, path: str) -> str:
        """A file's text; KeyError where there is none."""
        return self.files[path]

    def list(self) -> list[str]:
        """The paths of all files, sorted."""
        return sorted(self.files)

    def delete(self, path: str) -> None:
        """Remove a file."""
        if self._is_cut():
            raise Interrupted
        del self.files[path]

    def _is_cut(self) -> bool:
        self.operations += 1
        if self.operations > MOST_OPERATIONS:
            raise ValueError(f"more than {MOST_OPERATIONS} operations")
        return self._left is not None and self.operations > self._left


def job_case(rng: random.Random, place: int) -> dict:
    """A config of all that JSON knows; in every third a value is too long, in another third no machine has a GPU."""
    config = {
        "model": rng.choice(("tiny-bert", "true", "7")),
        "learning_rate": rng.randrange(1, 99) / 1e6,
        "max_steps": rng.randrange(8, 999),
        "bf16": bool(place % 2),
        "text_column": None,
        "note": "",
        "warmup": float(rng.randrange(1, 5)),
        "version": "1e-3",
        "labels": ["0", 1, rng.choice(("ä", "é"))],
        "fsdp": {"reshard": not place % 2, "units": rng.randrange(9)},
    }
    hosts = [f"algo-{number}" for number in rng.sample(range(1, 13), rng.randrange(2, 5) if place else 1)]
    every = rng.randrange(2, 5)
    return {
        "config": config,
        "too_long": "x" * (LONGEST - 1) if place % 3 == 2 else None,
        "just_fits": "x" * (LONGEST - 2) if place % 3 == 1 else None,
        "hosts": hosts,
        "gpus": (0, 1, 8)[place % 3],
        "every": every,
        "last": 3 * every + rng.randrange(1, every),
    }


def train_one(step: int, state: dict[str, list[float]] | None, log: list[int], stop: int | None = None) -> dict:
    """A step of a training in numbers; its momentum is the optimizer's."""
    if step == stop:
        raise Interrupted
    log.append(step)
    model, momentum = (state[part] for part in PARTS) if state else ([1.0, -2.0], [0.0, 0.0])
    momentum = [0.75 * m + w / (step + 3) for m, w in zip(momentum, model, strict=True)]
    return {"model": [w - 0.3 * m for w, m in zip(model, momentum, strict=True)], "optimizer": momentum}


def ran(
    job: Any, case: Case, files: dict[str, str], cut: int | None = None, stop: int | None = None
) -> tuple[SyncedFolder, list[int], Any]:
    """A job until it has ended or was interrupted: what is left, the steps it did, and what `run` returned."""
    folder, state = SyncedFolder(files, cut), None
    log: list[int] = []
    with suppress(Interrupted):
        state = job.run(
            folder, lambda step, state: train_one(step, state, log, stop), case.inputs["last"], case.inputs["every"]
        )
    return folder, log, state


def observe_job(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, config = case.inputs, config_due(case)
    texts = function(dict(config)).hyperparameters()
    seen: dict[str, Any] = {
        "texts": plain(texts),
        "types": sorted({type(text).__name__ for text in texts.values()}),
        "refused": "",
    }
    back = function.inside(dict(texts)).config  # type: ignore[attr-defined]
    seen["config"] = repr(sorted(back.items()))
    if given["too_long"]:
        try:
            function({**config, "essay": given["too_long"]}).hyperparameters()
        except ValueError as refusal:
            seen["refused"] = own_code.told(refusal, own_code.file_of(function))
    container = {"SM_HOSTS": str(given["hosts"]).replace("'", '"'), "SM_NUM_GPUS": str(given["gpus"])}
    seen["environment"] = [
        plain(function(config).environment({**container, "SM_CURRENT_HOST": host})) for host in given["hosts"]
    ]
    whole, steps, state = ran(function(config), case, {})
    _, again, same = ran(function(config), case, whole.files)
    seen |= {"steps": steps, "state": plain(state), "again": again, "same": plain(same), "resumed": []}
    seen["left"] = len({path.split("/")[0] for path in whole.list()})
    stops = [(cut, None) for cut in range(min(whole.operations, MOST_OPERATIONS))]
    for cut, stop in [*stops, *((None, step) for step in range(given["last"]))]:
        broken, before, _ = ran(function(config), case, {}, cut, stop)
        _, after, state = ran(function(config), case, broken.files)
        seen["resumed"].append([len(before), after[0] if after else given["last"], plain(state), stop is not None])
    try:
        ran(function({**config, "max_steps": config["max_steps"] + 1}), case, whole.files)
        seen["other"] = ""
    except ValueError as refusal:
        seen["other"] = str(refusal)[:200] or "refused"
    return seen


def config_due(case: Case) -> dict[str, Any]:
    long = case.inputs["just_fits"]
    return {**case.inputs["config"], **({"long": long} if long else {})}


def comes_back(case: Case, seen: Seen) -> Miss | None:
    right = repr(sorted(config_due(case).items()))
    back = seen[0].get("config")
    if not isinstance(back, str):
        raise Malformed(Miss("a config", kind(back)))
    at = next((i for i, (a, b) in enumerate(zip(back, right, strict=False)) if a != b), min(len(back), len(right)))
    due, shown = (f"`{short(text[max(0, at - 20) : at + 30])}`" for text in (right, back))
    return kit.unless(back == right, f"in the job the config as it was, {due}", shown)


def are_texts(case: Case, seen: Seen) -> Miss | None:
    texts = seen[0].get("texts")
    if not isinstance(texts, dict) or set(texts) != set(config_due(case)) or seen[0].get("types") != ["str"]:
        return Miss(f"a text for each of {len(config_due(case))} names", short(seen[0].get("types")))
    refused = seen[0].get("refused")
    is_named = not case.inputs["too_long"] or "essay" in str(refused)
    said = f"a ValueError that names `essay`, of more than {LONGEST} characters"
    return kit.unless(is_named, said, short(refused if isinstance(refused, str) and refused else "none"))


def ranks_are(case: Case, seen: Seen) -> Miss | None:
    hosts, per_host = case.inputs["hosts"], max(1, case.inputs["gpus"])
    made = items(seen, 0, "environment", dict)
    if len(made) != len(hosts):
        return Miss(f"the environment of {len(hosts)} machines", f"of {len(made)}")
    for place, (host, mine) in enumerate(zip(hosts, made, strict=True)):
        right = {
            "MASTER_ADDR": hosts[0],
            "NNODES": str(len(hosts)),
            "NODE_RANK": str(place),
            "NPROC_PER_NODE": str(per_host),
            "WORLD_SIZE": str(per_host * len(hosts)),
        }
        for name, value in right.items():
            if mine.get(name) != value or type(mine.get(name)) is not str:
                return Miss(f"{name} {value!r} on {host} of {hosts}", repr(mine.get(name))[:60])
    return None


def state_due(case: Case) -> dict[str, list[float]]:
    state: dict[str, list[float]] | None = None
    for step in range(case.inputs["last"]):
        state = train_one(step, state, [])
    assert state is not None
    return state


def trains(case: Case, seen: Seen) -> Miss | None:
    steps = items(seen, 0, "steps", int)
    if steps != list(range(case.inputs["last"])) or seen[0].get("state") != state_due(case):
        return Miss(f"steps 0 to {case.inputs['last'] - 1}, and their state", short(steps))
    if seen[0].get("again") != [] or seen[0].get("same") != state_due(case):
        return Miss("no step, and the last state, of a job that had ended", short(seen[0].get("again")))
    return None


def resumes(case: Case, seen: Seen) -> Miss | None:
    """From the last checkpoint that was whole, to the state of a job that was never interrupted."""
    every, last, right = case.inputs["every"], case.inputs["last"], state_due(case)
    resumed = items(seen, 0, "resumed", list)
    saves = [0, *(step for step in range(1, last + 1) if step % every == 0 or step == last)]
    for one in resumed:
        if len(one) != 4 or type(one[0]) is not int or type(one[1]) is not int:
            raise Malformed(Miss("interruptions, and what came after each", short(one)))
        done, first, state, in_a_step = one
        older = [save for save in saves if save <= done]
        allowed = older[-1:] if in_a_step or not older else older[-2:]
        where = f"interrupted {'in' if in_a_step else 'while saving after'} step {done - (not in_a_step)}"
        if first not in allowed:
            return Miss(f"go on with step {' or '.join(map(str, allowed))}, {where}", f"step {first}")
        if state != right:
            return Miss(f"the state of a job that was never interrupted, {where}", short(state))
    return kit.unless(len(resumed) > last, "interruptions", f"{len(resumed)}")


def refuses_another(case: Case, seen: Seen) -> Miss | None:
    fits = trains(case, seen) is None and seen[0].get("other")
    return kit.unless(fits, "a ValueError: the folder's checkpoints are of another config", "no refusal")


def keeps_few(case: Case, seen: Seen) -> Miss | None:
    left = seen[0].get("left")
    fits = type(left) is int and 0 < left <= 2 and trains(case, seen) is None
    return kit.unless(fits, "at most 2 checkpoints in the folder at the end", short(left))


SPOT_JOB = Task(
    **kit.about("cloud.job"),
    draw=in_turn(job_case, 4),
    observe=observe_job,
    essential=("config", "resumes"),
    properties={
        "config": Property(2, comes_back),
        "texts": Property(1, are_texts),
        "environment": Property(2, ranks_are),
        "trains": Property(1, trains),
        "resumes": Property(4, resumes),
        "another's": Property(1, refuses_another),
        "keeps few": Property(1, keeps_few),
    },
)
