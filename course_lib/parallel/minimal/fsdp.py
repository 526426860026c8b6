"""ZeRO stage 3, which is FSDP: a rank keeps 1/N of every weight, and has a block whole only while the block computes.

Gather before use, free after use, forward and again backward; the gradient is reduced and cut as soon as it is there.
Rajbhandari et al. 2020 (arXiv 1910.02054), section 5.3; Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), section 3.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad


class Unit:
    """Weights that are gathered together. ``flat`` is the whole of them, and has memory only while it is needed."""

    def __init__(self, weights: list[nn.Parameter]):
        self.weights, self.ranks = weights, dist.get_world_size()
        self.flat = self.end_to_end([weight.detach() for weight in weights])
        sizes = [weight.numel() for weight in weights]
        runs = self.flat[: sum(sizes)].split(sizes)
        self.views = [run.view_as(weight) for run, weight in zip(runs, weights, strict=True)]
        self.shard = nn.Parameter(self.flat.chunk(self.ranks)[dist.get_rank()].clone())  # 1/N: all that lasts
        self.free()

    def end_to_end(self, tensors: list) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return pad(flat, (0, -len(flat) % self.ranks))  # so that it has N equal shards

    def gather(self) -> None:
        self.flat.untyped_storage().resize_(self.flat.nbytes)  # memory for the whole
        dist.all_gather_single(self.flat, self.shard.detach())  # all ranks' shards, end to end
        for weight, view in zip(self.weights, self.views, strict=True):
            weight.data = view

    def free(self) -> None:
        for weight in self.weights:  # a weight that is read now is NaN, not an old value
            weight.data = weight.new_full((), torch.nan).expand(weight.shape)
        self.flat.untyped_storage().resize_(0)

    def reduce(self) -> None:
        whole = self.end_to_end([weight.grad for weight in self.weights])  # of this rank's rows
        mine = torch.empty_like(self.shard)
        dist.reduce_scatter_single(mine, whole)  # the sum over all ranks, of my shard alone
        self.shard.grad = mine / self.ranks
        for weight in self.weights:
            weight.grad = None


class TinyFSDP:
    """Hooks that gather, free and reduce the units of a model: its blocks, and a root of all the rest."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], kind: type[Unit]):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)  # the ranks start alike
        inside = {weight for block in blocks for weight in block.parameters()}
        root = kind([weight for weight in model.parameters() if weight not in inside])
        model.register_forward_pre_hook(lambda *_: root.gather())  # the root stays until its gradients are there
        self.units = [root, *(kind(list(block.parameters())) for block in blocks)]
        for block, unit in zip(blocks, self.units[1:], strict=True):
            self.around_forward(block, unit)
        for unit in self.units:
            self.after_backward(unit)

    def around_forward(self, block: nn.Module, unit: Unit) -> None:
        def after(block: nn.Module, inputs: tuple, output: Tensor) -> None:
            unit.free()
            output.register_hook(lambda gradient: unit.gather())  # the block's backward begins

        block.register_forward_pre_hook(lambda *_: unit.gather())
        block.register_forward_hook(after)

    def after_backward(self, unit: Unit) -> None:
        missing = set(unit.weights)

        def arrived(weight: nn.Parameter) -> None:
            missing.remove(weight)
            if not missing:  # the last gradient: the block's backward is over
                unit.reduce()
                unit.free()
                missing.update(unit.weights)

        for weight in unit.weights:
            weight.register_post_accumulate_grad_hook(arrived)
