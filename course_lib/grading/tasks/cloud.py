"""Lesson 12: a job's request, and what it costs; no ranks, no torch."""

import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from course_lib.grading.rules import Seen, kind, number, raised, short
from course_lib.grading.task import Case, Malformed, Miss, Property, Rule, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import in_turn
from course_lib.grading.tasks.planning import exactly, refused

# --- cloud.request ---

METRICS = {
    "train:loss": "loss",
    "train:learning_rate": "learning_rate",
    "eval:loss": "eval.loss",
    "eval:macro_f1": "eval.macro_f1",
}


def request_case(rng: random.Random, place: int) -> dict:
    job = {
        "name": f"course-{rng.randrange(1000)}",
        "bucket": f"bucket-{rng.randrange(1000)}",
        "instance_type": rng.choice(("ml.p4d.24xlarge", "ml.g5.xlarge")),
        "instance_count": rng.randrange(1, 9),
        "max_hours": rng.randrange(1, 13) / 2,
        "spot": place % 2 == 0,
        "wait_hours": rng.randrange(7, 20),
        "config": {
            "model": "tiny-bert",
            "max_steps": rng.randrange(8, 999),
            "bf16": bool(place % 3),
            "learning_rate": rng.randrange(1, 9) / 1e5,
            "text_column": None,
        },
        "metrics": METRICS,
    }
    values = {
        "loss": -rng.randrange(1, 99) / 8,
        "learning_rate": rng.randrange(1, 99) / 1e7,
        "eval.loss": rng.randrange(1, 9999) / 1e4,
        "eval.macro_f1": rng.randrange(1, 99) / 100,
    }
    order = rng.sample(list(values), len(values))
    if place % 2 == 0:  # an expression that does not say where the name begins reads the loss of another
        order.sort(key=lambda name: name == "loss")
    line = "metrics: step=7 " + " ".join(f"{name}={values[name]}" for name in order)
    return {"job": job, "line": line}


