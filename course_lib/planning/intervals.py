"""Intervals and chances of planned numbers, from the errors of published runs.

The errors are those of the published rows that the planner is held beside (benchmarks/planner.py). How often the
intervals hold for a source that is left out when they are made, each in its turn, is in benchmarks/planner.md; how
often runs of a sweep that no error was taken from went through, by the chance told for them, in
benchmarks/planner-sweep.md.

Source: split conformal prediction, Lei et al., "Distribution-Free Predictive Inference for Regression" (arXiv
1604.04173), section 2.2, on the errors' two ends; of speed by regime where it has enough rows.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from typing import Literal

from course_lib.planning.memory import RUNTIME
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan

Quantity = Literal["tokens/s/GPU", "GiB"]
REGIMES = ("long context", "many nodes", "large dense", "small", "other")
TAIL = Fraction(1, 10)
"""Of true values that may lie beyond either end of an interval; exact, because ranks are rounded from it."""
SHARE = float(1 - 2 * TAIL)
"""Of true values that an interval is to hold."""
ENOUGH = int(1 / TAIL) - 1
"""Rows from which on a regime has intervals of its own: with fewer, none is the one in ten that lies beyond an end."""
RESERVED = (16842 / 16549.94, 5458 / 4607.5)
"""Bytes that PyTorch's allocator reserved by those that were allocated at the peak, in the two published logs that say
both (huggingface.co/nanotron/old_bench): what a GPU has to hold."""


@dataclass(frozen=True)
class Interval:
    """Between what the truth lies in ``SHARE`` of cases."""

    low: float
    high: float


def regime_of(model: Model, plan: Plan) -> str:
    """The first of REGIMES that a run is of: from 32,768 tokens, from 128 GPUs, from 30 B parameters, up to 3 B."""
    tests = (plan.sequence_length >= 32_768, plan.gpus >= 128, model.parameters >= 30e9, model.parameters <= 3e9, True)
    return REGIMES[tests.index(True)]


@functools.cache
def _errors() -> dict[str, dict[str, list[float]]]:
    """Signed errors by quantity and regime, predicted by measured less one."""
    path = resources.files("course_lib.planning") / "catalogue" / "errors.json"
    return json.loads(path.read_text(encoding="utf-8"))


def errors(quantity: Quantity, regime: str) -> list[float]:
    """Those that an interval is made of: see :func:`chosen`."""
    return chosen(_errors()[quantity], quantity, regime)


def chosen(known: Mapping[str, Sequence[float]], quantity: Quantity, regime: str) -> list[float]:
    """Of the errors by regime those to make an interval of, sorted.

    Args:
        known: errors of the quantity, by regime.
        quantity: of memory all regimes' errors are taken together: they have few rows, and bytes are counted alike in
            all of them.
        regime: of speed this one's errors are taken, or all where it has fewer than ENOUGH.
    """
    own = known.get(regime, ()) if quantity == "tokens/s/GPU" else ()
    return sorted(own if len(own) >= ENOUGH else [error for rows in known.values() for error in rows])


def interval(quantity: Quantity, predicted: float, regime: str) -> Interval:
    """The interval around a planned number.

    Args:
        quantity: ``tokens/s/GPU`` or ``GiB``.
        predicted: of the quantity's unit, or any that is proportional to it.
        regime: of REGIMES.
    """
    return around(predicted, errors(quantity, regime))


def of_hours(model: Model, plan: Plan, hours: float) -> Interval:
    """The interval around planned hours, which is that of the speed."""
    speed = interval("tokens/s/GPU", 1.0, regime_of(model, plan))
    return Interval(hours / speed.high, hours / speed.low)


def errors_changed() -> None:
    """Called when catalogue/errors.json has been written anew."""
    _errors.cache_clear()
    _of_memory.cache_clear()


def around(predicted: float, known: Sequence[float]) -> Interval:
    """The interval by known errors, sorted: with n of them the truth lies beyond each end in 1 of 10 cases at most."""
    rank = (len(known) + 1) * TAIL
    low, high = known[max(math.floor(rank) - 1, 0)], known[min(math.ceil(len(known) + 1 - rank) - 1, len(known) - 1)]
    return Interval(predicted / (1 + high), predicted / (1 + low))


@functools.cache
def _of_memory() -> tuple[float, ...]:
    return tuple(errors("GiB", ""))


def chance_that_it_fits(allocated: float, capacity: float) -> float:
    """The chance that a GPU holds what is planned: over the known errors, and what allocators reserve besides.

    Args:
        allocated: planned peak, bytes.
        capacity: of the GPU, bytes.
    Returns:
        Above 0 and below 1: as many known cases as there are say no more.
    """
    known = _of_memory()
    held = sum(allocated / (1 + error) * reserved <= capacity - RUNTIME for error in known for reserved in RESERVED)
    cases = len(known) * len(RESERVED)
    return (held + 0.5) / (cases + 1)
