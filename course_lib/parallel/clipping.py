"""Clipping by a global norm where each rank holds shards of the gradient: the two halves that need no communication.

Between them stands the engine's own all-reduce. Each takes a handful of kernels however many tensors there are;
one by one, the launches of a transformer's hundred gradients take longer than the work.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def sum_of_squares(gradients: list[Tensor], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Sum of the squares of all elements, a scalar of ``dtype`` on ``device``; 0 where there are no gradients.

    The ranks add theirs up, so that all have to ask for one dtype: float64 where a parameter is (:func:`norm_dtype`).

    ``nn.utils.get_total_norm`` would round each tensor's norm to the gradients' own dtype. On a CPU torch's norm keeps
    running sums, which in float32 are off by 4e-4 for a bucket of ten million elements: there they are float64.
    """
    if not gradients:  # a rank may hold none, and takes part in the all-reduce all the same
        return torch.zeros((), dtype=dtype, device=device)
    within = torch.float64 if device.type == "cpu" else dtype
    # M tensors of any shapes -> M norms, 0-D -> (M,) -> 0-D
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=within)).square().sum().to(dtype)


def norm_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """In which the norm of gradients of such tensors is summed: float64 where one of them is."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def scale_down_(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply gradients of that global norm so that it becomes at most ``max_norm``; in place, without a sync."""
    if gradients:
        # The factor stays a tensor: `if norm > max_norm` would make the host wait for the GPU. 1e-6: as in torch.
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
