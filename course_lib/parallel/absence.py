"""Parameters that no rank's loss reaches are left alone: how ranks learn which those are, without a message of its own.

On one process such a parameter has no gradient, and the optimizer passes it by: no weight decay, no momentum. Where
gradients are summed in flat buffers every parameter has a run of numbers in what is sent, used or not. So a rank that
did not use it sends -0.0, and one that did never sends that (x + 0.0 is +0.0 for both zeros). IEEE 754 says of sums
that -0.0 + -0.0 = -0.0 and -0.0 + x = x + 0.0 for every other x: what arrives as nothing but -0.0 was used by nobody,
and what only some ranks used has the sum of these. Sums over micro-batches, products with a clipping factor, casts and
means keep it so.
"""

from collections.abc import Collection

import torch
from torch import Tensor

ABSENT = -0.0
"""What is sent for each element of a gradient that is not there."""


def present_(gradients: list[Tensor]) -> None:
    """Make every -0.0 of gradients that are there, one or more, +0.0, in place; their values stay."""
    torch._foreach_add_(gradients, 0.0)


def zero_present_(gradient: Tensor) -> None:
    """Zero what is there of a gradient, in place, and leave what says that nothing is."""
    gradient.masked_fill_(~(gradient.signbit() & (gradient == 0)), 0.0)


def are_absent(sums: Collection[Tensor]) -> list[bool]:
    """For each sum over ranks whether no rank had a gradient; waits for the device, once for all."""
    return torch.stack([(part.signbit() & (part == 0)).all() for part in sums]).tolist() if sums else []
