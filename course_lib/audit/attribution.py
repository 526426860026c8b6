"""Attribution of a wrong gradient to ranks' batches, by least squares over each batch's own gradient.

One process computes the gradient of each rank's batch by itself. Where the reference is a weighted sum of these, as in
data parallelism, a wrong gradient often is one too, with other weights: each batch counted alike instead of by its
targets, one left out, or another rank's in its place.
"""

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib.audit.finding import Finding, Kind, ranks_are
from course_lib.audit.layouts import Layout
from course_lib.audit.subject import Record
from course_lib.audit.verdict import Verdict
from course_lib.parallel.trees import map_tensors

UNSURE = ("unrelated", "rank", "shard")
"""Kinds that a weighted sum of batches may explain better: a batch may have no part in a shard."""
PRECISION = 1e-3
"""Of a weight, at least: below it weights are alike."""


Parts = Sequence[Mapping[str, Tensor | None]]
"""The gradient of each parameter, by batch."""


def attribute(
    verdict: Verdict, reference: Record, observed: Sequence[Record], gradients_of: Callable[[list[Any]], Parts]
) -> None:
    """Explain in a verdict what the gradients of the ranks' own batches explain.

    Args:
        verdict: whose findings are changed, or which is told why that was not tried.
        reference: of one process.
        observed: of the ranks.
        gradients_of: one process's gradients of batches, each by itself.
    """
    batches, owner = distinct([record.batch for record in observed])
    if len(batches) < 2:
        return
    try:
        parts = gradients_of(batches)
    except Exception as error:  # whatever a foreign loss makes of a part of its batch
        told = str(error).partition("\n")[0]
        verdict.untried = (
            "what the ranks' own batches explain was not tried, since one process does not take them: "
            f"{type(error).__name__}{told and f': {told}'}"
        )
    else:
        verdict.gradients = attributed(
            verdict.gradients, reference, observed, verdict.layout, parts, owner, verdict.within
        )


def attributed(
    findings: Sequence[Finding],
    reference: Record,
    observed: Sequence[Record],
    layout: Layout,
    parts: Parts,
    owner: Sequence[int],
    within: float,
) -> list[Finding]:
    """The findings, with those explained that a weighted sum of batches explains.

    Args:
        findings: of all parameters.
        reference: of one process.
        observed: of the ranks.
        layout: where the ranks are.
        parts: by distinct batch, the gradient of each parameter, computed by one process.
        owner: by rank, which of the batches is its own.
        within: relative difference that is rounding.
    """
    open_ones = [f.name for f in findings if f.kind in UNSURE and _has(f.name, reference, observed, parts)]
    everything = [name for name in reference.gradients if _has(name, reference, observed, parts)]
    if len(parts) < 2 or not open_ones:
        return list(findings)
    close = min(max(4 * within, PRECISION), min(f.apart for f in findings if f.name in open_ones) / 10)
    right = _weights(everything, reference.gradients, parts, close)
    if right is None:
        return list(findings)
    axes = tuple(
        axis
        for axis in layout.used
        if any(owner[rank] != owner[group[0]] for group in layout.together((axis,)) for rank in group)
    )
    together = _explained(open_ones, observed, parts, owner, right, close, axes)
    said = {name: (together or _explained([name], observed, parts, owner, right, close, axes)) for name in open_ones}
    return [
        dataclasses.replace(f, kind=why[0], axes=why[1], sentence=f"`{f.name}`: {why[2]}")
        if (why := said.get(f.name))
        else f
        for f in findings
    ]


