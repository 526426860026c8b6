"""Muon where the ranks share its work: what each holds, computes and sends, in three designs.

The matrices have S bytes of float32 in all; each of N ranks has gradients of its own rows. Sent per rank and step:

=============== ============================= ================ ==============================================
design          who orthogonalises            momentum         bytes
=============== ============================= ================ ==============================================
replicated      every rank, every matrix      S                2 (N - 1) / N * S: data parallelism
gathered        every rank, every matrix      S / N, flat      (N - 1) / N * S + (N - 1) / N * S / 2 (bf16)
by layers       one rank each                 S / N, matrices  (N - 1) / N * S + (N - 1) / N * S
=============== ============================= ================ ==============================================

The replicated one is :class:`~course_lib.parallel.ddp.DataParallel` with :class:`~course_lib.parallel.muon.Muon`.
Orthogonalising costs 20 to 30 k^2 max(n, m) operations for a matrix, k = min(n, m): by layers it is shared out, and
the rank with the most of it sets the pace. A rank that orthogonalised its flat shard alone would do something else:
the shard begins and ends in the middle of matrices, and its singular vectors are not theirs.

Source: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982), section 2.3 and algorithm 1 (gathered);
Jordan et al., Muon's reference implementation, and Ahn et al., "Dion" (arXiv 2504.05295) (by layers).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.muon import apply_, look_ahead


class GatheredMuon:
    """Momentum in flat shards, as ZeRO-1 has it; whole updates are gathered, and every rank makes all steps.

    Args:
        matrices: (n, m) each, all of one dtype, the same on every rank.
        lr: learning rate.
        momentum: mu.
        weight_decay: decoupled.
        group: the ranks; their number is N.
    Attributes:
        shard: momentum of this rank's elements, (E / N,), E padded to a multiple of N.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        group: dist.ProcessGroup | None,
    ):
        self.matrices, self.lr, self.momentum, self.weight_decay = matrices, lr, momentum, weight_decay
        self.group, self.ranks = group, dist.get_world_size(group)
        self.padding = -sum(matrix.numel() for matrix in matrices) % self.ranks
        elements = sum(matrix.numel() for matrix in matrices) + self.padding
        self.shard = matrices[0].new_zeros(elements // self.ranks, requires_grad=False)

    @torch.no_grad()
    def step(self) -> None:
        """Reduce, move the momentum on, gather, orthogonalise."""
        # --- phase 1, reduce-scatter: the mean gradient of this rank's elements, wherever they begin and end ---
        whole = torch.cat(
            [*(_gradient(matrix).view(-1) for matrix in self.matrices), self.shard.new_zeros(self.padding)]
        )  # (E,)
        own = torch.empty_like(self.shard)
        dist.reduce_scatter_single(own, whole, group=self.group)
        own /= self.ranks
        # --- phase 2, momentum: element by element, so that a shard will do ---
        update = look_ahead(self.shard, own, self.momentum).bfloat16()  # (E / N,)
        # --- phase 3, all-gather: matrices are whole again, in the dtype that they are orthogonalised in ---
        updates = update.new_empty(whole.numel())
        dist.all_gather_single(updates, update, group=self.group)
        # --- phase 4: every rank does all of it, and has all the new weights, with the same bits ---
        sizes = [matrix.numel() for matrix in self.matrices] + [self.padding]
        for matrix, part in zip(self.matrices, updates.split(sizes), strict=False):
            apply_(matrix, part.view(matrix.shape), self.lr, self.weight_decay)

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends: a reduce-scatter in the gradients' dtype, an all-gather in bf16."""
        return (self.ranks - 1) * self.shard.numel() * (self.shard.element_size() + 2)


class LayerwiseMuon:
    """Each matrix has one rank, which holds its momentum and makes its step; then all get the new weights.

    Args:
        matrices: as of :class:`GatheredMuon`.
        lr: learning rate.
        momentum: mu.
        weight_decay: decoupled.
        group: the ranks.
    Attributes:
        owned: by rank, the indices of its matrices; the most expensive are given out first, each to the rank that
            has least to do.
        buffers: momentum of this rank's matrices, by index.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        group: dist.ProcessGroup | None,
    ):
        self.matrices, self.lr, self.momentum, self.weight_decay = matrices, lr, momentum, weight_decay
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.owned = shared_out([orthogonalising_flops(*matrix.shape) for matrix in matrices], self.ranks)
        self.buffers = {
            index: torch.zeros_like(matrices[index], requires_grad=False) for index in self.owned[self.rank]
        }

    @torch.no_grad()
    def step(self) -> None:
        """Reduce each gradient to its matrix's rank, step there, and hand out the weights."""
        owners = [(owner, indices) for owner, indices in enumerate(self.owned) if indices]
        # --- phase 1, a reduce to each rank: one message with the gradients of its matrices ---
        for owner, indices in owners:
            summed = torch.cat([_gradient(self.matrices[index]).view(-1) for index in indices])
            dist.reduce(summed, group_dst=owner, group=self.group)
            if owner == self.rank:
                self._step_own(indices, summed / self.ranks)
        # --- phase 3, a broadcast from each rank: the weights of its matrices ---
        for owner, indices in owners:
            weights = torch.cat([self.matrices[index].detach().view(-1) for index in indices])
            dist.broadcast(weights, group_src=owner, group=self.group)
            for index, part in zip(indices, weights.split(self._sizes(indices)), strict=True):
                self.matrices[index].copy_(part.view(self.matrices[index].shape))

    def _step_own(self, indices: list[int], gradients: Tensor) -> None:
        # --- phase 2: momentum, orthogonalisation and step of whole matrices, on one rank each ---
        for index, gradient in zip(indices, gradients.split(self._sizes(indices)), strict=True):
            matrix = self.matrices[index]
            update = look_ahead(self.buffers[index], gradient.view(matrix.shape), self.momentum)
            apply_(matrix, update, self.lr, self.weight_decay)

    def _sizes(self, indices: list[int]) -> list[int]:
        return [self.matrices[index].numel() for index in indices]

    def bytes_per_step(self) -> int:
        """Bytes that this rank sends: all but its receiver send a reduce, all but the last of a ring a broadcast,
        which is the rank before the one that it comes from."""
        held = [sum(self._sizes(indices)) * self.matrices[0].element_size() for indices in self.owned]
        return 2 * sum(held) - held[self.rank] - held[(self.rank + 1) % self.ranks]


def orthogonalising_flops(rows: int, columns: int) -> int:
    """Multiplications and additions of five Newton-Schulz iterations: of X X^T, its square, and a product with X."""
    short, long = min(rows, columns), max(rows, columns)
    return 5 * (2 * short * short * long + 2 * short**3 + 2 * short * short * long)


def shared_out(costs: list[int], ranks: int) -> list[list[int]]:
    """Indices of costs for each rank: the largest first, each to the rank that has least; the same on every rank.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (1969): at most 4 / 3 of the best.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        min(shares, key=lambda share: sum(costs[held] for held in share)).append(index)
    return shares


def _gradient(matrix: nn.Parameter) -> Tensor:
    return torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
