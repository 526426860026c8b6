"""A pipeline by the schedule 1F1B: each rank goes backward as soon as it can, one forward and one backward in turn.

For 3 ranks and 4 micro-batches, with time from left to right, a backward taking twice as long as a forward::

    rank 0   F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1      F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2         F0 B0--- F1 B1--- F2 B2--- F3 B3---

It ends when GPipe ends. But rank r of p holds at most p - r micro-batches where GPipe holds all of them: a batch in
more micro-batches, which is less waiting, costs no memory. Source: Narayanan et al. (arXiv 2104.04473), section 2.2.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.minimal.gpipe import TinyStage


class TinyOneFOneB(TinyStage):
    """Forwards alone, then one forward and one backward in turn, then backwards alone.

    In the middle, neighbours have something for each other at the same time, an activation down and a gradient up; were
    both to send first, each would wait for the other. So they exchange.
    """

    def exchange(self, tensor: Tensor, other: int) -> Tensor:
        received = torch.empty_like(self.room)
        both = [dist.P2POp(dist.isend, tensor.detach().contiguous(), other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return received

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.loss, self.row, m = 0.0, [], len(inputs)
        warmup = min(self.last - self.rank, m)
        for i in range(warmup):  # forwards alone, one for each rank below
            x = self.receive(self.up) if self.rank else inputs[i]
            self.send(self.forward(x, targets[i], 1 / m), self.down)
        if self.rank and warmup < m:
            x = self.receive(self.up)
        for i in range(warmup, m):  # one forward, one backward
            output = self.forward(x if self.rank else inputs[i], targets[i], 1 / m)
            gradient = self.backward(self.exchange(output, self.down) if self.rank < self.last else None)
            if self.rank and i + 1 < m:
                x = self.exchange(gradient, self.up)
            elif self.rank:
                self.send(gradient, self.up)
        for _ in range(warmup):  # backwards alone
            gradient = self.backward(self.receive(self.down))
            if self.rank:
                self.send(gradient, self.up)
