"""ZeRO stage 3 from scratch: parameters, gradients and optimizer states split over the ranks.

A rank keeps 1/N of each parameter and gathers a block's whole parameters when the block computes, forward and again
backward; gradients are reduced as in stage 2. That moves 3Ψ elements a step where plain data parallel moves 2Ψ
(Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.3 and 7.2.2).

When to gather, to free and to prefetch is the same as in FSDP, which is stage 3 under another name, and is taken from
there. What differs is the layout: ZeRO splits each parameter by itself, FSDP the flat buffer of a unit. So here a
gathered unit has to be put in order, a copy that FSDP's layout saves, and every parameter lies evenly on all ranks.
"""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.parallel.flat_parameter import FlatParamGroup, Reduction
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import padded


class SplitUnit(FlatParamGroup):
    """The parameters of one block, each cut into N equal chunks, one a rank.

    With c_j the chunk of parameter j, a rank's ``shard`` is its chunks end to end, L elements. What all ranks send is
    an N × L matrix, a row a rank; a whole parameter is a band of its columns, ``[:, o_j : o_j + c_j]``. ``flat`` holds
    those bands one after the other.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], group: dist.ProcessGroup | None,
                 param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, keep_after_forward: bool):
        world = dist.get_world_size(group)
        chunks = [padded(parameter.numel(), world) // world for parameter in parameters]
        self.bands = [(sum(chunks[:j]), chunk) for j, chunk in enumerate(chunks)]  # o_j, c_j
        self.matrix: Tensor | None = None  # N × L, while it travels
        super().__init__(module, parameters, group, param_dtype, reduce_dtype, keep_after_forward)

    def lay_out(self, parameters: list[nn.Parameter]) -> tuple[int, list[int]]:
        return self.world * sum(chunk for _, chunk in self.bands), [self.world * first for first, _ in self.bands]

    def cut(self, whole: Tensor) -> Tensor:
        return self.in_rows(whole)[self.rank].clone()

    def place(self, parameter: nn.Parameter, index: int) -> tuple[slice, int]:
        first, chunk = self.bands[index]
        begins = min(self.rank * chunk, parameter.numel())
        held = min(chunk, parameter.numel() - begins)
        return slice(first, first + held), begins if held else 0

    def in_rows(self, flat: Tensor) -> Tensor:
        """From bands to the N × L matrix."""
        bands = [flat[self.world * o : self.world * (o + c)].view(self.world, c) for o, c in self.bands]
        return torch.cat(bands, dim=1)

    def gather(self) -> None:
        """Begin to bring the whole parameters here; nothing to do where they are."""
        storage = self.flat.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.total * self.flat.itemsize)
            self.matrix = self.flat.new_empty(self.total)
            self.work = dist.all_gather_single(self.matrix, self.shard.to(self.flat.dtype), self.group, async_op=True)

    def wait(self) -> None:
        """Until the parameters are here, each in one run."""
        if self.work is not None:
            super().wait()
            assert self.matrix is not None
            rows = self.matrix.view(self.world, -1)
            for first, chunk in self.bands:
                band = self.flat[self.world * first : self.world * (first + chunk)]
                band.view(self.world, chunk).copy_(rows[:, first : first + chunk])
            self.matrix = None

    def reduce_scatter(self) -> Reduction:
        """Begin to sum the gradients over the ranks; each receives its own chunks."""
        assert self.gradient is not None
        whole, self.gradient = self.in_rows(self.gradient).flatten(), None
        mine = whole.new_empty(self.shard.numel())
        return Reduction(self, whole, mine, dist.reduce_scatter_single(mine, whole, group=self.group, async_op=True))


class Zero3(FullyShardedDataParallel):
    """A module whose parameters, gradients and optimizer states are split over a group of ranks.

    Args:
        module: changed in place: outside its forward and backward its parameters read as NaN.
        optimizer: over the module's parameters, before its first step; repointed to this rank's pieces.
        units: modules that are gathered each by itself; by default the model's blocks.
        group: of the ranks; the default group by default.
        prefetch: begin to gather the next block before this one computes.
        param_dtype: of the gathered parameters and so of the computation; by default the parameters' own. The pieces
            are fp32 masters in any case.
    Raises:
        ConfigError: an optimizer that is not elementwise; units that overlap; no units found.
    """

    strategy = "zero3"
    unit_type = SplitUnit

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, units: Collection[nn.Module] | None = None,
                 group: dist.ProcessGroup | None = None, prefetch: bool = True,
                 param_dtype: torch.dtype | None = None):
        own = next(module.parameters()).dtype
        module.float()  # what is cut into pieces are the masters
        super().__init__(module, optimizer, units=units, group=group, prefetch=prefetch,
                         param_dtype=param_dtype or (own if own != torch.float32 else None))

    def resident(self) -> dict[str, list[Tensor]]:
        """The tensors alive on this rank by kind; those of freed storage count 0 bytes."""
        held = super().resident()
        units: list[Any] = self.units
        held["communication buffers"] += [unit.matrix for unit in units if unit.matrix is not None]
        return held
