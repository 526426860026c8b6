"""What is wrong with a gradient: the kind, the factor, the axis; in one sentence for whoever maintains the engine."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from course_lib.audit.layouts import Layout

Kind = Literal["equal", "missing", "factor", "sign", "not summed", "not averaged", "shard", "rank", "another's",
               "unrelated"]


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


def explain(name: str, tensors: Mapping[int, Tensor], wanted: Tensor, gradients: Mapping[str, Tensor | None],
            layout: Layout, close: float, apart: float) -> Finding:
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


def _explanations(name: str, tensors: Mapping[int, Tensor], right: Tensor, gradients: Mapping[str, Tensor | None],
                  layout: Layout, close: float, apart: float) -> Iterator[Finding]:
    """From the simplest to the last, which always fits."""
    def alike(tensor: Tensor, other: Tensor = right) -> bool:
        return bool((tensor - other).norm() <= close * other.norm())

    factors = {rank: float((tensor * right).sum() / right.square().sum()) for rank, tensor in tensors.items()}
    one = next(iter(factors.values()))
    if all(alike(tensor, one * right) for tensor in tensors.values()) and abs(one) > close:
        axes = _axes_of_size(one, layout, max(close, 1e-3))
        kind: Kind = "sign" if abs(one + 1) <= close else "factor"
        if kind == "sign":
            why = "the sign is wrong"
        elif axes and one < 1:
            why = f"the size of {_join(axes)}: divided by it once too often, or a sum over it that is missing"
        elif axes:
            why = f"the size of {_join(axes)}: summed over it once too often, or not divided by it"
        elif roots := _axes_of_size(one * one, layout, max(close, 1e-3)):  # what is clipped by a norm
            axes = roots
            why = f"the root of the size of {_join(axes)}: a norm whose squares are summed over it once too often"
        else:
            why = "the size of no axis"
        yield Finding(name, kind, one, axes, f"`{name}`: {one:.4g} times the reference, {why}", apart)

    for axes in _subsets(layout):  # what the ranks have adds up to the reference
        groups = [[rank for rank in group if rank in tensors] for group in layout.together(axes)]
        groups = [group for group in groups if group]
        sums = [sum((tensors[rank] for rank in group), torch.zeros_like(right)) for group in groups]
        for kind, parts in (("not summed", sums),
                            ("not averaged", [s / len(g) for s, g in zip(sums, groups, strict=True)])):
            if all(alike(part) for part in parts) and any(len(group) > 1 for group in groups):
                verb = kind.removeprefix("not ")
                yield Finding(name, kind, None, axes, f"`{name}`: each rank of {_join(axes)} has its own part; {verb} "
                              f"over {_join(axes)} they are the reference: that reduction is missing", apart)

    wrong = [rank for rank, tensor in tensors.items() if not alike(tensor)]
    if len(wrong) < len(tensors):
        where = ranks_are(wrong, "is", "are")
        yield Finding(name, "rank", factors[wrong[0]], (), f"`{name}`: right on {len(tensors) - len(wrong)} of "
                      f"{len(tensors)} ranks; {where} wrong", apart)
    for other, gradient in gradients.items():
        if other != name and gradient is not None and gradient.shape == right.shape and all(
                alike(tensor, gradient.double()) for tensor in tensors.values()):
            yield Finding(name, "another's", None, (), f"`{name}`: has the gradient of `{other}`", apart)
    yield from _shards(name, tensors, right, layout, close, apart)
    yield Finding(name, "unrelated", None, (), f"`{name}`: {apart:.2g} of its norm away from the reference, and no "
                  "factor, sum or shard explains it", apart)


def _shards(name: str, tensors: Mapping[int, Tensor], right: Tensor, layout: Layout, close: float, apart: float
            ) -> Iterator[Finding]:
    """Where all ranks are right but for one chunk of a dimension."""
    for axis, size in layout.used.items():
        for dim in range(right.dim()):
            if right.shape[dim] % size:
                continue
            bad: set[int] = set()
            for tensor in tensors.values():
                parts = zip(tensor.chunk(size, dim), right.chunk(size, dim), strict=True)
                bad |= {place for place, (mine, other) in enumerate(parts)
                        if (mine - other).norm() > close * right.norm()}
            if 0 < len(bad) < size:
                yield Finding(name, "shard", None, (axis,), f"`{name}`: right but for part {min(bad)} of {size} along "
                              f"its dimension {dim}, as {axis} cuts it", apart)


def _axes_of_size(factor: float, layout: Layout, close: float) -> tuple[str, ...]:
    """The fewest axes whose product, or its inverse, a factor is; those first that no other axes share."""
    for axes in _subsets(layout):
        size = 1.0
        for axis in axes:
            size *= layout.used[axis]
        if min(abs(abs(factor) - size) / size, abs(abs(factor) * size - 1)) < close:
            same = [axis for axis in layout.used if layout.used[axis] == size] if len(axes) == 1 else list(axes)
            return tuple(same)
    return ()


def _subsets(layout: Layout) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(layout.used) + 1):
        yield from itertools.combinations(layout.used, count)


def _join(axes: Sequence[str]) -> str:
    return " or ".join(axes) if len(axes) > 1 else axes[0]


def ranks_are(ranks: Sequence[int], one: str, more: str) -> str:
    """``rank 1 has``, or ``ranks 1, 3 have``."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {more}"
