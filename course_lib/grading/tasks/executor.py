"""Lesson 07, to build: what runs a rank's row of a table, with its sends and receives."""

import random
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import NAMES, Seen, array, events, number, short
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import entry, numbers
from course_lib.grading.tasks.models import all_gradients, descend
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.validation import in_flight

STEPS = 2
RATE = 0.25
ROWS = 3
KINDS = ((1, "interleaved", 2), (2, "gpipe", 1), (3, "1f1b", 1), (2, "interleaved", 2))
"""Ranks, table, stages per rank."""


def stage_of(weights: Sequence[np.ndarray], frozen: bool) -> nn.Sequential:
    """A linear layer, a tanh and a linear layer; the first may be frozen."""
    layers = []
    for weight in weights:
        layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        layers[-1].weight.data = kit.tensor(weight)
    layers[0].requires_grad_(not frozen)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def run_case(rng: random.Random, world: int, kind: str, per_rank: int) -> dict:
    width, count = rng.randrange(2, 5), 2 * world if per_rank > 1 else world + rng.randrange(1, 3)
    return {
        "table": kind,
        "stages_per_rank": per_rank,
        "microbatches": count,
        "weights": [
            [[numbers(rng, width, width) / 2 for _ in range(2)] for _ in range(per_rank)] for _ in range(world)
        ],
        "frozen": rng.randrange(world * per_rank),
        "inputs": [[numbers(rng, ROWS, width) for _ in range(count)] for _ in range(STEPS)],
        "targets": [[numbers(rng, ROWS, width) for _ in range(count)] for _ in range(STEPS)],
    }


def draw_runs(rng: random.Random, kinds: Sequence[tuple[int, str, int]] = KINDS) -> list[Case]:
    return [Case(world, run_case(rng, world, kind, per_rank)) for world, kind, per_rank in kinds]


def table_of(case: Case) -> Schedule:
    given = case.inputs
    return make(given["table"], case.world_size, given["microbatches"], given["stages_per_rank"])


def stages_on(case: Case, rank: int) -> dict[int, nn.Sequential]:
    """By number, the stages of a rank: stage s lies on rank s mod N."""
    numbers_ = [rank + lap * case.world_size for lap in range(case.inputs["stages_per_rank"])]
    return {
        stage: stage_of(weights, stage == case.inputs["frozen"])
        for stage, weights in zip(numbers_, case.inputs["weights"][rank], strict=True)
    }


def parameters_of(stages: dict[int, nn.Sequential]) -> list[nn.Parameter]:
    return [parameter for stage in sorted(stages) for parameter in stages[stage].parameters()]


