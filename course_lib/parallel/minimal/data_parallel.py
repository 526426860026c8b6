"""Data parallelism, naive: each rank computes the gradient of its own rows, then all ranks average.

Nothing is sent before backward has ended: the links idle while the ranks compute, and the ranks while the links work.
``bucketed_data_parallel.py`` cures that.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


def broadcast_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Begin alike: all ranks take the weights of the group's first."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def average_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)  # of the parameter's shape, in place: now the ranks' sum
            parameter.grad /= group.size()


def train_step(
    module: nn.Module,
    optimizer: Optimizer,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    group: dist.ProcessGroup,
) -> Tensor:
    """One step on this rank's rows; returns the mean loss of these rows.

    If all ranks have as many rows, the mean of their gradients is the gradient of the whole batch. All ranks then make
    the same update of the same weights, and never have to send a weight again.
    """
    optimizer.zero_grad()
    loss = loss_function(module(inputs), targets)  # inputs (rows / N, …): this rank's
    loss.backward()  # a gradient of these rows alone
    average_gradients(module, group)  # the one line that one process does not have
    optimizer.step()
    return loss.detach()
