"""Lesson 11: which runs a rank keeps, what must not be kept, and the steps of a run that was resumed."""

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, items, kind, made_by, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import entry, in_turn

# --- tracking.groups ---


def groups_case(rng: random.Random, world: int, every_rank: bool) -> dict:
    return {
        "name": f"run-{rng.randrange(1000)}",
        "every_rank": every_rank,
        "every": rng.randrange(2, 4),
        "losses": [[rng.randrange(64) / 8 for _ in range(8)] for _ in range(world)],
    }


KINDS = ((1, False), (2, True), (3, False))
"""World sizes, with a run of each rank or without."""


def groups_cases(rng: random.Random, kinds: Sequence[tuple[int, bool]] = KINDS) -> list[Case]:
    return [Case(world, groups_case(rng, world, every_rank)) for world, every_rank in kinds]


class Kept:
    """A run that keeps what it is given, for the grader."""

    def __init__(self, name: str, group: str | None):
        self.name, self.group = name, group
        self.rows: list[list[float]] = []
        self.finished = 0

    def log(self, row: dict[str, float], step: int) -> None:
        """Keep a row of a step."""
        if set(row) != {"train/loss"}:
            raise ValueError(f"a row is {{'train/loss': number}}, not {short(row)}")
        self.rows.append([plain(step), float(row["train/loss"])])

    def finish(self) -> None:
        """Close the run."""
        self.finished += 1


