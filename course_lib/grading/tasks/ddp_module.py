"""Lesson 02, to build: a wrapper that averages gradients in buckets while backward runs, over several steps."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, events, near, result, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.models import UNUSED, chain, odd_case

LESSON = "02_data_parallel"
STEPS = 3
RATE = 0.25


class Gated(nn.Module):
    """A chain of layers behind one that only some rows pass: on some ranks, in some steps, it has no gradient."""

    def __init__(self, inputs: dict, rank: int = 0):
        super().__init__()
        width = inputs["extra"].shape[0]
        self.extra = nn.Linear(width, width, bias=False)
        self.extra.weight.data = torch.from_numpy(inputs["extra"].copy())
        self.chain = chain(inputs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank)  # until somebody makes them alike

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x + self.extra(x) if x[0, 0] > 0 else x)


def module_case(rng: random.Random, world: int) -> dict:
    """Rows whose first number decides whether they pass the gate: rank r does in step s where r + s is even."""
    case = odd_case(rng, world)
    width = case["weights"][0].shape[1]
    rows = [[numbers(rng, 4, width) for _ in range(STEPS)] for _ in range(world)]
    for rank, steps in enumerate(rows):
        for step, batch in enumerate(steps):
            batch[0, 0] = (1 if (rank + step) % 2 == 0 else -1) * (abs(batch[0, 0]) + 0.5)
    sizes = [p.nbytes for p in reversed(learning(Gated(case | {"extra": numbers(rng, width, width)})))]
    filled = sum(sizes[: rng.randrange(1, 3)])  # the first bucket is full exactly
    return case | {"extra": numbers(rng, width, width), "rows": rows, "bucket_bytes": filled}


def draw_modules(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks; on two a single bucket for all; and on two a model that is used as a whole."""
    cases = [Case(world, module_case(rng, world)) for world in (*worlds, 2, 2)]
    cases[-2].inputs["bucket_bytes"] = 1 << 20
    cases[-1].inputs.pop(UNUSED)
    for batch in (batch for steps in cases[-1].inputs["rows"] for batch in steps):
        batch[0, 0] = abs(batch[0, 0])
    return cases


def learning(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that ask for a gradient, each once, whether they get one or not."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in learning(model)])


def observe_module(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, gradients = Gated(case.inputs, rank), []
    with Recorder() as record:
        for number, parameter in enumerate(learning(model)):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: record.note(f"gradient {number}"))
        engine = function(model, case.inputs["bucket_bytes"])
        start = torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])
        for rows in case.inputs["rows"][rank]:
            model.zero_grad()
            record.note("step")
            engine(torch.from_numpy(rows)).square().mean().backward()
            record.note("finish")
            engine.finish()
            gradients.append(gradient_of(model).clone())
            with torch.no_grad():
                for parameter in learning(model):
                    parameter.sub_(RATE * (0 if parameter.grad is None else parameter.grad))
    return {"start": plain(start), "gradient": plain(torch.stack(gradients)), "events": record.events}


def start_of(case: Case) -> list[np.ndarray]:
    """Rank 0's weights, on every rank."""
    model = Gated(case.inputs)
    return [torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()] * case.world_size


def gradients_of_one(case: Case) -> list[np.ndarray]:
    """The mean gradients of all steps, by one process that sees every rank's rows."""
    model, steps = Gated(case.inputs), []
    for step in range(STEPS):
        model.zero_grad()
        for rows in case.inputs["rows"]:
            (model(torch.from_numpy(rows[step])).square().mean() / case.world_size).backward()
        steps.append(gradient_of(model).clone())
        with torch.no_grad():
            for parameter in learning(model):
                parameter.sub_(RATE * (0 if parameter.grad is None else parameter.grad))
    return [torch.stack(steps).numpy()] * case.world_size


def buckets_of(case: Case) -> list[list[int]]:
    """The numbers of the parameters in each bucket, from the last parameter to the first."""
    parameters = learning(Gated(case.inputs))
    buckets: list[list[int]] = [[]]
    filled = 0
    for number in reversed(range(len(parameters))):
        if filled >= case.inputs["bucket_bytes"]:
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += parameters[number].nbytes
    return buckets


def steps_of(seen: Seen, rank: int) -> list[list[str]]:
    """A rank's events of each step."""
    steps: list[list[str]] = []
    for event in events(seen, rank):
        if event == "step":
            steps.append([])
        elif steps:
            steps[-1].append(event)
    return steps if len(steps) == STEPS else [[] for _ in range(STEPS)]


def in_buckets(case: Case, seen: Seen) -> Miss | None:
    """Each step sends the buckets, in order."""
    parameters = learning(Gated(case.inputs))
    right = [f"all_reduce {sum(parameters[i].nbytes for i in bucket)}" for bucket in buckets_of(case)]
    for rank in range(case.world_size):
        for step, happened in enumerate(steps_of(seen, rank)):
            made = [event for event in happened if event.split()[0] not in ("gradient", "wait", "finish")]
            if made != right:
                return Miss(f"{short(', '.join(right))} in step {step}", short(", ".join(made) or "nothing"), rank)
    return None


def leaves_early(case: Case, seen: Seen) -> Miss | None:
    """Rule: when the next gradient comes, or backward ends, every bucket that is full and has its turn has left."""
    buckets = buckets_of(case)
    for rank in range(case.world_size):
        for step, happened in enumerate(steps_of(seen, rank)):
            there: set[int] = set()
            sent = 0
            for event in [*happened, "finish"][: happened.index("finish") + 1 if "finish" in happened else None]:
                words = event.split()
                if words[0] == "all_reduce":
                    sent += 1
                elif words[0] in ("gradient", "finish"):
                    due = next((n for n, bucket in enumerate(buckets) if not there.issuperset(bucket)), len(buckets))
                    if sent < due:
                        return Miss(
                            f"{due} of {len(buckets)} buckets on their way once their gradients are there, "
                            f"in step {step}",
                            f"{sent}",
                            rank,
                        )
                    if words[0] == "gradient":
                        there.add(int(words[1]))
            if not happened:
                return Miss(f"{STEPS} steps", "another number", rank)
    return None


def waits_late(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        for step, happened in enumerate(steps_of(seen, rank)):
            end = happened.index("finish") if "finish" in happened else len(happened)
            sent = sum(event.startswith("all_reduce") for event in happened)
            if "wait" in happened[:end]:
                return Miss(f"no wait before backward has ended, in step {step}", "a wait", rank)
            if not sent or happened[end:].count("wait") < sent:
                return Miss(
                    f"each of {sent or 'some'} all-reduces of step {step} waited for in finish()",
                    f"{happened[end:].count('wait')} waits",
                    rank,
                )
    return None


MODULE = Task(
    name="ddp.module",
    lesson=LESSON,
    function="BucketedDDP",
    title="Build it: DDP with buckets and overlap",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=draw_modules,
    observe=observe_module,
    own={"rows": entry},
    essential=("mean gradient", "leaves early", "waits in finish"),
    properties={
        "same start": Property(1, lambda case, seen: near(seen, "start", start_of(case), 0)),
        "mean gradient": Property(4, result("gradient", gradients_of_one, first_step=0)),
        "buckets": Property(2, in_buckets),
        "leaves early": Property(3, leaves_early),
        "waits in finish": Property(2, waits_late),
    },
)

ALL = (MODULE,)