def distinct(batches: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Those that differ from each other, and by rank which of them is its own."""
    kept: list[Any] = []
    keys: list[bytes] = []
    owner = []
    for batch in batches:
        key = pickle.dumps(map_tensors(lambda tensor: (tuple(tensor.shape), tensor.tolist()), batch))
        if key not in keys:
            keys.append(key)
            kept.append(batch)
        owner.append(keys.index(key))
    return kept, owner


def _has(name: str, reference: Record, observed: Sequence[Record], parts: Parts) -> bool:
    wanted = reference.gradients[name]
    return wanted is not None and all(
        (g := held.get(name)) is not None and g.shape == wanted.shape
        for held in [*(record.gradients for record in observed), *parts]
    )


def _weights(
    names: Sequence[str],
    gradients: Mapping[str, Tensor | None],
    parts: Parts,
    close: float,
) -> Tensor | None:
    """Of the batches, so that their weighted sum is the gradient; None where no weights are, or several."""

    def flat(held: Mapping[str, Tensor | None]) -> Tensor:
        return torch.cat([held[name].double().flatten() for name in names])  # type: ignore[union-attr]

    columns, wanted = torch.stack([flat(part) for part in parts], 1), flat(gradients)
    sizes = columns.norm(dim=0)
    if len(wanted) < 4 * len(parts) or not sizes.all() or not columns.isfinite().all():
        return None
    if float(torch.linalg.cond(columns / sizes)) > 1 / close:
        return None
    weights = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
    return weights if (columns @ weights - wanted).norm() <= close * wanted.norm() else None


def _explained(
    names: Sequence[str],
    observed: Sequence[Record],
    parts: Parts,
    owner: Sequence[int],
    right: Tensor,
    close: float,
    axes: tuple[str, ...],
) -> tuple[Kind, tuple[str, ...], str] | None:
    """Kind, axes and words for parameters that all are made of the batches in one way; None where they are not."""
    of_ranks = [_weights(names, record.gradients, parts, close) for record in observed]
    if any(weights is None for weights in of_ranks):
        return None
    taken = torch.stack([weights for weights in of_ranks if weights is not None])
    near = 4 * close * float(right.abs().max())

    def alike(a: Tensor, b: Tensor) -> bool:
        return bool((a - b).abs().max() <= near)

    one = taken[0]
    if all(alike(row, one) for row in taken):
        weighs = min(abs(one.sum()), abs(right.sum())) > near
        if weighs and not alike(one / one.sum(), right / right.sum()) and alike(one, one.mean().expand_as(one)):
            return (
                "weighed alike",
                axes,
                (
                    f"the ranks' batches weigh alike, and in one process {_listed(right / right.sum())}: a mean of the "
                    "ranks' means, whose numbers of targets differ; weigh each rank by its targets"
                ),
            )
        lost = [i for i in range(len(right)) if abs(one[i]) <= near < abs(right[i])]
        if lost and all(abs(one[i] - right[i]) <= near for i in range(len(right)) if i not in lost):
            return "batch left out", axes, f"the batch of {_ranks_of(lost, owner)} is left out of it"
        return None
    alone = [_only(row, near) for row in taken]
    wrong = [rank for rank, row in enumerate(taken) if not alike(row, right)]
    if any(alone[rank] is None for rank in wrong):
        return None
    fine = len(observed) - len(wrong)
    but = f"right on {fine} of {len(observed)} ranks; " if fine else ""
    if all(alone[rank] == owner[rank] for rank in wrong):
        own = "its own batch" if len(wrong) == 1 else "their own batches"
        return (
            "not averaged",
            axes,
            (
                f"{but}{ranks_are(wrong, 'has', 'have')} the gradient of {own} alone: the "
                f"reduction over {' and '.join(axes)} is missing there"
            ),
        )
    return (
        "another rank's",
        axes,
        but
        + "; ".join(
            f"rank {rank} has the gradient of the batch of {_ranks_of([alone[rank]], owner)}"  # type: ignore[list-item]
            for rank in wrong
        ),
    )


def _only(weights: Tensor, near: float) -> int | None:
    """The one batch that weighs anything."""
    there = [i for i, weight in enumerate(weights) if abs(weight) > near]
    return there[0] if len(there) == 1 else None


def _listed(weights: Tensor) -> str:
    return ", ".join(f"{weight:.3g}" for weight in weights)


def _ranks_of(batches: Sequence[int], owner: Sequence[int]) -> str:
    ranks = [rank for rank, batch in enumerate(owner) if batch in batches]
    return ranks_are(ranks, "", "").strip()