def observe_groups(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, opened = case.inputs, []

    def start(name: str, group: str | None = None) -> Kept:
        opened.append(Kept(name, group))
        return opened[-1]

    with Recorder() as record:
        function(start, given["name"], given["losses"][rank], given["every"], given["every_rank"])
    return kit.noted(
        record,
        runs=[[run.name, run.group] for run in opened],
        rows=[run.rows for run in opened],
        finished=[run.finished for run in opened],
    )


def runs_due(case: Case, rank: int) -> list[list[str | None]]:
    """Name and group of each run that a rank has."""
    name = case.inputs["name"]
    if case.inputs["every_rank"]:
        return [[f"{name}-rank{rank}", name]]
    return [[name, None]] if rank == 0 else []


def rows_due(case: Case, rank: int) -> list[list[float]]:
    """Step and loss of each row of a rank's run."""
    losses = case.inputs["losses"]
    means = [sum(column) / len(column) for column in zip(*losses, strict=True)]
    kept = losses[rank] if case.inputs["every_rank"] else means
    return [[step, kept[step]] for step in range(0, len(kept), case.inputs["every"])]


@kit.each_rank
def runs_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    runs, right = items(seen, rank, "runs", list), runs_due(case, rank)
    return kit.unless(runs == right, f"runs [name, group] {right}", short(runs))


def is_row(row: Any, due: list[float]) -> bool:
    is_pair = isinstance(row, list) and len(row) == 2 and all(type(one) in (int, float) for one in row)
    return is_pair and row[0] == due[0] and abs(row[1] - due[1]) < 1e-5


@kit.each_rank
def rows_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    rows, right = items(seen, rank, "rows", list), [rows_due(case, rank) for _ in runs_due(case, rank)]
    if len(rows) != len(right):
        return Miss(f"rows of {len(right)} runs", f"of {len(rows)}")
    for mine, due in zip(rows, right, strict=True):
        if len(mine) != len(due) or not all(map(is_row, mine, due)):
            return Miss(f"[step, loss] {short(due)}", short(mine))
    return None


@kit.each_rank
def each_is_finished(case: Case, seen: Seen, rank: int) -> Miss | None:
    right, finished = [1] * len(runs_due(case, rank)), items(seen, rank, "finished", int)
    return kit.unless(finished == right, f"each of {len(right)} runs finished once", short(finished))


@kit.each_rank
def as_few_as_needed(case: Case, seen: Seen, rank: int) -> Miss | None:
    """A collective of one number for each row of a mean, and none where each rank keeps its own."""
    given, made = case.inputs, made_by(seen, rank)
    due = 0 if given["every_rank"] else len(range(0, len(given["losses"][0]), given["every"]))
    fits = len(made) == due or (case.world_size == 1 and not made)
    said = f"{due} collectives of a number each"
    return kit.unless(fits and kit.largest(made) <= 8 * case.world_size, said, kit.listed(made, "none"))


GROUPS = Task(
    **kit.about("tracking.groups"),
    draw=groups_cases,
    observe=observe_groups,
    own={"losses": entry},
    essential=("runs", "rows"),
    properties={
        "runs": Property(2, runs_are),
        "rows": Property(2, rows_are),
        "finished": Property(1, each_is_finished),
        "collectives": Property(1, as_few_as_needed),
    },
)


# --- tracking.redact ---

SECRET_NAMES = ("hf_token", "WANDB_API_KEY", "password", "aws_secret", "AUTH_TOKEN", "apikey")
HARMLESS = ("tokenizer", "pad_token_id", "max_tokens", "keep_best", "monkey", "secretary", "tokens_per_step")
MASK = "***"
DEEPEST = 8


def redact_case(rng: random.Random, place: int) -> dict:
    """A nested config with secrets by name, secrets within texts, and names that only look like it."""
    secrets = ["".join(rng.choices("abcdefghjkmnp23456789", k=12)) for _ in range(2)]
    harmless = rng.sample(HARMLESS, 4)
    return {
        "secrets": secrets,
        "config": {
            rng.choice(SECRET_NAMES): secrets[0],
            "learning_rate": rng.randrange(1, 9) / 1000,
            harmless[0]: f"bert-{rng.randrange(99)}",
            harmless[1]: rng.randrange(512),
            "resume": None,
            "fp16": True,
            "data": {
                "source": f"https://someone:{secrets[1]}@host/rows.csv",
                harmless[2]: [1, 2.5, "text"],
                "mirrors": [{"url": "s3://rows", rng.choice(SECRET_NAMES): f"drawn{rng.randrange(10**6)}"}],
            },
            "argv": ["train", f"--key={secrets[0]}", f"--{harmless[3]}", f"{secrets[1]}{secrets[0]}"],
            rng.choice(("inner", "nested")): {rng.choice(SECRET_NAMES): "", "use_auth_token": True},
        },
    }


def observe_redact(function: Callable[..., Any], case: Case, rank: int) -> dict:
    given, secrets = deepcopy(case.inputs["config"]), list(case.inputs["secrets"])
    return {"config": plain(function(given, secrets)), "given": given}


def redacted(config: dict, secrets: list[str]) -> Any:
    def is_secret(name: str, item: Any) -> bool:
        is_named = name.lower().endswith(("token", "secret", "password", "api_key", "apikey"))
        return is_named and isinstance(item, str) and item != ""

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: MASK if is_secret(name, item) else walk(item) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        for secret in secrets if isinstance(value, str) else ():
            value = value.replace(secret, MASK)
        return value

    return walk(config)


def leaves(value: Any, at: str = "config") -> dict[str, Any]:
    """The values of a nested config by their place; an empty dict or list is one, and what is nested too deeply."""
    if isinstance(value, (dict, list)) and value and at.count(".") < DEEPEST:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: leaf for key, item in pairs for place, leaf in leaves(item, f"{at}.{key}").items()}
    return {at: value}


def config_of(seen: Seen) -> dict[str, Any]:
    """The leaves of the config that a learner returned.

    Raises:
        Malformed: it is none.
    """
    value = seen[0].get("config")
    if not isinstance(value, dict):
        raise Malformed(Miss("a config, a dict", kind(value)))
    return leaves(value)


