"""What is wrong with a gradient: the kind, the factor, the axis; in one sentence for whoever maintains the engine."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from course_lib.audit.layouts import Layout

Kind = Literal[
    "equal",
    "missing",
    "factor",
    "sign",
    "not summed",
    "not averaged",
    "weighed alike",
    "batch left out",
    "shard",
    "rank",
    "another's",
    "another rank's",
    "transposed",
    "not finite",
    "unrelated",
]


LAST = ("factor", "rank", "unrelated")
"""Kinds that say little: a factor that is the size of no axis, and what nothing explains."""
NAMED = 3
"""Parameters that a sentence names; of the others it says how many."""


@dataclass(frozen=True)
class Finding:
    """Of one parameter.

    Attributes:
        name: of the parameter.
        kind: what is wrong; "equal": nothing.
        factor: found over wanted, where that is one number.
        axes: whose size, or whose sum, explains it; empty where none does.
        sentence: for a maintainer.
        apart: norm of the difference over that of the reference, on the worst rank.
    """

    name: str
    kind: Kind
    factor: float | None = None
    axes: tuple[str, ...] = ()
    sentence: str = ""
    apart: float = 0.0

    @property
    def weight(self) -> int:
        """The less, the more the finding explains."""
        if self.kind in ("rank", "unrelated"):
            return LAST.index(self.kind)
        return -1 if self.axes or self.kind != "factor" else 0

    @property
    def cause(self) -> tuple:
        """Alike for findings that one sentence tells."""
        return (self.kind,) if self.kind == "unrelated" else (self.kind, self.axes, self.sentence.partition(": ")[2])


def sentence_of(findings: Sequence[Finding], follows: bool) -> str:
    """One sentence on all parameters that have one cause.

    Args:
        findings: with the same :attr:`Finding.cause`.
        follows: another cause is told before it.
    """
    names = ", ".join(f"`{finding.name}`" for finding in findings[:NAMED])
    more = f" and {len(findings) - NAMED} more" if len(findings) > NAMED else ""
    why = findings[0].sentence.partition(": ")[2]
    if findings[0].kind == "unrelated" and len(findings) > 1:
        least, most = (pick(finding.apart for finding in findings) for pick in (min, max))
        why = f"{least:.2g} to {most:.2g} of the norm away from the reference, and no factor, sum or shard explains it"
    if findings[0].kind == "unrelated" and follows:
        why += "; what a wrong gradient flows into is wrong too"
    return f"{names}{more}: {why}"


def explain(
    name: str,
    tensors: Mapping[int, Tensor],
    wanted: Tensor,
    gradients: Mapping[str, Tensor | None],
    layout: Layout,
    close: float,
    apart: float,
) -> Finding:
    """Say what a parameter's gradient is instead, in the simplest words that fit.

    Args:
        name: of the parameter.
        tensors: what the ranks have, float64, by rank.
        wanted: by one process.
        gradients: of all parameters, by one process.
        layout: where the ranks are.
        close: relative difference that is rounding.
        apart: relative difference of the worst rank.
    """
    return next(_explanations(name, tensors, wanted.double(), gradients, layout, close, apart))


def _explanations(
    name: str,
    tensors: Mapping[int, Tensor],
    right: Tensor,
    gradients: Mapping[str, Tensor | None],
    layout: Layout,
    close: float,
    apart: float,
) -> Iterator[Finding]:
    """From the simplest to the last, which always fits."""

    def alike(tensor: Tensor, other: Tensor = right) -> bool:
        return bool((tensor - other).norm() <= close * other.norm())

    factors = {rank: float((tensor * right).sum() / right.square().sum()) for rank, tensor in tensors.items()}
    one = next(iter(factors.values()))
    if all(alike(tensor, one * right) for tensor in tensors.values()) and abs(one) > close:
        kind: Kind = "sign" if abs(one + 1) <= close else "factor"
        axes: tuple[str, ...] = ()
        told, near = one, max(close, 1e-3)
        if kind == "sign":
            told, why = -1.0, "the sign is wrong"
        elif size := _size_of(one, layout, near):
            told, axes = size.factor, size.axes
            why = f"the size of {size.words}: " + (
                "divided by it once too often, or a sum over it that is missing"
                if abs(one) < 1
                else "summed over it once too often, or not divided by it"
            )
        elif size := _size_of(one * one, layout, near):  # what is clipped by a norm
            axes = size.axes
            why = f"the root of the size of {size.words}: a norm whose squares are summed over it once too often"
        else:
            why = "the size of no axis"
        yield Finding(name, kind, one, axes, f"`{name}`: {told:.4g} times the reference, {why}", apart)

    for axes in _subsets(layout):  # what the ranks have adds up to the reference
        groups = [[rank for rank in group if rank in tensors] for group in layout.together(axes)]
        groups = [group for group in groups if group]
        sums = [sum((tensors[rank] for rank in group), torch.zeros_like(right)) for group in groups]
        for kind, parts in (
            ("not summed", sums),
            ("not averaged", [s / len(g) for s, g in zip(sums, groups, strict=True)]),
        ):
            if all(alike(part) for part in parts) and any(len(group) > 1 for group in groups):
                verb = kind.removeprefix("not ")
                yield Finding(
                    name,
                    kind,
                    None,
                    axes,
                    f"`{name}`: each rank of {_and(axes)} has its own part; {verb} "
                    f"over {_and(axes)} they are the reference: that reduction is missing",
                    apart,
                )

    wrong = [rank for rank, tensor in tensors.items() if not alike(tensor)]
    if len(wrong) < len(tensors):
        where = ranks_are(wrong, "is", "are")
        yield Finding(
            name,
            "rank",
            factors[wrong[0]],
            (),
            f"`{name}`: right on {len(tensors) - len(wrong)} of {len(tensors)} ranks; {where} wrong",
            apart,
        )
    for other, gradient in gradients.items():
        if (
            other != name
            and gradient is not None
            and gradient.shape == right.shape
            and all(alike(tensor, gradient.double()) for tensor in tensors.values())
        ):
            yield Finding(name, "another's", None, (), f"`{name}`: has the gradient of `{other}`", apart)
    if right.dim() == 2 and all(alike(tensor, right.T.reshape(right.shape)) for tensor in tensors.values()):
        yield Finding(name, "transposed", None, (), f"`{name}`: is transposed", apart)
    yield from _shards(name, tensors, right, layout, close, apart)
    yield from _exchanged(name, tensors, right, layout, close, apart)
    yield Finding(
        name,
        "unrelated",
        None,
        (),
        f"`{name}`: {apart:.2g} of its norm away from the reference, and no factor, sum or shard explains it",
        apart,
    )


def _shards(
    name: str, tensors: Mapping[int, Tensor], right: Tensor, layout: Layout, close: float, apart: float
) -> Iterator[Finding]:
    """Where all ranks are right but for one chunk of a dimension, each of the others by its own size."""
    for axes, size in _cuts(layout):
        for dim in range(right.dim()):
            if right.shape[dim] % size:
                continue
            bad: set[int] = set()
            for tensor in tensors.values():
                parts = zip(tensor.chunk(size, dim), right.chunk(size, dim), strict=True)
                bad |= {
                    place for place, (mine, other) in enumerate(parts) if (mine - other).norm() > close * other.norm()
                }
            if len(bad) == 1:
                yield Finding(
                    name,
                    "shard",
                    None,
                    axes,
                    f"`{name}`: right but for part {min(bad)} of {size} along "
                    f"its dimension {dim}, as {_and(axes)} cuts it",
                    apart,
                )


def _exchanged(
    name: str, tensors: Mapping[int, Tensor], right: Tensor, layout: Layout, close: float, apart: float
) -> Iterator[Finding]:
    """Where all ranks have the right chunks of a dimension, or of the flat gradient, in each other's places."""
    for axes, size in _cuts(layout):
        for dim, whole in [*((dim, right) for dim in range(right.dim())), (0, right.flatten())]:
            if whole.shape[dim] % size:
                continue
            parts, orders = whole.chunk(size, dim), set()
            for tensor in tensors.values():
                held = tensor.reshape(whole.shape).chunk(size, dim)
                orders.add(
                    tuple(
                        next(
                            (place for place, part in enumerate(parts) if (mine - part).norm() <= close * part.norm()),
                            -1,
                        )
                        for mine in held
                    )
                )
            (order, *others) = orders
            if not others and sorted(order) == list(range(size)) and order != tuple(range(size)):
                where = f"along its dimension {dim}" if whole.shape == right.shape else "of it, flattened,"
                yield Finding(
                    name,
                    "another rank's",
                    None,
                    axes,
                    f"`{name}`: the parts {where} stand in the order "
                    f"{', '.join(map(str, order))}, as {_and(axes)} cuts it: ranks have each other's",
                    apart,
                )


