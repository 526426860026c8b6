"""Clipping by a global norm where each rank holds pieces of the gradient: the two halves that need no communication.

Between them stands the engine's own all-reduce. Each takes a handful of kernels however many tensors there are;
one by one, the launches of a transformer's hundred gradients take longer than the work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements, a float32 scalar on ``device``; 0 where there are no gradients.

    The norms are taken in float32; those of ``nn.utils.get_total_norm`` are rounded to the gradients' own dtype.
    """
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()


def scale_down_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients of that global norm so that it becomes at most ``max_norm``; in place, without a sync."""
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
