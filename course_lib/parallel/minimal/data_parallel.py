"""Data parallelism: each rank computes the gradient of its own rows, and all ranks take the mean.

``average_gradients`` sends after backward: the links idle while the ranks compute, and the ranks while the links work.
``TinyDDP`` sends in buckets, from within backward. Source: Li et al., "PyTorch Distributed: Experiences on Accelerating
Data Parallel Training" (VLDB 2020), section 3.2.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn


def broadcast_model(model: nn.Module) -> None:
    """Give all ranks the weights of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over the ranks."""
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)  # in place: now the sum
            weight.grad /= dist.get_world_size()


class TinyDDP:
    """Averages a model's gradients in buckets that leave during backward, as soon as they are full."""

    def __init__(self, model: nn.Module, bucket_bytes: int, order: Callable[[list], Iterable]):
        self.ranks = dist.get_world_size()
        self.buckets: list[list] = [[]]
        broadcast_model(model)  # the ranks start alike
        for weight in order(list(model.parameters())):
            if sum(other.nbytes for other in self.buckets[-1]) >= bucket_bytes:
                self.buckets.append([])
            self.buckets[-1].append(weight)
        for number, bucket in enumerate(self.buckets):
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(lambda weight, number=number: self.arrived(number))
        self.begin()

    def begin(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients that each bucket waits for
        self.sent: list[tuple] = []  # (flat gradients, their all-reduce), in order

    def arrived(self, number: int) -> None:  # called by autograd, during backward
        self.missing[number] -= 1
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            flat = torch.cat([weight.grad.flatten() for weight in self.buckets[len(self.sent)]])
            self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:  # after backward, before the optimizer
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            work.wait()  # only now is the sum there
            parts = (flat / self.ranks).split([weight.numel() for weight in bucket])
            for weight, part in zip(bucket, parts, strict=True):
                weight.grad.copy_(part.view_as(weight))  # the mean, where the optimizer looks for it
        self.begin()