def observe_request(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """The expressions are tried here: one that never ends costs the answer's time alone."""
    job = case.inputs["job"]
    made = plain(function({**job, "config": dict(job["config"]), "metrics": dict(job["metrics"])}))
    read = {}
    for definition in made["AlgorithmSpecification"]["MetricDefinitions"]:
        with suppress(re.error):
            matches = re.findall(definition["Regex"], case.inputs["line"])
            read[definition["Name"]] = str(matches[0])[:40] if matches else ""
    return {"request": made, "read": read}


def mapping(seen: Seen, key: str, what: str) -> dict[str, Any]:
    """What an answer returned as a dict.

    Raises:
        Malformed: something else.
    """
    value = seen[0].get(key)
    if not isinstance(value, dict):
        raise Malformed(Miss(what, kind(value)))
    return value


def fields_are(due: Callable[[dict], dict[str, Any]]) -> Rule:
    """A rule: the request has these parts, each just so; of one that is due as None there is nothing."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        request = mapping(seen, "request", "a request, a dict")
        for name, right in due(case.inputs["job"]).items():
            mine = request.get(name)
            if repr(_sorted(mine)) != repr(_sorted(right)):
                return Miss(f"{name} {short(right)}", short(mine))
        return None

    return rule


def _sorted(value: Any) -> Any:
    return sorted(value.items()) if isinstance(value, dict) else value


def options_due(job: dict) -> dict[str, Any]:
    """Text by name; what is None is left to its default."""
    given = {name: value for name, value in job["config"].items() if value is not None}
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    return {"TrainingJobName": job["name"], "HyperParameters": texts}


def machines_due(job: dict) -> dict[str, Any]:
    stopping = {"MaxRuntimeInSeconds": round(job["max_hours"] * 3600)}
    if job["spot"]:
        stopping["MaxWaitTimeInSeconds"] = round((job["max_hours"] + job["wait_hours"]) * 3600)
    return {
        "ResourceConfig": {
            "InstanceType": job["instance_type"],
            "InstanceCount": job["instance_count"],
            "VolumeSizeInGB": 100,
        },
        "StoppingCondition": stopping,
        "EnableManagedSpotTraining": job["spot"],
    }


def checkpoints_due(job: dict) -> dict[str, Any]:
    place = {"S3Uri": f"s3://{job['bucket']}/{job['name']}/checkpoints", "LocalPath": "/opt/ml/checkpoints"}
    return {"CheckpointConfig": place if job["spot"] else None}


def metrics_are_read(case: Case, seen: Seen) -> Miss | None:
    read = mapping(seen, "read", "metric definitions")
    printed = dict(part.split("=") for part in case.inputs["line"].split()[1:])
    for name, field in case.inputs["job"]["metrics"].items():
        if read.get(name) != printed[field]:
            return Miss(f"{name} {printed[field]} from `{case.inputs['line']}`", short(read.get(name)))
    return None


REQUEST = Task(
    **kit.about("cloud.request"),
    draw=in_turn(request_case),
    observe=observe_request,
    properties={
        "hyperparameters": Property(1, fields_are(options_due)),
        "machines": Property(2, fields_are(machines_due)),
        "checkpoints": Property(1, fields_are(checkpoints_due)),
        "metrics": Property(2, metrics_are_read),
    },
)


# --- cloud.cost ---


def cost_case(rng: random.Random, place: int) -> dict:
    """In turn: on demand, spot, with a warm pool, and both, which AWS refuses."""
    spot, warm = ((False, False), (True, False), (False, True), (True, True))[place % 4]
    return {
        "work_hours": rng.randrange(4, 80) / 4,
        "start_minutes": rng.randrange(3, 12),
        "instances": rng.randrange(1, 9),
        "price": rng.randrange(100, 4000) / 100,
        "discount": rng.randrange(4, 8) / 10 if spot else 0.0,
        "interruptions": rng.randrange(1, 6) if spot else 0,
        "save_minutes": rng.randrange(10, 60),
        "keep_alive_minutes": rng.randrange(5, 60) if warm else 0,
        "max_hours": rng.randrange(90, 200) / 4,
    }


def observe_cost(function: Callable[..., Any], case: Case, rank: int) -> dict:
    try:
        expected, most = function(**case.inputs)
    except ValueError as refusal:
        return {"expected": None, "at most": None, **refused(refusal, function)}
    return {"expected": plain(expected), "at most": plain(most), "refusal": ""}


def cost(given: dict) -> dict[str, float]:
    """Billed are the seconds in which the machines are yours, those of the start included."""
    rate = given["instances"] * given["price"]
    lost = given["interruptions"] * given["save_minutes"] / 2
    hours = given["work_hours"] + ((given["interruptions"] + 1) * given["start_minutes"] + lost) / 60
    kept = given["keep_alive_minutes"] / 60
    return {"expected": rate * (hours * (1 - given["discount"]) + kept), "at most": rate * (given["max_hours"] + kept)}


def is_both(case: Case) -> bool:
    return bool(case.inputs["discount"] and case.inputs["keep_alive_minutes"])


def cost_is(key: str, *, spot: bool) -> Rule:
    """Right in the cases with spot capacity, or in those without."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        if is_both(case):
            return None
        if said := raised(seen):
            raise Malformed(Miss("a cost", short(said)))
        amount, right = number(seen, 0, key), cost(case.inputs)[key]
        fits = bool(case.inputs["discount"]) is not spot or exactly(amount, right)
        return kit.unless(fits, f"{key} {right:.6g}", f"{amount:.6g} for {case.inputs}")

    return rule


def never_more(case: Case, seen: Seen) -> Miss | None:
    return cost_is("at most", spot=bool(case.inputs["discount"]))(case, seen)


def refuses_both(case: Case, seen: Seen) -> Miss | None:
    if not is_both(case):
        number(seen, 0, "expected")
        return None
    return kit.unless(seen[0].get("refusal"), "a ValueError: no warm pool on spot capacity", "a cost")


COST = Task(
    **kit.about("cloud.cost"),
    draw=in_turn(cost_case, 8),
    observe=observe_cost,
    properties={
        "on demand": Property(1, cost_is("expected", spot=False)),
        "spot": Property(2, cost_is("expected", spot=True)),
        "at most": Property(1, never_more),
        "refuses": Property(1, refuses_both),
    },
)
