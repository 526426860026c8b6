"""Data parallelism in buckets: gradients leave while backward still computes the others.

Few large messages instead of one for each parameter, sent as soon as they are full: Li et al., "PyTorch Distributed:
Experiences on Accelerating Data Parallel Training" (VLDB 2020), section 3.2.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

BUCKET_BYTES = 2**20
"""A bucket is closed at this size: large enough to fill a link, small enough to be full early in backward."""


class Bucket:
    """Gradients that travel together, end to end in one flat tensor; each ``parameter.grad`` is a view of it."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.gradients = torch.cat([torch.zeros_like(p).flatten() for p in parameters])  # (E,): one message
        for parameter, gradient in zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = gradient.view_as(parameter)  # backward adds to it in place
        self.missing = len(parameters)
        self.work: dist.Work | None = None


class BucketedDataParallel:
    """Sends a module's gradients bucket by bucket, from within backward."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        self.module, self.group = module, group
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)

        # Backward makes the gradients of the last layers first, so these share the first bucket.
        self.buckets: list[Bucket] = []
        filling: list[nn.Parameter] = []
        for parameter in reversed(list(module.parameters())):
            filling.append(parameter)
            if sum(p.nbytes for p in filling) >= BUCKET_BYTES:
                self.buckets.append(Bucket(filling))
                filling = []
        if filling:
            self.buckets.append(Bucket(filling))

        # Called when a gradient has been added to `.grad`: a hook on the tensor would come before it is in the bucket.
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.gradient_arrived(bucket))

    def gradient_arrived(self, bucket: Bucket) -> None:
        """Called by autograd in the middle of backward: send the bucket if this was its last gradient."""
        bucket.missing -= 1
        if bucket.missing == 0:
            # Asynchronous: it travels while backward goes on. The order of the buckets is that of backward, the same
            # on every rank; were it not, one rank's bucket 0 would be added to another's bucket 1.
            bucket.work = dist.all_reduce(bucket.gradients, group=self.group, async_op=True)

    def finish(self) -> None:
        """After backward: wait for what is still on its way, and turn the sums into means."""
        for bucket in self.buckets:
            assert bucket.work is not None, "a parameter got no gradient, and its bucket was never sent"
            bucket.work.wait()
            bucket.gradients /= self.group.size()
            bucket.missing, bucket.work = len(bucket.parameters), None

    def zero_grad(self) -> None:
        """In place: a gradient set to None would leave its bucket."""
        for bucket in self.buckets:
            bucket.gradients.zero_()


def train_step(
    engine: BucketedDataParallel,
    optimizer: Optimizer,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """One step on this rank's rows; returns the mean loss of these rows."""
    engine.zero_grad()
    loss = loss_function(engine.module(inputs), targets)
    loss.backward()  # sends the buckets
    engine.finish()
    optimizer.step()
    return loss.detach()
