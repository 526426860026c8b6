"""Draws the inputs of cases, and selects the part that a rank is given."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from course_lib.grading.task import Case, Part

if TYPE_CHECKING:
    import numpy as np

WORLDS = (1, 2, 3)
"""World sizes of the public cases."""

LAST = -1
"""The largest of the world sizes that cases are drawn for."""
Inputs = Callable[..., dict]


def numbers(rng: random.Random, *shape: int) -> "np.ndarray":
    """fp32 from a normal distribution, rounded to 1/64 so that sums of a few are exact in any order."""
    import numpy as np  # here: tasks of plain arithmetic do without

    drawn = np.random.default_rng(rng.randrange(2**32)).standard_normal(shape)
    return (np.round(drawn * 64) / 64).astype(np.float32)


def reals(rng: random.Random, *shape: int) -> "np.ndarray":
    """fp32 from a normal distribution, with all their bits: none lies between two numbers of 8 bits to the last one."""
    import numpy as np

    return np.random.default_rng(rng.randrange(2**32)).standard_normal(shape).astype(np.float32)


def whole(rng: random.Random, low: int, high: int, *shape: int) -> "np.ndarray":
    """int64 from ``low`` to ``high`` - 1."""
    import numpy as np

    return np.random.default_rng(rng.randrange(2**32)).integers(low, high, shape)


def each_world(
    inputs: Inputs, *more: tuple[Any, ...], usual: tuple[Any, ...] = (), worlds: Sequence[int] = WORLDS
) -> Callable[..., list[Case]]:
    """A task's `draw`, from a function (rng, world size, ...) -> inputs; other world sizes may be given to it.

    Args:
        inputs: the function.
        more: cases after one of each world size: `LAST` or a number of ranks, and what else the function is given.
        usual: what else the function is given in all other cases.
        worlds: of the public cases.
    """

    def draw(rng: random.Random, worlds: Sequence[int] = worlds) -> list[Case]:
        cases = [*((world, *usual) for world in worlds), *more]
        cases = [(worlds[-1] if world == LAST else world, *given) for world, *given in cases]
        return [Case(world, inputs(rng, world, *given)) for world, *given in cases]

    return draw


def each_total(
    inputs: Inputs, public: Mapping[int, Sequence[int]], least: int, *more: tuple[Any, ...]
) -> Callable[..., list[Case]]:
    """A task's `draw` where rows are dealt out: fewer rows than ranks, as many on each, and some left over.

    Args:
        inputs: a function (rng, world size, rows, ...) -> inputs.
        public: by world size the numbers of rows of the public cases.
        least: rows on each rank, where some are left over.
        more: cases after those, each with its world size and all that the function is given.
    """

    def draw(rng: random.Random, worlds: Sequence[int] | None = None) -> list[Case]:
        totals = {
            world: (
                rng.choice((1, world - 1)),
                rng.randrange(2, 5) * world,
                rng.randrange(least, least + 3) * world + rng.randrange(1, world),
            )
            for world in worlds or ()
        } or public
        cases = [(world, total) for world, own in totals.items() for total in own]
        return [Case(world, inputs(rng, world, *given)) for world, *given in (*cases, *more)]

    return draw


def alone(inputs: Callable[[random.Random], dict], count: int = 4) -> Callable[..., list[Case]]:
    """A task's `draw` for a task without ranks: ``count`` cases."""
    return in_turn(lambda rng, place: inputs(rng), count)


def in_turn(inputs: Callable[[random.Random, int], dict], count: int = 4) -> Callable[..., list[Case]]:
    """A task's `draw` without ranks, where a case's place, from 0, decides of which kind it is."""

    def draw(rng: random.Random, count: int = count) -> list[Case]:
        return [Case(1, inputs(rng, place)) for place in range(count)]

    return draw


def entry(values: Sequence[Any], rank: int, world_size: int) -> list[Any]:
    """A rank's part of a list with an entry for each rank: its own, and None for the others'."""
    return [value if i == rank else None for i, value in enumerate(values)]


def along(axis: int) -> Part:
    """A rank's part of an array that the ranks split along an axis: its own piece, and zeros."""

    def piece(values: "np.ndarray", rank: int, world_size: int) -> "np.ndarray":
        import numpy as np

        pieces = np.split(values, world_size, axis)
        return np.concatenate([part * (i == rank) for i, part in enumerate(pieces)], axis)

    return piece


def every_nth(values: "np.ndarray", rank: int, world_size: int) -> "np.ndarray":
    """A rank's part of rows that are dealt out to the ranks one by one: its own, and zeros."""
    import numpy as np

    return values * (np.arange(len(values)) % world_size == rank)[:, None].astype(values.dtype)
