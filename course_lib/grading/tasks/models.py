"""Small models for exercises: chains of layers with what real models have, a frozen, a shared and an unused weight."""

import random
from collections.abc import Iterable, Iterator, Sequence
from inspect import isfunction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from course_lib.grading.rules import Seen, number
from course_lib.grading.task import Case, Miss
from course_lib.grading.tasks import kit
from course_lib.grading.tasks.drawing import WORLDS, numbers

STEPS = 2
"""Backward passes in a case: a list that is never cleared shows in the second."""
UNUSED = "unused"


class BareOptimizer(torch.optim.Optimizer):
    """torch's own without its marks for the compiler, for which each rank would import torch._dynamo, for a second."""


for _name, _method in vars(torch.optim.Optimizer).items():
    if isfunction(_method) and hasattr(_method, "__wrapped__"):
        setattr(BareOptimizer, _name, _method.__wrapped__)


def chain(inputs: dict, key: str = "weights") -> nn.Sequential:
    """Linear layers without bias, with a tanh after each but the last.

    ``inputs`` may name layers: ``frozen``, whose weight has no gradient, and ``tied``, two that have one weight; and
    may hold ``unused``, a parameter that no forward uses.
    """
    layers: list[nn.Module] = []
    for weight in inputs[key]:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = kit.tensor(weight)
        layers += [linear, nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    if inputs.get("frozen") is not None:
        model[2 * inputs["frozen"]].requires_grad_(False)
    if inputs.get("tied"):
        first, second = inputs["tied"]
        model[2 * second].weight = model[2 * first].weight
    if inputs.get(UNUSED) is not None:
        model.register_parameter(UNUSED, nn.Parameter(kit.tensor(inputs[UNUSED])))
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient, each once, in the model's order."""
    return [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name != UNUSED]


def others(model: nn.Module) -> list[nn.Parameter]:
    """The frozen and the unused ones."""
    mine = {id(parameter) for parameter in trained(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in mine]


def widths(rng: random.Random, layers: int) -> list[np.ndarray]:
    """Weights of a chain of layers."""
    sizes = [rng.randrange(2, 7) for _ in range(layers + 1)]
    return [numbers(rng, after, before) for before, after in pairwise(sizes)]


def rows_of_steps(rng: random.Random, world: int, width: int) -> list[list[np.ndarray]]:
    """By rank, the rows of each step, shape (4, width)."""
    return [[numbers(rng, 4, width) for _ in range(STEPS)] for _ in range(world)]


def plain_case(rng: random.Random, world: int) -> dict:
    """A chain in which every weight is trained."""
    weights = widths(rng, rng.randrange(3, 6))
    return {"weights": weights, "rows": rows_of_steps(rng, world, weights[0].shape[1])}


def odd_case(rng: random.Random, world: int, multiple: int = 1) -> dict:
    """A chain with a frozen layer, a weight that two layers share, and a parameter beside it that is never used.

    Each weight's number of elements is divisible by ``multiple``.
    """
    width = multiple * rng.randrange(2, 4)
    before, after = (multiple * rng.randrange(1, 4) for _ in range(2))
    square = [numbers(rng, width, width) for _ in range(rng.randrange(3, 5))]
    weights = [numbers(rng, width, before), *square, numbers(rng, after, width)]
    tied = [1, len(square)]
    weights[tied[1]] = weights[tied[0]]
    return {
        "weights": weights,
        "tied": tied,
        "frozen": rng.choice((0, 2)),
        UNUSED: numbers(rng, 3),
        "rows": rows_of_steps(rng, world, before),
    }


def draw_models(rng: random.Random, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """A plain chain on two ranks, and odd ones on each number of ranks."""
    return [Case(2, plain_case(rng, 2)), *(Case(world, odd_case(rng, world)) for world in worlds)]


def flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([array.reshape(-1) for array in arrays])


def learning(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that ask for a gradient, each once, whether they get one or not."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def all_weights(parameters: Iterable[Tensor]) -> Tensor:
    """A copy of parameters as they are, one behind the other."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).clone()


def all_gradients(parameters: Iterable[Tensor]) -> Tensor:
    """A copy of their gradients, one behind the other; zeros where there is none."""
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]).clone()


def gradients_of(model: nn.Module) -> Tensor:
    """A copy of the gradients of what is trained, one behind the other."""
    return all_gradients(trained(model))


@torch.no_grad()
def descend(parameters: Iterable[Tensor], rate: float) -> None:
    """A step of SGD; parameters without a gradient stay."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.sub_(rate * parameter.grad)


def give_mean_gradients(models: Sequence[nn.Module], factor: float = 1.0) -> None:
    """Put the mean of the models' gradients, or so many times it, in the place of each one's."""
    for copies in zip(*(learning(model) for model in models), strict=True):
        gradients = [copy.grad for copy in copies if copy.grad is not None]
        for copy in copies if gradients else ():
            copy.grad = torch.stack(gradients).mean(0) * factor


def backwards(model: nn.Module, rows: Sequence[np.ndarray]) -> Iterator[int]:
    """Run the steps' backwards on fresh gradients, and yield after each."""
    for step, batch in enumerate(rows):
        model.zero_grad()
        model(torch.from_numpy(batch)).square().mean().backward()
        yield step


def local_gradients(case: Case) -> list[np.ndarray]:
    """By rank, the gradients that its own rows bring, shape (steps, elements of what is trained)."""
    made = []
    for rows in case.inputs["rows"]:
        model = chain(case.inputs)
        made.append(np.stack([gradients_of(model).numpy() for _ in backwards(model, rows)]))
    return made


def mean_gradients(case: Case) -> list[np.ndarray]:
    """For each rank the mean of what all ranks' rows bring, shape (steps, elements)."""
    return [np.mean(local_gradients(case), axis=0)] * case.world_size


@kit.each_rank
def nothing_elsewhere(case: Case, seen: Seen, rank: int) -> Miss | None:
    is_zero = number(seen, rank, "elsewhere") == 0
    return kit.unless(is_zero, "no gradient at frozen and unused parameters", "one that is not zero")


mean_gradient = kit.all_of(kit.equals("gradient", mean_gradients), nothing_elsewhere)
"""A rule: each step leaves the mean gradient, and nothing at the frozen and the unused parameters."""


def elsewhere(model: nn.Module) -> float:
    """The largest gradient of a frozen or an unused parameter."""
    return max((float(p.grad.abs().max()) for p in others(model) if p.grad is not None), default=0.0)
