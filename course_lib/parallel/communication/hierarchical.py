"""Hierarchical all-reduce: over the slow link between machines goes 1 / G of what a machine's G ranks hold.

With M machines of G ranks and a gradient of S bytes, on each rank::

    reduce-scatter within the machine    (G - 1) / G * S       fast
    all-reduce between the machines      2 (M - 1) / M * S / G slow: each rank for its own part
    all-gather within the machine        (G - 1) / G * S       fast

A flat ring over all N = M G ranks sends 2 (N - 1) / N * S over each of its hops, and those between machines are the
slow ones: about G times as much there. No number is rounded, and the sum is that of all ranks.

Source: Mikami et al., "Massively Distributed SGD" (arXiv 1811.05233), the 2D-torus all-reduce; Cho et al.,
"BlueConnect" (MLSys 2019).
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.errors import ConfigError
from course_lib.parallel.communication.hooks import TwoPhaseReduction, all_gather_bytes, all_reduce_bytes
from course_lib.parallel.ddp import Bucket, ReductionHandle


class HierarchicalAllReduce:
    """Communication hook: sums over all ranks by way of two groups.

    Args:
        within: the ranks of this machine.
        between: one rank of each machine, those with this one's place in it; see :func:`machine_groups`.
    """

    def __init__(self, within: dist.ProcessGroup, between: dist.ProcessGroup):
        self.within, self.between = within, between

    def __call__(self, bucket: Bucket) -> ReductionHandle:
        """Begin the reduce-scatter."""
        flat, size = bucket.flat, self.within.size()
        padded = flat.new_zeros(-(-flat.numel() // size) * size)
        padded[: flat.numel()] = flat
        part = padded.new_empty(padded.numel() // size)
        first = dist.reduce_scatter_single(part, padded, group=self.within, async_op=True)
        return TwoPhaseReduction(first, partial(self._second_half, flat, padded, part))

    def _second_half(self, flat: Tensor, padded: Tensor, part: Tensor) -> None:
        dist.all_reduce(part, group=self.between)
        dist.all_gather_single(padded, part, group=self.within)
        flat.copy_(padded[: flat.numel()])

    def bytes_per_step(self, elements: int, itemsize: int) -> tuple[int, int]:
        """Bytes that a rank sends for elements of ``itemsize`` bytes: within its machine, and between machines."""
        size = self.within.size()
        part = -(-elements // size) * itemsize
        return 2 * all_gather_bytes(size * part, size), all_reduce_bytes(part, self.between.size())


def machine_groups(per_machine: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's two groups, where neighbouring ranks share a machine; a collective call of all ranks.

    Returns:
        The ranks of this machine, and those with this one's place in theirs.
    Raises:
        ConfigError: the machines' size does not divide the number of ranks.
    """
    ranks = dist.get_world_size()
    if per_machine < 1 or ranks % per_machine:
        raise ConfigError(f"{ranks} ranks on machines of {per_machine}", "use a size that divides the number of ranks")
    grid = torch.arange(ranks).view(-1, per_machine)
    within, _ = dist.new_subgroups_by_enumeration(grid.tolist())
    between, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())
    return within, between
