"""Fully sharded data parallelism from scratch: a unit is one flat buffer, cut into N equal parts.

The parameters of a block are laid end to end and the whole is cut where the bytes say, wherever that falls within a
parameter (``FlatParameter``, Zhao et al. 2023, *PyTorch FSDP*, arXiv 2304.11277, section 3.2.1). For a unit's
parameters a, b and c, and N = 2::

    flat      a a a a a a a b b b b b c c | -     - is padding, so that the parts are equal
    rank 0    a a a a a a a b
    rank 1                    b b b b c c -

So the parts, rank after rank, are the buffer: nothing is moved once they have arrived. But a rank may hold nothing of a
parameter. When to gather and to free is :mod:`course_lib.parallel.sharded_module`'s affair, as in ZeRO-3.
"""

import itertools

from torch import Tensor, nn

from course_lib.parallel.sharded_module import ShardedModule
from course_lib.parallel.sharded_unit import ShardedUnit
from course_lib.parallel.sharding import overlap, padded


class FlatParamGroup(ShardedUnit):
    """The parameters of one block end to end, padded to a multiple of N; a rank's shard is the r-th N-th of them."""

    def lay_out(self, parameters: list[nn.Parameter]) -> tuple[int, list[int]]:
        # 0 and where each ends, which is where the next begins: sizes 7, 5, 2 are [0, 7, 12, 14].
        ends = list(itertools.accumulate((parameter.numel() for parameter in parameters), initial=0))
        return padded(ends[-1], self.world), ends[:-1]

    def local_part(self, whole: Tensor) -> Tensor:
        # (E,) -> (N, E / N) -> (E / N,). A copy, or the view would keep the whole storage alive.
        return whole.view(self.world, -1)[self.rank].clone()

    def locate(self, parameter: nn.Parameter, index: int) -> tuple[slice, int]:
        # This rank's run of the unit is elements r L to (r + 1) L; what of the parameter lies in it is one run, too.
        length, start = self.total // self.world, self.starts[parameter]  # L = E / N
        first, numel = overlap(start, parameter.numel(), self.rank * length, length)
        begin = start + first - self.rank * length if numel else 0  # from the unit's elements to the shard's
        return slice(begin, begin + numel), first

    def receive_buffer(self) -> Tensor:
        return self.flat  # rank 0's shard, then rank 1's, …: that is how the parameters lie end to end

    def unpack(self) -> None:
        """Nothing: what arrived is in order."""

    def pack(self, gradient: Tensor) -> Tensor:
        return gradient


class FullyShardedDataParallel(ShardedModule):
    """A module whose parameters, gradients and optimizer states are split over a group of ranks.

    Arguments are those of :class:`~course_lib.parallel.sharded_module.ShardedModule`, whose hooks do the work.
    """

    strategy = "fsdp"
    unit_type = FlatParamGroup
