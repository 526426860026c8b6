"""Deals units out to stages so that the most expensive stage costs least."""

import itertools
from collections.abc import Callable, Sequence

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

    ``add`` makes one score of a stage's cost and the score of all stages after it.
    """
    totals = [0.0, *itertools.accumulate(costs)]
    units = len(costs)
    best: dict[int, tuple[float, tuple[int, ...]]] = {
        first: (add(totals[units] - totals[first], 0.0), ()) for first in range(units)
    }  # one stage from `first` on
    for left in range(2, stages + 1):
        best = {
            first: min(
                (add(totals[cut] - totals[first], best[cut][0]), (cut, *best[cut][1]))
                for cut in range(first + 1, units - left + 2)
            )
            for first in range(units - left + 1)
        }
    return best[0]