def observe_run(function: Callable[..., Any], case: Case, rank: int) -> dict:
    stages, row = stages_on(case, rank), [str(action) for action in table_of(case).rows[rank]]
    gradients, losses, peak = [], [], 0
    held: list[weakref.ref] = []

    def watched(stage: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            nonlocal peak
            record.note(f"F of {stage}")
            held.append(weakref.ref(output))
            peak = max(peak, sum(reference() is not None for reference in held))
            output.register_hook(lambda gradient: record.note(f"B of {stage}"))

        return hook

    for stage, module in stages.items():
        module.register_forward_hook(watched(stage))
    with Recorder() as record:
        for inputs, targets in zip(case.inputs["inputs"], case.inputs["targets"], strict=True):
            record.note("step")
            for module in stages.values():
                module.zero_grad()
            loss = function(
                list(row),
                dict(stages),
                case.world_size * case.inputs["stages_per_rank"],
                list(map(kit.tensor, inputs)),
                list(map(kit.tensor, targets)),
            )
            losses.append(plain(loss))
            gradients.append(all_gradients(parameters_of(stages)))
            descend(parameters_of(stages), RATE)
    return kit.noted(record, gradients=torch.stack(gradients), losses=np.asarray(losses, dtype=np.float64), peak=peak)


def whole(case: Case) -> dict[str, list[np.ndarray]]:
    """By rank the gradients of its stages in each step, and each step's losses by micro-batch: all in one process."""
    by_rank = [stages_on(case, rank) for rank in range(case.world_size)]
    stages = {number_: module for mine in by_rank for number_, module in mine.items()}
    gradients: list[list[np.ndarray]] = [[] for _ in by_rank]
    losses: list[list[float]] = []
    for inputs, targets in zip(case.inputs["inputs"], case.inputs["targets"], strict=True):
        losses.append([])
        for module in stages.values():
            module.zero_grad()
        for x, target in zip(inputs, targets, strict=True):
            output = kit.tensor(x)
            for number_ in sorted(stages):
                output = stages[number_](output)
            loss = (output - torch.from_numpy(target)).square().mean() / len(inputs)
            loss.backward()
            losses[-1].append(loss.item())
        for rank, mine in enumerate(by_rank):
            gradients[rank].append(all_gradients(parameters_of(mine)).numpy())
        descend(parameters_of(stages), RATE)
    return {
        "gradients": [np.stack(mine) for mine in gradients],
        "losses": [*[np.zeros((STEPS, 0))] * (case.world_size - 1), np.array(losses)],
    }


@kit.each_rank
def losses_are(case: Case, seen: Seen, rank: int) -> Miss | None:
    """The last stage's rank returns the losses in the micro-batches' order, the others nothing."""
    due, losses = whole(case)["losses"][rank], array(seen, rank, "losses")
    fits = losses.shape == due.shape and np.allclose(losses, due, rtol=1e-4, atol=1e-5)
    return kit.unless(fits, f"losses {short(due.round(4).tolist())}", short(losses.round(4).tolist()))


@kit.each_rank
def follows_its_row(case: Case, seen: Seen, rank: int) -> Miss | None:
    """Forwards and backwards in the row's order, in each step."""
    right = (["step"] + [f"{action.kind} of {action.stage}" for action in table_of(case).rows[rank]]) * STEPS
    return kit.first_apart(right, [event for event in events(seen, rank) if event.split()[0] in ("step", "F", "B")])


@kit.each_rank
def as_many_messages(case: Case, seen: Seen, rank: int) -> Miss | None:
    """For each F but the last stage's a message to the next stage's rank, and for each B but the first's one back."""
    ranks, last = case.world_size, case.world_size * case.inputs["stages_per_rank"] - 1
    size, happened = case.inputs["inputs"][0][0].nbytes, events(seen, rank)
    due = [
        f"send {size} to {(action.stage + (1 if action.kind == 'F' else -1)) % ranks}"
        for action in table_of(case).rows[rank]
        if ranks > 1 and action.stage != (last if action.kind == "F" else 0)
    ] * STEPS
    both = [event for event in happened if event.split()[0] in NAMES]
    made = [event for event in both if not event.startswith("recv")]
    if sorted(made) != sorted(due):
        return Miss(f"{len(due)} messages: {kit.listed(due, '')}", f"{len(made)}: {kit.listed(made, '')}")
    waits = happened.count("wait")
    return kit.unless(waits >= len(both), f"each of {len(both)} sends and receives waited for", f"{waits} waits")


@kit.each_rank
def lets_go(case: Case, seen: Seen, rank: int) -> Miss | None:
    """No rank holds more stage outputs than its row has micro-batches in flight, and two that names still hold."""
    most, peak = in_flight(table_of(case))[rank] + 2, number(seen, rank, "peak")
    return kit.unless(0 < peak <= most, f"at most {most} outputs held at once", f"{peak:.0f}")


RUN = Task(
    **kit.about("pipeline.run"),
    draw=draw_runs,
    observe=observe_run,
    own={"weights": entry},
    essential=("gradients", "follows its row"),
    properties={
        "gradients": Property(4, kit.equals("gradients", whole, of="gradients", first_step=0)),
        "losses": Property(1, losses_are),
        "follows its row": Property(3, follows_its_row),
        "messages": Property(2, as_many_messages),
        "lets go": Property(2, lets_go),
    },
)
