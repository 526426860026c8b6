"""A pipeline by the schedule 1F1B: each rank goes backward as soon as it can, one forward and one backward in turn.

For 3 ranks and 4 micro-batches, with time from left to right, a backward taking twice as long as a forward::

    rank 0   F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1      F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2         F0 B0--- F1 B1--- F2 B2--- F3 B3---

It ends when GPipe ends. But rank r of p holds at most p - r micro-batches where GPipe holds all of them: a batch in
more micro-batches, which is less waiting, costs no memory. Source: Narayanan et al. (arXiv 2104.04473), section 2.2.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.minimal.gpipe import GPipe


class OneFOneB(GPipe):
    """This rank's stage of a model. What a forward and a backward do is as in GPipe; their order is not."""

    def __init__(
        self,
        stage: nn.Module,
        loss_function: Callable[[Tensor, Tensor], Tensor],
        hidden_shape: Sequence[int],
        group: dist.ProcessGroup,
    ):
        super().__init__(stage, loss_function, hidden_shape, group)
        dist.barrier(group)  # NCCL wants all ranks in a group's first call, and an exchange is between two

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Forward and backward of one batch, cut into micro-batches; gradients add up in ``.grad``.

        All ranks are given the same batch. Returns the mean loss on the last rank, 0 on the others.
        """
        self.loss = self.room.new_zeros(())
        microbatches = len(inputs)
        warmup = min(self.ranks - 1 - self.rank, microbatches)

        # --- phase 1, warm-up: one forward for each rank below, until the first gradient can be on its way up ---
        for i in range(warmup):
            x = inputs[i] if self.first else self.receive(self.rank - 1)
            output = self.forward(x, targets[i], microbatches)
            self.send(output, self.rank + 1)

        # --- phase 2, steady state: one forward, one backward. Neighbours now have something for each other at the same
        # time, an activation down and a gradient up; were both to send first, each would wait for the other ---
        if not self.first and warmup < microbatches:
            x = self.receive(self.rank - 1)
        for i in range(warmup, microbatches):
            output = self.forward(inputs[i] if self.first else x, targets[i], microbatches)
            gradient = None if self.last else self.exchange(output, self.rank + 1)
            input_gradient = self.backward(gradient)
            if not self.first and i + 1 < microbatches:
                x = self.exchange(input_gradient, self.rank - 1)
            elif not self.first:
                self.send(input_gradient, self.rank - 1)

        # --- phase 3, cool-down: the backwards of as many micro-batches as warmed up ---
        for _ in range(warmup):
            input_gradient = self.backward(self.receive(self.rank + 1))
            if not self.first:
                self.send(input_gradient, self.rank - 1)
        return self.loss

    def exchange(self, tensor: Tensor, neighbour: int) -> Tensor:
        """Send to a neighbour and receive from it, both at once."""
        received = torch.empty_like(self.room)
        messages = [
            dist.P2POp(dist.isend, tensor.detach().contiguous(), group=self.group, group_peer=neighbour),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=neighbour),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return received
