"""Lesson 05, to build: an optimizer whose states lie on one rank each, over several steps of a real model."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, made_by, near, number, suspected
from course_lib.grading.task import Case, Miss, Property, Task
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import LAST, each_world, entry, numbers
from course_lib.grading.tasks.models import (
    BareOptimizer,
    all_weights,
    backwards,
    chain,
    give_mean_gradients,
    learning,
    odd_case,
)

STEPS = 3
STATES = {"Adam": 2, "momentum": 1}


class Optimizer(BareOptimizer):
    """Adam or SGD with momentum."""

    def __init__(self, kind: str, parameters: Iterable[torch.Tensor]):
        super().__init__(parameters, {"kind": kind, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Change each parameter that has a gradient."""
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._change(parameter, parameter.grad, group["kind"], group["steps"])

    def _change(self, parameter: torch.Tensor, gradient: torch.Tensor, kind: str, steps: int) -> None:
        state = self.state[parameter]
        m, *v = (state.setdefault(name, torch.zeros_like(parameter)) for name in ("m", "v")[: STATES[kind]])
        m.mul_(0.75).add_(gradient if not v else 0.25 * gradient)
        if v:
            v[0].mul_(0.875).add_(0.125 * gradient.square())
            root = (v[0] / (1 - 0.875**steps)).sqrt()
            parameter.sub_(0.125 * m / (1 - 0.75**steps) / (root + 0.25))
        else:
            parameter.sub_(0.25 * m)


def optimizer_case(rng: random.Random, world: int, kind: str) -> dict:
    case = odd_case(rng, world)
    width = case["weights"][0].shape[1]
    return case | {"optimizer": kind, "rows": [[numbers(rng, 4, width) for _ in range(STEPS)] for _ in range(world)]}


def observe_optimizer(function: Callable[..., Any], case: Case, rank: int) -> dict:
    model, made, weights = chain(case.inputs), [], []

    def make(parameters: Iterable[torch.Tensor]) -> Optimizer:
        made.append(Optimizer(case.inputs["optimizer"], parameters))
        return made[-1]

    with Recorder() as record:
        optimizer = function(list(model.parameters()), make)
        for rows in case.inputs["rows"][rank]:
            optimizer.zero_grad()
            record.note("step")
            model(torch.from_numpy(rows)).square().mean().backward()
            optimizer.step()
            weights.append(all_weights(model.parameters()))
        optimizer.zero_grad()
    stale = max((float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None), default=0.0)
    states = sum(value.numel() for one in made for state in one.state.values() for value in state.values())
    return kit.noted(record, weights=torch.stack(weights), states=states, stale=stale)


def weights_of_one(case: Case, as_sum: bool = False) -> list[np.ndarray]:
    """The weights after each step, by one process with the mean gradient, or the sum."""
    models = [chain(case.inputs) for _ in range(case.world_size)]
    optimizers = [Optimizer(case.inputs["optimizer"], model.parameters()) for model in models]
    steps = []
    for _ in zip(*map(backwards, models, case.inputs["rows"]), strict=True):
        give_mean_gradients(models, case.world_size if as_sum else 1)
        for optimizer in optimizers:
            optimizer.step()
        steps.append(all_weights(models[0].parameters()))
    return [torch.stack(steps).numpy()] * case.world_size


def weights_are(case: Case, seen: Seen) -> Miss | None:
    summed = "these are the weights of a step on the sum of the ranks' gradients, not on their mean"
    return suspected(
        near(seen, "weights", weights_of_one(case), first_step=0),
        seen,
        "weights",
        {summed: lambda: weights_of_one(case, as_sum=True)},
    )


def share(case: Case) -> int:
    """Elements of one rank's share of what asks for a gradient."""
    total = sum(parameter.numel() for parameter in learning(chain(case.inputs)))
    return -(-total // case.world_size)


@kit.each_rank
def states_are_split(case: Case, seen: Seen, rank: int) -> Miss | None:
    limit, states = STATES[case.inputs["optimizer"]] * share(case), number(seen, rank, "states")
    said = f"states of at most {limit} elements, made by the optimizer that it was given"
    return kit.unless(0 < states <= limit, said, f"{states:.0f}")


def zero_traffic(case: Case) -> list[str]:
    """A reduce-scatter and an all-gather in each step, as large as the padded buffer."""
    size = 4 * share(case) * case.world_size
    return [f"reduce_scatter {size}", f"all_gather {size}"] * STEPS


@kit.each_rank
def zeroed(case: Case, seen: Seen, rank: int) -> Miss | None:
    is_zero = made_by(seen, rank) and number(seen, rank, "stale") == 0
    return kit.unless(is_zero, "no gradient left after zero_grad()", "one that is not zero")


OPTIMIZER = Task(
    **kit.about("zero.optimizer"),
    draw=each_world(optimizer_case, (LAST, "momentum"), usual=("Adam",)),
    observe=observe_optimizer,
    own={"rows": entry},
    essential=("weights", "states in shards"),
    properties={
        "weights": Property(4, weights_are),
        "states in shards": Property(3, states_are_split),
        "collectives": Property(3, kit.made_are(zero_traffic)),
        "zero_grad": Property(1, zeroed),
    },
)
