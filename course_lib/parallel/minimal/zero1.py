"""ZeRO stage 1: each rank updates 1/N of the weights, so it holds 1/N of the optimizer's states.

An all-reduce is a reduce-scatter and then an all-gather. ZeRO puts the optimizer's step between the two halves: the
same bytes travel as in data parallelism (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.1 and 7.1).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer


class TinyBucket:
    """Weights end to end in one flat buffer of E elements, of which each of N ranks owns a slice of E / N.

    A slice begins and ends wherever it falls, in the middle of a matrix too. So the optimizer's update of an element
    must look at that element alone, as SGD's and Adam's do.
    """

    def __init__(self, weights: list[nn.Parameter]):
        self.weights, self.ranks = weights, dist.get_world_size()
        self.flat = self.end_to_end([weight.detach() for weight in weights])  # (E,), E a multiple of N
        start = 0
        for weight in weights:
            weight.data = self.flat[start : start + weight.numel()].view_as(weight)  # lies in the buffer now
            start += weight.numel()
        self.mine = nn.Parameter(self.flat.chunk(self.ranks)[dist.get_rank()])  # (E / N,), lies there as well

    def end_to_end(self, tensors: list) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return pad(flat, (0, -len(flat) % self.ranks))

    def reduce(self) -> None:
        whole = self.end_to_end([weight.grad for weight in self.weights])  # (E,), of this rank's rows
        total = torch.empty_like(self.mine)
        dist.reduce_scatter_single(total, whole)  # (E / N,): the sum over all ranks, of my slice alone
        mean = total / self.ranks
        self.mine.grad = mean if self.mine.grad is None else self.mine.grad + mean  # several micro-batches add up
        for weight in self.weights:
            weight.grad = None

    def gather(self) -> None:
        dist.all_gather_single(self.flat, self.mine.detach().clone())  # (E / N,) from each rank -> (E,)


class TinyZeRO1:
    """An engine in the place of the optimizer: its three phases are the step."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
    ):
        self.buckets = [TinyBucket(weights) for weights in self.cut(model, blocks)]
        self.optimizer = make_optimizer([bucket.mine for bucket in self.buckets])  # Adam's means are E / N long
        self.zero_grad = self.optimizer.zero_grad

    def cut(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        return [list(model.parameters())]  # one bucket

    def reduce(self) -> None:
        for bucket in self.buckets:
            bucket.reduce()

    def gather(self) -> None:
        for bucket in self.buckets:
            bucket.gather()

    def step(self) -> None:
        self.reduce()
        self.optimizer.step()
        self.gather()
