"""ZeRO stage 3, which is FSDP: a rank keeps 1/N of every weight, and has a block whole only while the block computes.

Gather before use, free after use, forward and again backward; the gradient is reduced and cut as soon as it is there.
Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), section 3.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.blocks import blocks, owners


class Unit:
    """The weights of one block end to end in a flat tensor of E elements, of which a rank keeps E / N.

    ``weights`` has memory only while the block computes; the tensor itself stays. So what autograd saved in forward,
    views of it, are right again as soon as it is gathered for backward.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self.group, self.parameters, self.missing = group, parameters, len(parameters)  # missing: of the gradients
        self.padding = -sum(p.numel() for p in parameters) % group.size()
        self.weights = self.flat([p.detach() for p in parameters])  # (E,)
        parts = self.weights.split([*(p.numel() for p in parameters), self.padding])
        self.views = [part.view_as(parameter) for part, parameter in zip(parts[:-1], parameters, strict=True)]
        dist.broadcast(self.weights, group=group, group_src=0)
        self.shard = nn.Parameter(self.weights.chunk(group.size())[group.rank()].clone())  # (E / N,), what stays
        self.free()

        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self.after_forward)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_arrived)

    def flat(self, tensors: list[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes end to end, padded so that the N ranks can share them evenly."""
        return torch.cat([*(tensor.flatten() for tensor in tensors), tensors[0].new_zeros(self.padding)])

    def gather(self) -> None:
        """All ranks' shards end to end are the whole weights."""
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        dist.all_gather_single(self.weights, self.shard.detach(), group=self.group)  # (E / N,) -> (E,)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view

    def free(self) -> None:
        """Give the memory back. A weight that is read now is one NaN, in the shape that the weight has."""
        for parameter in self.parameters:
            parameter.data = parameter.new_full((), torch.nan).expand_as(parameter)
        self.weights.untyped_storage().resize_(0)

    def after_forward(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Free, until backward arrives: the block's begins with the gradient of its output."""
        self.free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gather())

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """With the last gradient: average them all, keep this rank's part, and free the weights.

        What reads a weight in backward computes its gradient too. So after the last gradient nobody reads a weight.
        """
        self.missing -= 1
        if self.missing == 0:
            gradients = self.flat([p.grad for p in self.parameters])  # type: ignore[misc] # (E,)
            local_gradient = torch.empty_like(self.shard)
            dist.reduce_scatter_single(local_gradient, gradients, group=self.group)  # (E,) -> (E / N,)
            self.shard.grad = local_gradient / self.group.size()
            for p in self.parameters:
                p.grad = None
            self.missing = len(self.parameters)
            self.free()


class FullyShardedDataParallel:
    """A module in units: each of its blocks, and the root unit, what lies outside of them (embeddings, head)."""

    def __init__(self, module: nn.Module, make_optimizer: Callable[[list], Optimizer], group: dist.ProcessGroup):
        self.module = module
        members = list(blocks(module).values())
        owner = owners(module, members)  # of each parameter: a block, or the module
        self.units = [Unit(member, [p for p in owner if owner[p] is member], group) for member in [module, *members]]
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        self.optimizer = make_optimizer([unit.shard for unit in self.units])


def train_step(
    engine: FullyShardedDataParallel, loss_function: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor
) -> Tensor:
    """One step on this rank's rows; returns the mean loss of these rows."""
    loss = loss_function(engine.module(inputs), targets)  # gathers and frees, unit by unit
    loss.backward()  # gathers, reduces and frees, in reverse
    engine.optimizer.step()  # of this rank's shards; the next gather brings all ranks' new weights
    return loss.detach()
