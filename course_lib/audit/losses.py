"""Rules that make one process's loss of the ranks' losses: a mean, a sum of shares, or weighted by targets."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from course_lib.audit.layouts import Layout
from course_lib.audit.subject import Record
from course_lib.parallel.trees import tensors_of

IGNORED = -100
"""Index of a target that does not count, as in :func:`torch.nn.functional.cross_entropy`."""


def compared(reference: Record, observed: Sequence[Record], layout: Layout, within: float) -> tuple[list[float], str]:
    """Relative difference of each step's loss, and a sentence on how the ranks' make it up; none for their mean.

    Args:
        reference: of one process.
        observed: of the ranks.
        layout: where the ranks are.
        within: relative difference that is rounding.
    """
    telling = [rank for rank, record in enumerate(observed) if record.losses]
    losses = [observed[rank].losses for rank in telling]
    if {len(told) for told in losses} - {len(reference.losses)} or bool(losses) != bool(reference.losses):
        return [math.inf], ""
    first = None
    for weights, sentence in _ways([observed[rank] for rank in telling], layout):
        apart = [
            abs(sum(w * mine for w, mine in zip(weights, step, strict=True)) - right) / max(abs(right), 1e-12)
            for step, right in zip(zip(*losses, strict=True), reference.losses, strict=True)
        ]
        first = first or (apart, "")
        if not apart or apart[0] <= within:
            return apart, sentence
    return first or ([], "")


def _ways(telling: Sequence[Record], layout: Layout) -> Iterator[tuple[list[float], str]]:
    """Weights of the ranks that tell a loss, and what to say of them; the plain mean first."""
    count = len(telling)
    yield [1 / count] * count if count else [], ""
    for number in range(1, len(layout.used) + 1):
        for axes in itertools.combinations(layout.used, number):
            size = math.prod(layout.used[axis] for axis in axes)
            yield (
                [size / count] * count,
                (f"each rank's loss is a share: added up over {' and '.join(axes)} they are the loss of one process"),
            )
    for what, counts in _counts([record.batch for record in telling]):
        if sum(counts) and len(set(counts)) > 1:
            yield (
                [c / sum(counts) for c in counts],
                (f"weighed by their {what} the ranks' losses are that of one process"),
            )


def _counts(batches: Sequence[Any]) -> Iterator[tuple[str, list[int]]]:
    """What each rank's batch has of rows, of targets, and of those except for the first in each row."""
    every = [list(tensors_of(batch)) for batch in batches]
    for tensors in zip(*every, strict=False):
        whole = [tensor for tensor in tensors if tensor.dim()]
        if len(whole) == len(every):
            yield "rows", [len(tensor) for tensor in whole]
            yield from (("targets", [_targets(tensor[..., shift:]) for tensor in whole]) for shift in (0, 1))


def _targets(tensor: Tensor) -> int:
    return tensor.numel() if tensor.is_floating_point() else int((tensor != IGNORED).sum())
