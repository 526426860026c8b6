"""Diagnosis of a wrong gradient: kind, factor and axis, in one sentence for the engine's maintainer."""

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
    return next(_explanations(_Gradient(name, tensors, wanted.double(), layout, close, apart), gradients))


@dataclass(frozen=True)
class _Gradient:
    """A parameter's gradient on every rank, and as one process has it."""

    name: str
    tensors: Mapping[int, Tensor]
    right: Tensor
    layout: Layout
    close: float
    apart: float

    def alike(self, tensor: Tensor, other: Tensor) -> bool:
        """Whether they differ by rounding alone."""
        return bool((tensor - other).norm() <= self.close * other.norm())

    def place_of(self, tensor: Tensor, parts: Sequence[Tensor]) -> int:
        """Of the first part that is like it; -1: none is."""
        return next((place for place, part in enumerate(parts) if self.alike(tensor, part)), -1)

    def is_everywhere(self, other: Tensor) -> bool:
        """Whether every rank has this."""
        return all(self.alike(tensor, other) for tensor in self.tensors.values())

    def factor(self, rank: int) -> float:
        """Of the reference, that comes nearest to what a rank has."""
        return float((self.tensors[rank] * self.right).sum() / self.right.square().sum())

    def finding(self, kind: Kind, why: str, axes: tuple[str, ...] = (), factor: float | None = None) -> Finding:
        """That this is what is wrong."""
        return Finding(self.name, kind, factor, axes, f"`{self.name}`: {why}", self.apart)


def _explanations(gradient: _Gradient, others: Mapping[str, Tensor | None]) -> Iterator[Finding]:
    """From the simplest to the last, which always fits."""
    yield from _scaled(gradient)
    yield from _not_reduced(gradient)
    yield from _on_some_ranks(gradient)
    right, shape = gradient.right, gradient.right.shape
    for name, other in others.items():
        if name == gradient.name or other is None or other.shape != shape:
            continue
        if gradient.is_everywhere(other.double()):
            yield gradient.finding("another's", f"has the gradient of `{name}`")
    if right.dim() == 2 and gradient.is_everywhere(right.T.reshape(shape)):
        yield gradient.finding("transposed", "is transposed")
    yield from _shards(gradient)
    yield from _exchanged(gradient)
    yield gradient.finding(
        "unrelated",
        f"{gradient.apart:.2g} of its norm away from the reference, and no factor, sum or shard explains it",
    )


def _scaled(gradient: _Gradient) -> Iterator[Finding]:
    """Where all ranks have one multiple of the reference."""
    one = gradient.factor(next(iter(gradient.tensors)))
    if abs(one) <= gradient.close or not gradient.is_everywhere(one * gradient.right):
        return
    kind: Kind = "factor"
    axes: tuple[str, ...] = ()
    told, near = one, max(gradient.close, 1e-3)
    if abs(one + 1) <= gradient.close:
        kind, told, why = "sign", -1.0, "the sign is wrong"
    elif size := _size_of(one, gradient.layout, near):
        told, axes = size.factor, size.axes
        why = f"the size of {size.words}: " + (
            "divided by it once too often, or a sum over it that is missing"
            if abs(one) < 1
            else "summed over it once too often, or not divided by it"
        )
    elif size := _size_of(one * one, gradient.layout, near):  # what is clipped by a norm
        axes = size.axes
        why = f"the root of the size of {size.words}: a norm whose squares are summed over it once too often"
    else:
        why = "the size of no axis"
    yield gradient.finding(kind, f"{told:.4g} times the reference, {why}", axes, one)


def _not_reduced(gradient: _Gradient) -> Iterator[Finding]:
    """Where what the ranks have adds up to the reference, or is it on average."""
    for axes in _subsets(gradient.layout):
        together = gradient.layout.together(axes)
        groups = [[gradient.tensors[rank] for rank in group if rank in gradient.tensors] for group in together]
        groups = [group for group in groups if group]
        sums = [sum(group, torch.zeros_like(gradient.right)) for group in groups]
        means = [total / len(group) for total, group in zip(sums, groups, strict=True)]
        kinds: tuple[tuple[Kind, list[Tensor]], ...] = (("not summed", sums), ("not averaged", means))
        for kind, parts in kinds:
            if all(gradient.alike(part, gradient.right) for part in parts) and any(len(group) > 1 for group in groups):
                why = (
                    f"each rank of {_and(axes)} has its own part; {kind.removeprefix('not ')} over {_and(axes)} they "
                    "are the reference: that reduction is missing"
                )
                yield gradient.finding(kind, why, axes)


def _on_some_ranks(gradient: _Gradient) -> Iterator[Finding]:
    """Where others are right."""
    ranks = len(gradient.tensors)
    wrong = [rank for rank, tensor in gradient.tensors.items() if not gradient.alike(tensor, gradient.right)]
    if len(wrong) < ranks:
        why = f"right on {ranks - len(wrong)} of {ranks} ranks; {ranks_are(wrong, 'is', 'are')} wrong"
        yield gradient.finding("rank", why, factor=gradient.factor(wrong[0]))


def _shards(gradient: _Gradient) -> Iterator[Finding]:
    """Where all ranks are right except for one chunk of a dimension, each of the others by its own size."""
    for axes, size in _cuts(gradient.layout):
        for dim in range(gradient.right.dim()):
            if gradient.right.shape[dim] % size:
                continue
            bad: set[int] = set()
            for tensor in gradient.tensors.values():
                parts = zip(tensor.chunk(size, dim), gradient.right.chunk(size, dim), strict=True)
                bad |= {place for place, (mine, other) in enumerate(parts) if not gradient.alike(mine, other)}
            if len(bad) == 1:
                why = f"right except for part {min(bad)} of {size} along its dimension {dim}, as {_and(axes)} cuts it"
                yield gradient.finding("shard", why, axes)


def _exchanged(gradient: _Gradient) -> Iterator[Finding]:
    """Where all ranks have the right chunks of a dimension, or of the flat gradient, in each other's places."""
    right = gradient.right
    for axes, size in _cuts(gradient.layout):
        for dim, whole in [*((dim, right) for dim in range(right.dim())), (0, right.flatten())]:
            if whole.shape[dim] % size:
                continue
            parts, orders = whole.chunk(size, dim), set()
            for tensor in gradient.tensors.values():
                held = tensor.reshape(whole.shape).chunk(size, dim)
                orders.add(tuple(gradient.place_of(mine, parts) for mine in held))
            (order, *others) = orders
            if not others and sorted(order) == list(range(size)) and order != tuple(range(size)):
                where = f"along its dimension {dim}" if whole.shape == right.shape else "of it, flattened,"
                why = (
                    f"the parts {where} stand in the order {', '.join(map(str, order))}, as {_and(axes)} cuts it: "
                    "ranks have each other's"
                )
                yield gradient.finding("another rank's", why, axes)


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
