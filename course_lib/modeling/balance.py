"""What each unit of a model costs, and how to deal units out to stages so that the dearest stage costs least."""

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course_lib.errors import ConfigError


def deal_out(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Contiguous stages of at least one unit each: the dearest costs least; of such, those with the least squares.

    Args:
        costs: of each unit, in order.
        stages: from 1 to the number of units.
    Returns:
        The first unit of each stage but the first.
    Raises:
        ConfigError: another number of stages.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(f"{stages} stages from {len(costs)} units", f"take from 1 to {len(costs)}")
    dearest, _ = _best(costs, stages, max)
    limit = dearest * (1 + 1e-9)
    _, cuts = _best(costs, stages, lambda cost, rest: rest + cost**2 if cost <= limit else float("inf"))
    return cuts


def _best(costs: Sequence[float], stages: int, add: Callable[[float, float], float]) -> tuple[float, tuple[int, ...]]:
    """The least score and its cuts, by dynamic programming: the first stage, then the best of what is left.

    Args:
        add: the score of a stage's cost and of the score of all stages after it.
    """
    totals = [0.0, *itertools.accumulate(costs)]
    units = len(costs)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        first: (add(totals[units] - totals[first], 0.0), ()) for first in range(units)}  # one stage from `first` on
    for left in range(2, stages + 1):
        best = {first: min((add(totals[cut] - totals[first], best[cut][0]), (cut, *best[cut][1]))
                           for cut in range(first + 1, units - left + 2)) for first in range(units - left + 1)}
    return best[0]


def count_flops(model: nn.Module, front: Sequence[str], blocks: Sequence[str], length: int) -> list[float]:
    """FLOPs of one sequence's forward: of the front, each block, and what comes after them.

    Matrix products and attention scores are counted, by running the model; lookups and sums are not.

    Args:
        model: takes ``input_ids``.
        front: names of the modules before the blocks.
        blocks: names of the blocks.
        length: tokens.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # others hide the scores
        _forward(model, length)
    counts = {name.partition(".")[2]: sum(each.values()) for name, each in counter.get_flop_counts().items()}
    before, within = sum(counts.get(name, 0) for name in front), [float(counts[name]) for name in blocks]
    return [float(before), *within, counter.get_total_flops() - before - sum(within)]


def measure_seconds(model: nn.Module, blocks: Sequence[str], length: int, tries: int = 5) -> list[float]:
    """Seconds of one sequence's forward on the CPU, by the same units; the shortest of some tries."""
    marks: list[float] = []
    modules = [model.get_submodule(name) for name in blocks]
    handles = [block.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter())) for block in modules]
    handles.append(modules[-1].register_forward_hook(lambda *_: marks.append(time.perf_counter())))
    tried = []
    for _ in range(tries):
        marks[:] = [time.perf_counter()]
        _forward(model, length)
        marks.append(time.perf_counter())
        tried.append([end - start for start, end in itertools.pairwise(marks)])
    for handle in handles:
        handle.remove()
    return [min(unit) for unit in zip(*tried, strict=True)]


def _forward(model: nn.Module, length: int) -> None:
    """One sequence of the same token, without gradients."""
    device = next(model.parameters()).device
    with torch.no_grad():
        model(input_ids=torch.ones(1, length, dtype=torch.long, device=device))
