"""Lesson 18, to build: DiLoCo that sends the largest changes alone, and keeps the others for later."""

import copy
import random
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, array, near
from course_lib.grading.task import Case, Miss, Property, Rule, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.ddp_module import Gated
from course_lib.grading.tasks.drawing import WORLDS, entry
from course_lib.grading.tasks.less import by_step, gated_case, local_steps
from course_lib.grading.tasks.less_bytes import same_bits
from course_lib.grading.tasks.models import all_weights, learning
from course_lib.grading.tasks.zero_optimizer import Optimizer

SIGN = "sign"
SETTINGS = ("every", "density", "outer_lr", "outer_momentum")


class Inner(Optimizer):
    """The inner optimizer: as it is, or one whose changes are all of one size, so that all of them tie."""

    def _change(self, parameter: Tensor, gradient: Tensor, kind: str, steps: int) -> None:
        if kind == SIGN:
            parameter.sub_(0.125 * gradient.sign())
        else:
            super()._change(parameter, gradient, kind, steps)


def topk_case(rng: random.Random, world: int, kind: str, every: int, density: float) -> dict:
    """Three periods and a step; after ``saved`` steps, in the second period or after it, the state is taken."""
    return gated_case(rng, world, 3 * every + 1) | {
        "optimizer": kind,
        "every": every,
        "density": density,
        "outer_lr": 0.5,
        "outer_momentum": rng.choice((0.5, 0.75)),
        "saved": every + 1,
    }


def draw_topk(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks; one element of each parameter, after each step; all elements; and changes that tie."""
    kinds = [
        *((world, "Adam", rng.randrange(2, 4), rng.choice((0.125, 0.25))) for world in worlds),
        (2, "momentum", 1, 1 / 64),
        (worlds[-1], "Adam", 2, 1.0),
        (2, SIGN, 2, 0.25),
    ]
    cases = []
    for kind in kinds:
        case = Case(kind[0], topk_case(rng, *kind))
        while kind[1] != SIGN and trained(case)[1] < 1e-4:
            case = Case(kind[0], topk_case(rng, *kind))
        cases.append(case)
    return cases


def observe_topk(function: Callable[..., Any], case: Case, rank: int) -> dict:
    """Train to the end; then go on once more from what was saved on the way, with a new model and a new object."""
    settings, rows = {name: case.inputs[name] for name in SETTINGS}, case.inputs["rows"][rank]
    model = Gated(case.inputs)
    optimizer = Inner(case.inputs["optimizer"], model.parameters())

    def train(record: Recorder, module: nn.Module, engine: Any, batches: Sequence[np.ndarray]) -> list[Tensor]:
        weights = []
        for batch in batches:
            module.zero_grad()
            record.note("step")
            module(torch.from_numpy(batch)).square().mean().backward()
            engine.step()
            weights.append(all_weights(module.parameters()))
        return weights

    with Recorder() as record:
        engine = function(model, optimizer, **settings)
        weights = train(record, model, engine, rows[: case.inputs["saved"]])
        saved, (other_model, other_optimizer) = engine.state_dict(), copy.deepcopy((model, optimizer))
        weights += train(record, model, engine, rows[case.inputs["saved"] :])
    engine = function(other_model, other_optimizer, **settings)
    engine.load_state_dict(saved)
    resumed = train(Recorder(), other_model, engine, rows[case.inputs["saved"] :])
    return kit.noted(record, weights=torch.stack(weights), resumed=torch.stack(resumed))


def trained(case: Case) -> tuple[list[np.ndarray], float]:
    """By rank the weights after each step, in one process; and by how much the last that travelled led the next."""
    inputs = case.inputs
    models = [Gated(inputs) for _ in range(case.world_size)]
    optimizers = [Inner(inputs["optimizer"], model.parameters()) for model in models]
    shared = [parameter.detach().clone() for parameter in learning(models[0])]
    velocity = [torch.zeros_like(tensor) for tensor in shared]
    left_out = [[torch.zeros_like(tensor) for tensor in shared] for _ in models]
    weights: list[list[np.ndarray]] = [[] for _ in models]
    lead = 1.0
    for number in local_steps(models, optimizers, inputs["rows"]):
        for place, of_all in enumerate(shared) if number % inputs["every"] == 0 else ():
            change = torch.zeros_like(of_all)
            for model, rest in zip(models, left_out, strict=True):
                rest[place] += of_all - learning(model)[place].detach()
                waiting = rest[place].view(-1)
                kept = ceil(inputs["density"] * len(waiting))
                order = waiting.abs().argsort(descending=True, stable=True)
                if kept < len(order):
                    last, following = waiting.abs()[order[kept - 1 : kept + 1]].tolist()
                    lead = min(lead, last - following if last else 1.0)
                change.view(-1)[order[:kept]] += waiting[order[:kept]]
                waiting[order[:kept]] = 0
            change /= case.world_size
            velocity[place] = inputs["outer_momentum"] * velocity[place] + change
            of_all -= inputs["outer_lr"] * (change + inputs["outer_momentum"] * velocity[place])
            for model in models:
                learning(model)[place].data.copy_(of_all)
        for kept_of, model in zip(weights, models, strict=True):
            kept_of.append(all_weights(model.parameters()).numpy())
    return [np.stack(tensor) for tensor in weights], lead


def as_one_process(key: str, ties: bool) -> Rule:
    """A rule: the weights after each step, or since the state was loaded; where changes tie, or where they do not."""

    def rule(case: Case, seen: Seen) -> Miss | None:
        begun = case.inputs["saved"] if key == "resumed" else 0
        right = [weights[begun:] for weights in trained(case)[0]]
        array(seen, 0, key, right[0].shape)
        return near(seen, key, right, first_step=begun + 1) if ties == (case.inputs["optimizer"] == SIGN) else None

    return rule


def agreed_to_the_bit(case: Case, seen: Seen) -> Miss | None:
    """After each outer step."""
    every = case.inputs["every"]
    shape = trained(case)[0][0].shape
    return same_bits("weights")(
        case, [{"weights": array(seen, rank, "weights", shape)[every - 1 :: every]} for rank in range(case.world_size)]
    )


@kit.each_rank
def pairs_alone(case: Case, seen: Seen, rank: int) -> Miss | None:
    """In every H-th step one or two all-gathers of the pairs, 8 bytes each; nothing in the others."""
    pairs = sum(ceil(case.inputs["density"] * parameter.numel()) for parameter in learning(Gated(case.inputs)))
    most = 8 * pairs * case.world_size
    for number, made in enumerate(by_step(seen, rank, len(case.inputs["rows"][0])), 1):
        due = number % case.inputs["every"] == 0
        right = f"one or two all-gathers of {most} bytes in all" if due else "no collective"
        alone = kit.count(made, "all_gather") == len(made) <= 2 * due
        if not alone or (due and not 0 < kit.carried(made) <= most):
            return Miss(f"{right} in step {number}", kit.listed(made))
    return None


TOPK = Task(
    **kit.about("less.topk"),
    draw=draw_topk,
    observe=observe_topk,
    own={"rows": entry},
    essential=("weights", "pairs alone travel"),
    properties={
        "weights": Property(4, as_one_process("weights", ties=False)),
        "ties": Property(1, as_one_process("weights", ties=True)),
        "same bits": Property(1, agreed_to_the_bit),
        "pairs alone travel": Property(3, pairs_alone),
        "resumes": Property(2, as_one_process("resumed", ties=False)),
    },
)
