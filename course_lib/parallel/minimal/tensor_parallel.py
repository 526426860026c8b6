"""Tensor parallelism: two linear layers whose matrices the ranks share, for one all-reduce forward and one backward.

The first is split by columns: each rank makes its own part of the hidden activations, and an elementwise function
between the two needs no word from the others. The second is split by rows: each rank makes a summand of the output::

    X (rows, K)    Y_r = X A_r (rows, H / N)    Z_r = Y_r B_r (rows, M)    Z = sum of all Z_r (rows, M)

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3, figure 3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


class CopyToRanks(torch.autograd.Function):
    """Megatron-LM's f: all ranks use the same X, so its gradient is the sum of what each of them makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.clone()  # autograd may still need the one that it gave us
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOverRanks(torch.autograd.Function):
    """Megatron-LM's g: Z is the sum of the ranks' Z_r, so the gradient of each Z_r is that of Z."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, group: dist.ProcessGroup) -> Tensor:
        z = z.clone()
        dist.all_reduce(z, group=group)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class ColumnParallelLinear(nn.Module):
    """This rank's H / N columns of A, and as many elements of the bias."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        # (H / N, K): nn.Linear keeps the transpose, so that A's columns are its rows.
        self.weight = nn.Parameter(linear.weight.detach().chunk(group.size(), dim=0)[group.rank()].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(group.size())[group.rank()].clone())  # (H / N,)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)  # (rows, K) -> (rows, H / N)


class RowParallelLinear(nn.Module):
    """This rank's H / N rows of B; the bias is whole on every rank, and is added once, after the sum."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup):
        super().__init__()
        self.group = group
        # (M, H / N): B's rows are its columns.
        self.weight = nn.Parameter(linear.weight.detach().chunk(group.size(), dim=1)[group.rank()].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())  # (M,)

    def forward(self, y: Tensor) -> Tensor:
        return SumOverRanks.apply(F.linear(y, self.weight), self.group) + self.bias  # (rows, H / N) -> (rows, M)


def split_pairs(module: nn.Module, pairs: Sequence[tuple[str, str]], group: dist.ProcessGroup) -> None:
    """Split pairs of linear layers, by name, with nothing but elementwise functions between the two; in place."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    for pair in pairs:
        for name, split in zip(pair, (ColumnParallelLinear, RowParallelLinear), strict=True):
            linear = module.get_submodule(name)
            assert isinstance(linear, nn.Linear), f"{name} is a {type(linear).__name__}"
            module.set_submodule(name, split(linear, group))


def train_step(
    module: nn.Module, optimizer: Optimizer, loss_function: Callable[..., Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """One step; returns the mean loss. Unlike in data parallelism all ranks are given the same rows."""
    optimizer.zero_grad()
    loss = loss_function(module(inputs), targets)
    loss.backward()
    optimizer.step()  # what is whole on every rank had the same gradient there, and stays the same
    return loss.detach()
