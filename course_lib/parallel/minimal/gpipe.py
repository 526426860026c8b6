"""A pipeline by GPipe's schedule: all micro-batches forward, then all of them backward.

Each rank holds one stage. For 3 ranks and 4 micro-batches, with time from left to right, a backward taking twice as
long as a forward::

    rank 0   F0 F1 F2 F3                   B0--- B1--- B2--- B3---
    rank 1      F0 F1 F2 F3          B0--- B1--- B2--- B3---
    rank 2         F0 F1 F2 F3 B0--- B1--- B2--- B3---

Source: Huang et al., "GPipe" (arXiv 1811.06965), section 2.3. ``one_f_one_b.py`` takes as long and holds less.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TinyStage:
    """This rank's stage: what it does to a micro-batch, and how it hands tensors to its neighbours."""

    kind = "B"  # what a backward is called in a table

    def __init__(self, stage: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], room: Tensor):
        self.stage, self.loss_of, self.room = stage, loss_of, room  # room: a tensor like those that cross a cut
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.up, self.down = self.rank - 1, self.rank + 1
        self.held: deque = deque()  # what a forward leaves for its backward
        self.peak, self.loss = 0, 0.0
        self.row: list[str] = []  # what this rank did
        dist.barrier()  # NCCL wants all ranks in their first call

    def send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor.detach().contiguous(), to)

    def receive(self, source: int) -> Tensor:
        tensor = torch.empty_like(self.room)
        dist.recv(tensor, source)
        return tensor

    def did(self, kind: str) -> None:
        self.row.append(f"{self.rank}{kind}{sum(kind in action for action in self.row)}")

    def forward(self, x: Tensor, target: Tensor, share: float) -> Tensor:
        if self.rank > 0:
            x.requires_grad_()  # a leaf: this rank's part of the graph begins here
        output = self.stage(x)
        if self.rank == self.last:
            output = self.loss_of(output, target) * share
            self.loss += output.item()
        self.held.append((x, output))
        self.peak = max(self.peak, len(self.held))
        self.did("F")
        return output

    def backward(self, gradient: Tensor | None) -> Tensor:
        x, output = self.held.popleft()  # the oldest micro-batch
        output.backward(gradient)  # the last rank's output is a loss and needs none
        self.did(self.kind)
        return x.grad  # what the rank above waits for


class TinyGPipe(TinyStage):
    """All forwards, then all backwards; gradients of the micro-batches add up in ``.grad``."""

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.loss, self.row, m = 0.0, [], len(inputs)
        for x, target in zip(inputs, targets, strict=True):
            output = self.forward(self.receive(self.up) if self.rank else x, target, 1 / m)
            if self.rank < self.last:
                self.send(output, self.down)
        for _ in inputs:
            gradient = self.backward(self.receive(self.down) if self.rank < self.last else None)
            if self.rank:
                self.send(gradient, self.up)
