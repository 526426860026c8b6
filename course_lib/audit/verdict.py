"""One layout beside one process: losses, norm, each gradient, weights and buffers after two steps."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from course_lib.audit.finding import Finding, Kind, explain, ranks_are, sentence_of
from course_lib.audit.layouts import Layout
from course_lib.audit.losses import compared
from course_lib.audit.subject import Record


def tolerance(dtype: torch.dtype, terms: int) -> float:
    """By how much a sum of so many numbers may differ when it is added up in another order, relative to its size.

    Rounding errors that are independent grow with the root of their number: √n u (Higham and Mary, "A New Approach to
    Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019, theorem 3.1). 64 of that leave room for the
    layers that an error passes through and for sums that cancel; a wrong factor, 2 or 1/2, is far beyond it.

    Half precision (bfloat16, float16) sums in float32 and rounds what it stores: the errors of 64 tensors on the way of
    a gradient add up to √64 of one rounding, 1/16 for bfloat16.
    """
    summed = dtype if torch.finfo(dtype).bits >= 32 else torch.float32
    stored = 0.0 if summed == dtype else STORED**0.5 * torch.finfo(dtype).eps
    return stored + 64 * torch.finfo(summed).eps * terms**0.5


STORED = 64
"""Tensors that are rounded to half precision on the way of a gradient."""
AMPLIFIED = 1e4
"""Rounding after a step to that in a gradient: an optimizer that divides by small numbers enlarges it."""
LOOSEST = 1 / 4
"""Relative difference within which a gradient may be explained by a factor, however much noise it has."""
CLEARLY = 10
"""So many times closer than the gradient is to the reference has an explanation to fit."""
MOST = 1e-2
"""Relative difference after a step that is no rounding, unless the dtype's own is larger."""


@dataclass
class Verdict:
    """Of one layout.

    Attributes:
        layout: what was run.
        losses_apart: the difference of each step's loss, relative to the reference's; infinite where the ranks have
            another number of losses.
        norm: of the whole gradient, found and wanted.
        gradients: a finding for each parameter.
        weights: the parameters that differ after all steps.
        weights_apart: the largest difference of a parameter after all steps, relative to the largest parameter.
        buffers: the buffers that differ.
        within: relative tolerance.
        loss_is: how the ranks' losses make up that of one process, in a sentence; empty for their mean.
        untried: why it was not tried whether the ranks' own batches explain what is wrong, in a sentence; empty where
            it was tried, or need not be.
    """

    layout: Layout
    losses_apart: list[float]
    norm: tuple[float, float]
    gradients: list[Finding]
    weights: list[str] = field(default_factory=list)
    weights_apart: float = 0.0
    buffers: list[str] = field(default_factory=list)
    within: float = 0.0
    loss_is: str = ""
    untried: str = ""

    @property
    def loss_apart(self) -> float:
        """The largest of them; 0 where none was told."""
        return max(self.losses_apart, default=0.0)

    @property
    def losses_agree(self) -> bool:
        """The first except for rounding, the others except for what a step makes of it."""
        first, later = self.losses_apart[:1], self.losses_apart[1:]
        return max(first, default=0.0) <= self.within and max(later, default=0.0) <= _after_a_step(self.within)

    @property
    def wrong(self) -> list[Finding]:
        """The parameters whose gradient is not the reference's."""
        return [finding for finding in self.gradients if finding.kind != "equal"]

    @property
    def told(self) -> list[str]:
        """A sentence per cause, over all parameters that have it: those first that explain something."""
        causes: dict[tuple, list[Finding]] = {}
        for finding in sorted(self.wrong, key=lambda finding: finding.weight):
            causes.setdefault(finding.cause, []).append(finding)
        return [sentence_of(findings, follows=number > 0) for number, findings in enumerate(causes.values())]

    @property
    def clean(self) -> bool:
        """Nothing differs."""
        return self.losses_agree and not (self.wrong or self.weights or self.buffers)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layout": self.layout.used,
            "clean": self.clean,
            "losses_apart": self.losses_apart,
            "loss_is": self.loss_is,
            "untried": self.untried,
            "norm": self.norm,
            "told": self.told,
            "within": self.within,
            "weights": self.weights,
            "weights_apart": self.weights_apart,
            "buffers": self.buffers,
            "gradients": [asdict(finding) for finding in self.gradients],
        }


