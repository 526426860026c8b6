"""ZeRO stage 1: each rank updates 1/N of the weights, so it holds 1/N of the optimizer's states.

An all-reduce is a reduce-scatter and then an all-gather. ZeRO puts the optimizer's step between the two halves: the
same bytes travel as in data parallelism (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.1 and 7.1).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class Zero1:
    """A module whose optimizer sees only this rank's slice of the weights.

    All weights lie end to end in one flat tensor of E elements, padded to a multiple of the N ranks; a slice has E / N
    and begins and ends wherever it falls, in the middle of a matrix too. So the optimizer's update of an element must
    look at that element alone, as SGD's and Adam's do.
    """

    def __init__(
        self, module: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer], group: dist.ProcessGroup
    ):
        self.module, self.group = module, group
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        self.weights = parameters[0].new_zeros(sum(sizes) + -sum(sizes) % group.size(), requires_grad=False)  # (E,)
        self.gradients = torch.zeros_like(self.weights)  # (E,)

        # From now on the module's weights and gradients are views of the two flat tensors.
        offset = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            self.weights[offset : offset + size] = parameter.detach().flatten()
            parameter.data = self.weights[offset : offset + size].view_as(parameter)
            parameter.grad = self.gradients[offset : offset + size].view_as(parameter)
            offset += size
        dist.broadcast(self.weights, group=group, group_src=0)
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)

        # A view as well: what the optimizer writes into the slice is in the module's weights.
        self.local_shard = nn.Parameter(self.weights.chunk(group.size())[group.rank()])  # (E / N,)
        self.optimizer = make_optimizer([self.local_shard])

    def step(self) -> None:
        """Reduce, update, gather."""
        # --- phase 1, reduce-scatter: this rank gets the mean gradient of its own slice, and of no other ---
        local_gradient = torch.empty_like(self.local_shard)  # (E,) -> (E / N,)
        dist.reduce_scatter_single(local_gradient, self.gradients, group=self.group)
        self.local_shard.grad = local_gradient / self.group.size()

        # --- phase 2, update the slice: Adam's two moments exist for E / N elements only ---
        self.optimizer.step()

        # --- phase 3, all-gather: everybody's slices. A copy is sent, since the slice lies in what is received ---
        dist.all_gather_single(self.weights, self.local_shard.detach().clone(), group=self.group)  # (E / N,) -> (E,)


def train_step(
    engine: Zero1, loss_function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """One step on this rank's rows; returns the mean loss of these rows."""
    engine.gradients.zero_()
    loss = loss_function(engine.module(inputs), targets)
    loss.backward()
    engine.step()
    return loss.detach()