def _cuts(layout: Layout) -> Iterator[tuple[tuple[str, ...], int]]:
    """Axes, and into how many parts they cut a tensor together."""
    for axes in _subsets(layout):
        yield axes, math.prod(layout.used[axis] for axis in axes)


class _Size(NamedTuple):
    """A factor as the size of axes: it or its inverse, the axes, and their names in words."""

    factor: float
    axes: tuple[str, ...]
    words: str


def _size_of(factor: float, layout: Layout, close: float) -> _Size | None:
    """The fewest axes whose product, or its inverse, a factor is; of axes of one size all are named."""
    for axes, size in _cuts(layout):
        for value in (size, 1 / size):
            if abs(abs(factor) - value) < close * value:
                same = tuple(axis for axis in layout.used if layout.used[axis] == size) if len(axes) == 1 else axes
                words = " or ".join(same) if len(axes) == 1 else _and(axes) + " together"
                return _Size(math.copysign(value, factor), same, words)
    return None


def _subsets(layout: Layout) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(layout.used) + 1):
        yield from itertools.combinations(layout.used, count)


def _and(axes: Sequence[str]) -> str:
    return " and ".join(axes)


def ranks_are(ranks: Sequence[int], one: str, more: str) -> str:
    """``rank 1 has``, or ``ranks 1, 3 have``."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {more}"