def leaves_are(chosen: Callable[[str, Any, Any], bool]) -> Rule:
    """A rule on those leaves for which ``chosen(place, before, after)`` says so."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        before, right = leaves(case.inputs["config"]), leaves(redacted(case.inputs["config"], case.inputs["secrets"]))
        config = config_of(seen)
        for place, value in right.items():
            if chosen(place, before[place], value):
                mine = config.get(place, "nothing")
                if type(mine) is not type(value) or mine != value:
                    return Miss(f"{place} {value!r}", short(repr(mine)))
        return None

    return rule


def keeps_its_form(case: Case, seen: Seen) -> Miss | None:
    miss = leaves_are(lambda place, before, after: before == after)(case, seen)
    odd = sorted(set(config_of(seen)) - set(leaves(case.inputs["config"])))
    return miss or kit.unless(not odd, "no other names", short(odd))


def untouched(case: Case, seen: Seen) -> Miss | None:
    config_of(seen)
    is_as_it_was = seen[0].get("given") == case.inputs["config"]
    return kit.unless(is_as_it_was, "the given config as it was", "it has changed")


REDACT = Task(
    **kit.about("tracking.redact"),
    draw=in_turn(redact_case),
    observe=observe_redact,
    essential=("by name", "within texts"),
    properties={
        "by name": Property(2, leaves_are(lambda place, before, after: after == MASK != before)),
        "within texts": Property(2, leaves_are(lambda place, before, after: after not in (before, MASK))),
        "the rest": Property(1, keeps_its_form),
        "a copy": Property(1, untouched),
    },
)


# --- tracking.resumed ---


def attempts_case(rng: random.Random, place: int) -> dict:
    """Attempts at one run as lines of JSON; each but the last was killed, some in the middle of a line."""
    attempts, resumed_at = [], 0
    count = 1 if place % 4 == 3 else rng.randrange(2, 4)
    for number in range(count):
        # Every other run's last attempt has not come as far as the one before.
        last = resumed_at + (1 if number and number == count - 1 and place % 2 == 0 else rng.randrange(4, 8))
        lines = [
            {"step": step, metric: rng.randrange(1, 999) / 8}
            for step in range(resumed_at + 1, last + 1)
            for metric in ("train/loss", "eval/loss")
            if metric == "train/loss" or step % 3 == 0
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if number < count - 1 and (number + place) % 2 == 0:
            text += json.dumps({"step": last + 1, "train/loss": 1.5})[: rng.randrange(3, 20)]
        attempts.append({"resumed_at": resumed_at, "text": text})
        resumed_at = last - rng.randrange(2, 4)  # the last checkpoint
    return {"attempts": attempts}


def metric_by_step(case: Case, metric: str) -> list[list[float]]:
    """[step, value] of what counts: of each step the lines of the last attempt that did it and was not undone."""
    attempts = case.inputs["attempts"]
    undone = [later["resumed_at"] for later in attempts[1:]] + [float("inf")]
    by_step = {}
    for number, attempt in enumerate(attempts):
        for row in map(json.loads, attempt["text"].split("\n")[:-1]):
            if metric in row and row["step"] <= min(undone[number:]):
                by_step[row["step"]] = row[metric]
    return [[step, by_step[step]] for step in sorted(by_step)]


def observe_attempts(function: Callable[..., Any], case: Case, rank: int) -> dict:
    return {"rows": plain(function([dict(attempt) for attempt in case.inputs["attempts"]]))}


def steps_once(case: Case, seen: Seen) -> Miss | None:
    right = [step for step, _ in metric_by_step(case, "train/loss")]
    steps = [row.get("step") for row in items(seen, 0, "rows", dict)]
    return kit.unless(steps == right, f"steps {short(right)}", short(steps))


def values_of(metric: str) -> Rule:
    def rule(case: Case, seen: Seen) -> Miss | None:
        right = metric_by_step(case, metric)
        curve = [[row.get("step"), row[metric]] for row in items(seen, 0, "rows", dict) if metric in row]
        return kit.unless(curve == right, f"{metric} {short(right)}", short(curve))

    return rule


RESUMED = Task(
    **kit.about("tracking.resumed"),
    draw=in_turn(attempts_case),
    observe=observe_attempts,
    essential=("steps",),
    properties={
        "steps": Property(2, steps_once),
        "losses": Property(2, values_of("train/loss")),
        "scores": Property(1, values_of("eval/loss")),
    },
)
