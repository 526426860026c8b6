"""Tensor parallelism: two linear layers whose matrices the ranks share, for one all-reduce forward and one backward.

The first is split by columns: each rank makes its own part of the hidden activations, and an elementwise function
between the two needs no word from the others. The second is split by rows: each rank makes a summand of the output::

    X (rows, K)    Y_r = X A_r (rows, H / N)    Z_r = Y_r B_r (rows, M)    Z = sum of all Z_r (rows, M)

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, figure 3.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def part(whole: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:  # no group: all ranks
    """This rank's of N equal parts."""
    return whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


class CopyToRanks(torch.autograd.Function):  # f
    """Megatron-LM's f: all ranks use the same X, so its gradient is the sum of what each of them makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(total := gradient.clone(), group=ctx.group)  # a clone: autograd may still need its tensor
        return total, None


class SumOverRanks(torch.autograd.Function):  # g
    """Megatron-LM's g: Z is the sum of the ranks' Z_r, so the gradient of each Z_r is that of Z."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        dist.all_reduce(total := summand.clone(), group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TinyColumns(nn.Module):
    """This rank's H / N columns of A, and as many elements of the bias. They are rows of the (H, K) of nn.Linear."""

    enter = staticmethod(CopyToRanks.apply)

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group = group
        self.weight, self.bias = (nn.Parameter(part(whole, 0, group)) for whole in (linear.weight, linear.bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, self.group), self.weight, self.bias)  # (rows, K) -> (rows, H / N)


class TinyRows(nn.Module):
    """This rank's H / N rows of B; the bias is whole on every rank, and is added once, after the sum."""

    leave = staticmethod(SumOverRanks.apply)

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.group, self.weight, self.bias = group, nn.Parameter(part(linear.weight, 1, group)), linear.bias

    def forward(self, y: Tensor) -> Tensor:
        return self.leave(F.linear(y, self.weight), self.group) + self.bias  # (rows, H / N) -> (rows, M)
