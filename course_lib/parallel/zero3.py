"""ZeRO stage 3 from scratch: each parameter by itself is cut into N equal chunks, one a rank.

A rank keeps 1/N of each parameter and gathers a block's whole parameters when the block computes, forward and again
backward; gradients are reduced as in stage 2. That moves 3Ψ elements per step where plain data parallel moves 2Ψ
(Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.3 and 7.2.2).

FSDP is stage 3 under another name, and shares :mod:`course_lib.parallel.sharded_module`, which says when to gather and
to free. What differs is where an element lies. For the parameters a, b and c of a block and N = 2::

    rank 0    a a a a b b b c        its chunk of each parameter, end to end
    rank 1    a a a - b b - c        - is padding, so that the chunks of a parameter are equal

Every parameter lies evenly on all ranks. But what arrives, rank 0's chunks and then rank 1's, has to be put in order:
a copy of the whole block, which FSDP's layout saves.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.sharded_module import ShardedModule
from course_lib.parallel.sharded_unit import ShardedUnit
from course_lib.parallel.sharding import padded


class PerParamUnit(ShardedUnit):
    """The parameters of one block, each cut into N equal chunks.

    With c_j the chunk of parameter j, a rank's shard is its chunks end to end, L = E / N elements. What all ranks send
    is an N × L matrix, a row a rank; parameter j is the columns o_j to o_j + c_j of it. ``flat`` holds the parameters
    one after the other, N c_j elements each.
    """

    param_columns: list[tuple[int, int]]
    """Columns (o_j, c_j) of each parameter."""
    arrived: Tensor | None = None
    """(N, L), while it travels."""

    def shard_dtype(self, own_dtype: torch.dtype) -> torch.dtype:
        # Masters, for steps too small for a low precision; frozen parameters make none.
        return own_dtype if own_dtype.itemsize >= 4 or not self.trainable else torch.float32

    def lay_out(self, parameters: list[nn.Parameter]) -> tuple[int, list[int]]:
        # c_j is rounded up: the last ranks' may be short.
        chunks = [padded(parameter.numel(), self.world) // self.world for parameter in parameters]
        self.param_columns = [(sum(chunks[:j]), chunk) for j, chunk in enumerate(chunks)]
        return self.world * sum(chunks), [self.world * offset for offset, _ in self.param_columns]

    def local_part(self, whole: Tensor) -> Tensor:
        return self.in_rows(whole)[self.rank].clone()  # (E,) -> (N, L) -> (L,); a copy, or the whole would stay alive

    def locate(self, parameter: nn.Parameter, index: int) -> tuple[slice, int]:
        offset, chunk = self.param_columns[index]
        # Elements r c_j to (r + 1) c_j of the parameter, as far as it has them: the rest is padding, and not updated.
        first = min(self.rank * chunk, parameter.numel())
        numel = min(chunk, parameter.numel() - first)
        return slice(offset, offset + numel), first if numel else 0

    def receive_buffer(self) -> Tensor:
        # Beside `flat`: a rank sends one run, its chunks end to end, and the all-gather can only put runs end to end.
        self.arrived = self.flat.new_empty(self.world, self.total // self.world)  # (N, L)
        return self.arrived.view(-1)

    def unpack(self) -> None:
        """Each parameter's columns, rank after rank, into one run of ``flat``."""
        assert self.arrived is not None
        for (offset, chunk), run in zip(self.param_columns, self.runs(self.flat), strict=True):
            run.copy_(self.arrived[:, offset : offset + chunk])  # columns of (N, L), strided -> (N, c_j), one run
        self.arrived = None  # as much memory as `flat`: given back before the block computes

    def pack(self, gradient: Tensor) -> Tensor:
        return self.in_rows(gradient).flatten()  # (E,) -> (N, L) -> (E,): row r is what rank r gets

    def runs(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor (E,): for each parameter (N, c_j), its chunks."""
        return [
            flat[self.world * offset : self.world * (offset + chunk)].view(self.world, chunk)
            for offset, chunk in self.param_columns
        ]

    def in_rows(self, flat: Tensor) -> Tensor:
        """A flat tensor (E,) as the matrix (N, L) that travels."""
        return torch.cat(self.runs(flat), dim=1)

    def buffers(self) -> list[Tensor]:
        return [] if self.arrived is None else [self.arrived]


class Zero3(ShardedModule):
    """A module whose parameters, gradients and optimizer states are split over a group of ranks.

    Its blocks are the units. Of trained parameters in a lower precision the shards are fp32 masters, and they are
    gathered in their own. A model that is all in one low precision has floating-point inputs cast to that.
    Arguments are those of :class:`~course_lib.parallel.sharded_module.ShardedModule`.
    """

    strategy = "zero3"
    unit_type = PerParamUnit

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        param_dtype: torch.dtype | None = None,
        filled_later: bool = False,
    ):
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if param_dtype is None and len(dtypes) == 1 and min(dtype.itemsize for dtype in dtypes) < 4:
            (param_dtype,) = dtypes
        super().__init__(module, optimizer, group=group, param_dtype=param_dtype, filled_later=filled_later)
