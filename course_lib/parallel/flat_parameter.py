"""The parameters of an FSDP unit in one flat buffer: whole while the unit computes, one piece a rank otherwise.

After ``FlatParameter`` (Zhao et al. 2023, *PyTorch FSDP*, section 3.2.1).
"""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.sharding import Shard, overlap, padded


class FlatParamGroup:
    """The parameters of one block, laid end to end in one buffer that is split over the ranks.

    Attributes:
        shard: 1-D, this rank's 1/N of the buffer, in the parameters' own dtype; the only lasting copy.
        flat: 1-D, the whole buffer in ``param_dtype``; its storage is there only while the unit is gathered. Then the
            module's parameters are views of it; at other times they have their shapes, and read as NaN.
        pieces: by parameter, this rank's run of it: an ``nn.Parameter`` that is a view of ``shard``.
        gradient: 1-D, the whole gradient in ``reduce_dtype``, from the unit's backward until it is reduced; else None.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter], group: dist.ProcessGroup | None,
                 param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, keep_after_forward: bool):
        self.module, self.group, self.keep_after_forward = module, group, keep_after_forward
        self.trainable = parameters[0].requires_grad
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.total, starts = self.lay_out(parameters)
        self.has_padding = self.total > sum(parameter.numel() for parameter in parameters)
        whole = parameters[0].new_zeros(self.total, requires_grad=False)
        self.flat = whole.to(param_dtype or whole.dtype)
        self.reduce_dtype = reduce_dtype or self.flat.dtype
        self.starts: dict[nn.Parameter, int] = dict(zip(parameters, starts, strict=True))
        self.views: dict[nn.Parameter, Tensor] = {}
        for parameter, start in self.starts.items():
            run = slice(start, start + parameter.numel())
            whole[run].copy_(parameter.detach().flatten())
            self.views[parameter] = self.flat[run].view(parameter.shape)
        dist.broadcast(whole, group=group, group_src=0)
        self.shard = self.cut(whole)
        self.pieces: dict[nn.Parameter, Shard] = {}
        self.runs: dict[nn.Parameter, slice] = {}  # of the shard
        for index, parameter in enumerate(parameters):
            self.runs[parameter], first = self.place(parameter, index)
            self.pieces[parameter] = Shard(parameter.shape, first, nn.Parameter(
                self.shard[self.runs[parameter]], requires_grad=self.trainable))
        self.absent = self.flat.new_full((1,), float("nan"))
        self.work: dist.Work | None = None
        self.gradient: Tensor | None = None
        self.awaits_backward = False  # its forward has run, its backward has not begun
        self.in_backward = False
        self.owes_gradient = False  # its backward has begun, its gradient has not been taken
        self.free()

    def lay_out(self, parameters: list[nn.Parameter]) -> tuple[int, list[int]]:
        """Elements of the whole buffer (padded to a multiple of N), and where each parameter begins in it."""
        ends = list(itertools.accumulate((parameter.numel() for parameter in parameters), initial=0))
        return padded(ends[-1], self.world), ends[:-1]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole buffer, a copy."""
        return whole.view(self.world, -1)[self.rank].clone()

    def place(self, parameter: nn.Parameter, index: int) -> tuple[slice, int]:
        """Where a parameter lies in this rank's shard, and the first of its elements there."""
        length, start = self.total // self.world, self.starts[parameter]
        first, numel = overlap(start, parameter.numel(), self.rank * length, length)
        begin = start + first - self.rank * length if numel else 0
        return slice(begin, begin + numel), first

    def gather(self) -> None:
        """Begin to bring the whole parameters here; nothing to do where they are."""
        storage = self.flat.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.total * self.flat.itemsize)
            self.work = dist.all_gather_single(self.flat, self.shard.to(self.flat.dtype), self.group, async_op=True)

    def wait(self) -> None:
        """Until the parameters are here."""
        if self.work is not None:
            self.work.wait()
            self.work = None
            for parameter, view in self.views.items():
                parameter.data = view

    def free(self) -> None:
        """Give the memory of the whole parameters back; what autograd saved of them is filled again by a gather."""
        self.wait()
        for parameter in self.views:
            parameter.data = self.absent.expand(parameter.shape)
        self.flat.untyped_storage().resize_(0)

    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.starts)

    def collect(self) -> None:
        """Add the parameters' gradients to the flat one, in ``reduce_dtype``. A parameter without one adds zeros."""
        arrived = {parameter: parameter.grad for parameter in self.starts if parameter.grad is not None}
        is_first = self.gradient is None
        if self.gradient is None:
            # Zeros in the padding, and where no gradient has come.
            make = torch.empty if len(arrived) == len(self.starts) and not self.has_padding else torch.zeros
            self.gradient = make(self.total, dtype=self.reduce_dtype, device=self.shard.device)
        if arrived:
            runs = [self.gradient[self.starts[p] : self.starts[p] + p.numel()].view(p.shape) for p in arrived]
            move = torch._foreach_copy_ if is_first else torch._foreach_add_
            move(runs, list(arrived.values()))
        for parameter in arrived:
            parameter.grad = None

    def reduce_scatter(self) -> "Reduction":
        """Begin to sum the flat gradient over the ranks; each receives its own 1/N."""
        assert self.gradient is not None
        whole, self.gradient = self.gradient, None
        mine = whole.new_empty(self.shard.numel())
        return Reduction(self, whole, mine, dist.reduce_scatter_single(mine, whole, group=self.group, async_op=True))


class Reduction:
    """A reduce-scatter under way, and the buffers that it works on."""

    def __init__(self, unit: FlatParamGroup, whole: Tensor, mine: Tensor, work: dist.Work):
        self.unit, self.whole, self.mine, self.work = unit, whole, mine, work

    def finish(self) -> None:
        """Wait for it, average, and add to the gradients of the unit's pieces."""
        self.work.wait()
        mean = self.mine.to(self.unit.shard.dtype).div_(self.unit.world)
        parts = [(piece.data, mean[self.unit.runs[parameter]]) for parameter, piece in self.unit.pieces.items()]
        before = [(own.grad, part) for own, part in parts if own.grad is not None]
        if before:
            torch._foreach_add_(*map(list, zip(*before, strict=True)))
        for own, part in parts:
            if own.grad is None:
                own.grad = part
