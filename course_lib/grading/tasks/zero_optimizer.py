"""Lesson 05, to build: an optimizer whose states lie on one rank each, over several steps of a real model."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from course_lib.grading.recorder import Recorder
from course_lib.grading.rules import Seen, made_by, near, number, short, suspected
from course_lib.grading.task import Case, Miss, Property, Task, plain
from course_lib.grading.tasks.drawing import WORLDS, entry, numbers
from course_lib.grading.tasks.models import BareOptimizer, backwards, chain, odd_case

LESSON = "05_zero_stages"
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


def draw_optimizers(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Each number of ranks with Adam, and the last with momentum."""
    kinds = [*((world, "Adam") for world in worlds), (worlds[-1], "momentum")]
    return [Case(world, optimizer_case(rng, world, kind)) for world, kind in kinds]


def all_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


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
            weights.append(all_weights(model).clone())
        optimizer.zero_grad()
    stale = max((float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None), default=0.0)
    states = sum(value.numel() for one in made for state in one.state.values() for value in state.values())
    return {"weights": plain(torch.stack(weights)), "states": states, "stale": stale, "events": record.events}


def weights_of_one(case: Case, as_sum: bool = False) -> list[np.ndarray]:
    """The weights after each step, by one process with the mean gradient, or the sum."""
    models = [chain(case.inputs) for _ in range(case.world_size)]
    optimizers = [Optimizer(case.inputs["optimizer"], model.parameters()) for model in models]
    steps = []
    for _ in zip(
        *(backwards(model, rows) for model, rows in zip(models, case.inputs["rows"], strict=True)), strict=True
    ):
        for copies in zip(*(model.parameters() for model in models), strict=True):
            if copies[0].grad is not None:
                mean = torch.stack([copy.grad for copy in copies if copy.grad is not None]).mean(0)
                mean *= case.world_size if as_sum else 1
                for copy in copies:
                    copy.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        steps.append(all_weights(models[0]).clone())
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
    total = sum(parameter.numel() for parameter in chain(case.inputs).parameters() if parameter.requires_grad)
    return -(-total // case.world_size)


def states_are_split(case: Case, seen: Seen) -> Miss | None:
    limit = STATES[case.inputs["optimizer"]] * share(case)
    for rank in range(case.world_size):
        states = number(seen, rank, "states")
        if not 0 < states <= limit:
            return Miss(
                f"states of at most {limit} elements, made by the optimizer that it was given", f"{states:.0f}", rank
            )
    return None


def zero_traffic(case: Case, seen: Seen) -> Miss | None:
    """A reduce-scatter and an all-gather in each step, as large as the padded buffer."""
    size = 4 * share(case) * case.world_size
    right = [f"reduce_scatter {size}", f"all_gather {size}"] * STEPS
    for rank in range(case.world_size):
        if (made := made_by(seen, rank)) != right:
            return Miss(short(", ".join(right)), short(", ".join(made) or "no collective"), rank)
    return None


def zeroed(case: Case, seen: Seen) -> Miss | None:
    for rank in range(case.world_size):
        if not (made_by(seen, rank) and number(seen, rank, "stale") == 0):
            return Miss("no gradient left after zero_grad()", "one that is not zero", rank)
    return None


OPTIMIZER = Task(
    name="zero.optimizer",
    lesson=LESSON,
    function="ShardedOptimizer",
    title="Build it: an optimizer in shards",
    difficulty=5,
    importance=5,
    minutes=60,
    draw=draw_optimizers,
    observe=observe_optimizer,
    own={"rows": entry},
    essential=("weights", "states in shards"),
    properties={
        "weights": Property(4, weights_are),
        "states in shards": Property(3, states_are_split),
        "collectives": Property(3, zero_traffic),
        "zero_grad": Property(1, zeroed),
    },
)

ALL = (OPTIMIZER,)
