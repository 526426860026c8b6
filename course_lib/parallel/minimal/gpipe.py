"""A pipeline by GPipe's schedule: all micro-batches forward, then all of them backward.

Rank r of the group holds stage r of p. For p = 3 and 4 micro-batches, with time from left to right, a backward taking
twice as long as a forward::

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


class GPipe:
    """This rank's stage of a model.

    All micro-batches are of one shape, and so are the activations that a stage hands to the next, ``hidden_shape``:
    a rank makes room for a message before it comes.
    """

    def __init__(
        self,
        stage: nn.Module,
        loss_function: Callable[[Tensor, Tensor], Tensor],
        hidden_shape: Sequence[int],
        group: dist.ProcessGroup,
    ):
        self.stage, self.loss_function, self.group = stage, loss_function, group
        self.rank, self.ranks = group.rank(), group.size()
        self.first, self.last = self.rank == 0, self.rank == self.ranks - 1
        weight = next(stage.parameters())
        self.room = torch.empty(hidden_shape, dtype=weight.dtype, device=weight.device)
        # What a micro-batch leaves between its forward and its backward; ``peak`` is the most that there ever was.
        self.held: deque[tuple[Tensor, Tensor]] = deque()
        self.peak = 0

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Forward and backward of one batch, cut into micro-batches; gradients add up in ``.grad``.

        All ranks are given the same batch. Returns the mean loss on the last rank, 0 on the others.
        """
        self.loss = self.room.new_zeros(())

        # --- phase 1: all forwards, activations going down the ranks ---
        for x, target in zip(inputs, targets, strict=True):
            if not self.first:
                x = self.receive(self.rank - 1)
            output = self.forward(x, target, len(inputs))
            if not self.last:
                self.send(output, self.rank + 1)

        # --- phase 2: all backwards, gradients going up again, of the shape of the activations ---
        for _ in inputs:
            gradient = None if self.last else self.receive(self.rank + 1)
            input_gradient = self.backward(gradient)
            if not self.first:
                self.send(input_gradient, self.rank - 1)
        return self.loss

    def forward(self, x: Tensor, target: Tensor, microbatches: int) -> Tensor:
        """A micro-batch through this stage; on the last one, to its share of the mean loss."""
        if not self.first:
            x.requires_grad_()  # a leaf: autograd's graph of a stage ends where the message came in
        output = self.stage(x)  # (rows / m, …) of the batch, or hidden_shape -> hidden_shape
        if self.last:
            output = self.loss_function(output, target) / microbatches
            self.loss += output.detach()
        self.held.append((x, output))
        self.peak = max(self.peak, len(self.held))
        return output

    def backward(self, gradient: Tensor | None) -> Tensor:
        """The oldest micro-batch back through this stage, from the gradient of its output to that of its input.

        The last rank begins at its loss, and needs none; the first one's input has none.
        """
        x, output = self.held.popleft()
        output.backward(gradient)  # adds to the weights' `.grad`: over all micro-batches, as in one process
        return x.grad  # type: ignore[return-value]

    def send(self, tensor: Tensor, to: int) -> None:
        dist.send(tensor.detach().contiguous(), group=self.group, group_dst=to)

    def receive(self, source: int) -> Tensor:
        tensor = torch.empty_like(self.room)
        dist.recv(tensor, group=self.group, group_src=source)
        return tensor