def judge(reference: Record, observed: Sequence[Record], layout: Layout) -> Verdict:
    """Compare what the ranks of a layout did with one process."""
    dtype = next((g.dtype for g in reference.gradients.values() if g is not None), torch.float32)
    within = tolerance(dtype, reference.terms)
    gradients = [_of_parameter(name, reference, observed, layout, within) for name in reference.gradients]
    losses_apart, loss_is = compared(reference, observed, layout, within)
    weights, buffers = (
        _differences(wanted, theirs)
        for wanted, theirs in (
            (reference.weights, [record.weights for record in observed]),
            (reference.buffers, [record.buffers for record in observed]),
        )
    )
    return Verdict(
        layout,
        losses_apart,
        (_whole_norm(observed), reference.norm),
        gradients,
        [name for name, apart in weights.items() if apart > _after_a_step(within)],
        max(weights.values(), default=0.0),
        [name for name, apart in buffers.items() if apart > _after_a_step(within)],
        within,
        loss_is,
    )


def _after_a_step(within: float) -> float:
    return max(within, min(AMPLIFIED * within, MOST))


def _of_parameter(name: str, reference: Record, observed: Sequence[Record], layout: Layout, within: float) -> Finding:
    def wrong(kind: Kind, why: str, apart: float = 1.0) -> Finding:
        return Finding(name, kind, sentence=f"`{name}`: {why}", apart=apart)

    wanted = reference.gradients[name]
    held = {rank: record.gradients[name] for rank, record in enumerate(observed) if name in record.gradients}
    floor = within * _of_a_size(reference, 0 if wanted is None else wanted.numel())
    wanted_norm = 0.0 if wanted is None else float(wanted.double().norm())
    if not held:
        return wrong("missing", "no rank has this parameter")
    tensors = {rank: gradient.double() for rank, gradient in held.items() if gradient is not None}
    if wanted is None or wanted_norm <= floor:
        if not any(tensor.norm() > floor for tensor in tensors.values()):
            return Finding(name, "equal")
        if not wanted_norm:
            return wrong("unrelated", "has a gradient, and in one process none")
    assert wanted is not None
    if bare := [rank for rank in held if rank not in tensors]:
        where = f"{ranks_are(bare, 'has', 'have')} no gradient" if tensors else "no rank has a gradient"
        return wrong("missing", f"{where}, and one process does")
    right = wanted.double()
    if shapes := sorted({tuple(tensor.shape) for tensor in tensors.values() if tensor.shape != right.shape}):
        why = f"its gradient has the shape {shapes[0]}, and the parameter {tuple(right.shape)}: give whole gradients"
        return wrong("unrelated", why)
    if endless := [rank for rank, tensor in tensors.items() if not tensor.isfinite().all()]:
        why = f"{ranks_are(endless, 'has', 'have')} one that is not finite, and one process does not"
        return wrong("not finite", why, math.inf)
    if not any(tensor.any() for tensor in tensors.values()):
        return wrong("missing", "is zero on every rank, and in one process it is not")
    apart = max(float((tensor - right).norm()) for tensor in tensors.values()) / wanted_norm
    close = within + floor / wanted_norm
    if apart <= close:
        return Finding(name, "equal", apart=apart)
    return explain(name, tensors, wanted, reference.gradients, layout, min(close, LOOSEST, apart / CLEARLY), apart)


def _of_a_size(reference: Record, elements: int) -> float:
    """Norm of so many elements as large as those of the largest gradient, at most that of the whole gradient.

    What cancels to nothing, as the gradient of a key's bias, is nothing, whatever its digits are: they are rounding of
    terms of this size.
    """
    largest = max(
        (float(g.double().square().mean()) ** 0.5 for g in reference.gradients.values() if g is not None and g.numel()),
        default=0.0,
    )
    return min(reference.norm, largest * elements**0.5)


def _differences(wanted: dict[str, Tensor], observed: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """By name, the norm of the difference on the worst rank, over that of the largest tensor; infinite for another
    shape, for integers that differ, and where no rank has it."""
    size = max((float(tensor.double().norm()) for tensor in wanted.values()), default=0.0) or 1.0

    def apart(mine: Tensor, right: Tensor) -> float:
        if mine.shape != right.shape or not (right.is_floating_point() or torch.equal(mine, right)):
            return math.inf
        difference = float((mine.double() - right.double()).norm()) / size
        return math.inf if math.isnan(difference) else difference

    return {
        name: max((apart(held[name], right) for held in observed if name in held), default=math.inf)
        for name, right in wanted.items()
    }


def _whole_norm(observed: Sequence[Record]) -> float:
    """Of the gradient that all ranks have together: each parameter once, from the first rank that has it."""
    once: dict[str, Tensor] = {}
    for record in observed:
        for name, gradient in record.gradients.items():
            if gradient is not None:
                once.setdefault(name, gradient)
    return sum(float(gradient.double().square().sum()) for gradient in once.values()) ** 0.5
