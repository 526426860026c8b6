"""Lesson 02, to build: a wrapper that averages gradients in buckets while backward runs, over several steps."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.task import Case, Miss, Property, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.models import UNUSED, all_gradients, all_weights, chain, descend, learning, odd_case

STEPS = 3
RATE = 0.25


class Gated(nn.Module):
    """A chain of layers behind one that only some rows pass: on some ranks, in some steps, it has no gradient."""

    def __init__(self, inputs: dict, rank: int = 0):
        super().__init__()
        width = inputs["extra"].shape[0]
        self.extra = nn.Linear(width, width, bias=False)
        self.extra.weight.data = kit.tensor(inputs["extra"])
        self.chain = chain(inputs)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(rank)  # until somebody makes them alike

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x + self.extra(x) if x[0, 0] > 0 else x)


def gated_rows(rng: random.Random, world: int, steps: int, width: int) -> list[list[np.ndarray]]:
    """Rows whose first number decides whether they pass the gate: rank r does in step s where r + s is even."""
    rows = [[numbers(rng, 4, width) for _ in range(steps)] for _ in range(world)]
    for rank, batches in enumerate(rows):
        for step, batch in enumerate(batches):
            batch[0, 0] = (1 if (rank + step) % 2 == 0 else -1) * (abs(batch[0, 0]) + 0.5)
    return rows


def module_case(rng: random.Random, world: int) -> dict:
    case = odd_case(rng, world)
    width = case["weights"][0].shape[1]
    rows = gated_rows(rng, world, STEPS, width)
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


def observe_module(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, gradients = Gated(case.inputs, rank), []
    with Recorder() as record:
        for number, parameter in enumerate(learning(model)):
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: record.note(f"gradient {number}"))
        engine = function(model, case.inputs["bucket_bytes"])
        start = all_weights(model.parameters())
        for rows in case.inputs["rows"][rank]:
            model.zero_grad()
            record.note("step")
            engine(torch.from_numpy(rows)).square().mean().backward()
            record.note("finish")
            engine.finish()
            gradients.append(all_gradients(learning(model)))
            descend(learning(model), RATE)
    return kit.noted(record, start=start, gradient=torch.stack(gradients))


def by_one(case: Case) -> dict[str, np.ndarray]:
    """The weights at the start, and the mean gradients of all steps, by one process that sees every rank's rows."""
    model, steps = Gated(case.inputs), []
    start = all_weights(model.parameters())
    for step in range(STEPS):
        model.zero_grad()
        for rows in case.inputs["rows"]:
            (model(torch.from_numpy(rows[step])).square().mean() / case.world_size).backward()
        steps.append(all_gradients(learning(model)))
        descend(learning(model), RATE)
    return {"start": start.numpy(), "gradient": torch.stack(steps).numpy()}


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


def in_buckets(case: Case, step: int, happened: list[str]) -> Miss | None:
    """Each step sends the buckets, in order."""
    parameters = learning(Gated(case.inputs))
    right = [f"all_reduce {sum(parameters[i].nbytes for i in bucket)}" for bucket in buckets_of(case)]
    made = [event for event in happened if event.split()[0] not in ("gradient", "wait", "finish")]
    return kit.unless(made == right, f"{kit.listed(right)} in step {step}", kit.listed(made, "nothing"))


def leaves_early(case: Case, step: int, happened: list[str]) -> Miss | None:
    """When the next gradient comes, or backward ends, every bucket that is full and has its turn has left."""
    buckets, sent = buckets_of(case), 0
    there: set[int] = set()
    for event in [*happened, "finish"][: happened.index("finish") + 1 if "finish" in happened else None]:
        words = event.split()
        if words[0] == "all_reduce":
            sent += 1
        elif words[0] in ("gradient", "finish"):
            due = next((n for n, bucket in enumerate(buckets) if not there.issuperset(bucket)), len(buckets))
            if sent < due:
                said = f"{due} of {len(buckets)} buckets on their way once their gradients are there, in step {step}"
                return Miss(said, f"{sent}")
            if words[0] == "gradient":
                there.add(int(words[1]))
    return kit.unless(happened, f"{STEPS} steps", "another number")


def waits_late(case: Case, step: int, happened: list[str]) -> Miss | None:
    end = happened.index("finish") if "finish" in happened else len(happened)
    sent, waits = kit.count(happened, "all_reduce"), happened[end:].count("wait")
    if "wait" in happened[:end]:
        return Miss(f"no wait before backward has ended, in step {step}", "a wait")
    said = f"each of {sent or 'some'} all-reduces of step {step} waited for in finish()"
    return kit.unless(sent and waits >= sent, said, f"{waits} waits")


MODULE = Task(
    **kit.about("ddp.module"),
    draw=draw_modules,
    observe=observe_module,
    own={"rows": entry},
    essential=("mean gradient", "leaves early", "waits in finish"),
    properties={
        "same start": Property(1, kit.equals("start", by_one, of="start", on_all=True, tolerance=0)),
        "mean gradient": Property(4, kit.equals("gradient", by_one, of="gradient", on_all=True, first_step=0)),
        "buckets": Property(2, kit.each_step(in_buckets, "step", STEPS)),
        "leaves early": Property(3, kit.each_step(leaves_early, "step", STEPS)),
        "waits in finish": Property(2, kit.each_step(waits_late, "step", STEPS)),
    },
)
