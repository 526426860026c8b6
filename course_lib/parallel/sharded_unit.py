"""A unit of ZeRO-3 and FSDP: the parameters of one block, sharded at rest and whole while the block computes.

A unit's operations and states. :mod:`course_lib.parallel.sharded_module` decides when a unit is gathered and freed;
:mod:`course_lib.parallel.zero3` and :mod:`course_lib.parallel.fsdp` decide how its parameters lie in memory.

A unit's parameters go round this circle once for the block's forward and once for its backward::

                  gather()                             wait()
    SHARDED ----------------------> GATHERING ----------------------> WHOLE
    `flat` has no storage,          `flat` has storage, the           the parameters are views of `flat`,
    parameters read as NaN          all-gather writes into it         and the block computes
       ^                                                                |
       '---------------------------- free() ----------------------------'

The hooks that move it::

    arrow               in forward                              in backward
    gather(), early     `_pre_forward` of the unit before       `_pre_backward` of the unit after     (prefetch)
    gather(), wait()    `_pre_forward`, the block begins        `_pre_backward`, an output's gradient is there
    free()              `_post_forward`, the block has ended    `_post_backward`, the inputs' gradients are there
                        (not with `keep_after_forward`)         `_end_backward`, for units that had no such input

The gradient goes this way, once in each backward, or within ``no_sync`` only as far as the second place::

              collect()               reduce_scatter()                 finish()
    parameters' -----> `gradient` (E,) ---------------> Reduction under -------> the shard's own
    own `.grad`        sum over backwards               way, (E,) -> (E / N,)    `.grad`, the mean

One step of a root unit (embedding and head) and two blocks, with prefetch: . sharded, g gathering, W whole, r its
gradient is being reduced::

    computes    embed   block 1   block 2   head  |  head   block 2   block 1   embed   end
    root        W       W         W         W     |  W      W         W         W       r
    block 1     g       W         .         .     |  .      g         W         r       .
    block 2     .       g         W         .     |  .      W         r         .       .

Sources: Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 5.3; Zhao et al. 2023, *PyTorch FSDP* (arXiv
2304.11277), sections 3.2 (sharding), 3.3 (communication) and 4.3 (the hooks).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.absence import ABSENT, are_absent, present_
from course_lib.parallel.sharded_gradient import held, take
from course_lib.parallel.sharding import Shard


class ShardedUnit:
    """The parameters of one block, that are gathered and freed together. E is their number of elements, padded.

    A unit that is kept after its forward skips the way back and the second gather. Prefetching moves ``gather`` up, to
    before the block that computes ahead of this one: GATHERING then lasts as long as that block computes.

    Attributes:
        shard: (E / N,), this rank's part in the parameters' own dtype, or ZeRO-3's masters; the only lasting copy.
        flat: (E,), the whole parameters in ``param_dtype``. Its storage is there only while GATHERING and WHOLE. Then
            the module's parameters are views of it; when SHARDED they have their shapes, and read as NaN.
        shards: by parameter, its run in the unit's shard: an ``nn.Parameter`` that is a view.
        gradient: (E,), the whole gradient in ``reduce_dtype``, until it is reduced; else None.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        keep_after_forward: bool,
        filled_later: bool,
    ):
        self.module, self.group, self.keep_after_forward = module, group, keep_after_forward
        self.trainable = parameters[0].requires_grad
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)

        # --- phase 1: the whole parameters end to end, as the group's first rank has them ---
        self.total, starts = self.lay_out(parameters)
        self.has_padding = self.total > sum(parameter.numel() for parameter in parameters)
        own_dtype = parameters[0].dtype
        kept_in, there = self.shard_dtype(own_dtype), 0 if filled_later else self.total
        whole = parameters[0].new_zeros(there, dtype=kept_in, requires_grad=False)  # (E,), or nothing
        computed_in = (param_dtype if own_dtype.is_floating_point else None) or own_dtype  # packed bytes stay bytes
        # (E,) in the dtype of the computation; filled by gathers
        self.flat = whole.new_empty(self.total, dtype=computed_in) if filled_later else whole.to(computed_in)
        self.reduce_dtype = reduce_dtype or self.flat.dtype
        self.starts: dict[nn.Parameter, int] = dict(zip(parameters, starts, strict=True))
        self.views: dict[nn.Parameter, Tensor] = {}
        for parameter, start in self.starts.items():
            run = slice(start, start + parameter.numel())
            if not filled_later:
                whole[run].copy_(parameter.detach().flatten())
            self.views[parameter] = self.flat[run].view(parameter.shape)
        if not filled_later:
            dist.broadcast(whole, group=group, group_src=0)

        # --- phase 2: this rank's part of them, and of each parameter, for the optimizer ---
        # (E,) -> (E / N,)
        self.shard = whole.new_zeros(self.total // self.world) if filled_later else self.local_part(whole)
        self.shards: dict[nn.Parameter, Shard] = {}
        self.shard_slices: dict[nn.Parameter, slice] = {}
        for index, parameter in enumerate(parameters):
            self.shard_slices[parameter], first = self.locate(parameter, index)
            self.shards[parameter] = Shard(
                parameter.shape,
                first,
                nn.Parameter(self.shard[self.shard_slices[parameter]], requires_grad=self.trainable),
            )
        # What a parameter is while it is SHARDED: one NaN in the parameter's shape, so that whoever reads a weight that
        # nobody gathered gets NaN, and no old value. Bytes of 255 are NaN too, unpacked as floats of 8 or 32 bits.
        floating = self.flat.is_floating_point()
        self.absent = self.flat.new_full((), float("nan") if floating else torch.iinfo(self.flat.dtype).max)
        self.work: dist.Work | None = None
        self.gradient: Tensor | None = None
        self.used: set[nn.Parameter] = set()  # reached by this rank's backwards since gradients were forgotten
        self.awaits_backward = False  # its forward has run, its backward has not begun
        self.in_backward = False
        self.owes_gradient = False  # its backward has begun, its gradient has not been taken

        # --- phase 3: from here on the whole parameters are gone ---
        self.free()

    # --- how the parameters lie in memory: what ZeRO-3 and FSDP answer differently -----------------------------------

    def shard_dtype(self, own_dtype: torch.dtype) -> torch.dtype:
        """In which the shard is kept, and updated."""
        return own_dtype

    def lay_out(self, parameters: list[nn.Parameter]) -> tuple[int, list[int]]:
        """E, and where each parameter begins in ``flat``."""
        raise NotImplementedError

    def local_part(self, whole: Tensor) -> Tensor:
        """This rank's shard of the whole (E,): a copy, (E / N,)."""
        raise NotImplementedError

    def locate(self, parameter: nn.Parameter, index: int) -> tuple[slice, int]:
        """Place of a parameter in this rank's shard, and the first of its elements there."""
        raise NotImplementedError

    def receive_buffer(self) -> Tensor:
        """(E,), where the shards arrive, rank after rank."""
        raise NotImplementedError

    def unpack(self) -> None:
        """Bring what has arrived into ``flat``."""
        raise NotImplementedError

    def pack(self, gradient: Tensor) -> Tensor:
        """A gradient laid out as ``flat`` is, as it has to be sent: each rank's part in one run. (E,) -> (E,)"""
        raise NotImplementedError

    # --- the states --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Begin to bring the whole parameters here; nothing to do where they are."""
        # SHARDED -> GATHERING. The tensor stays and its storage comes and goes: what autograd saved in the forward are
        # views of this tensor, and of no other.
        storage = self.flat.untyped_storage()
        if storage.size() == 0:
            storage.resize_(self.total * self.flat.itemsize)
            sent = self.shard.to(self.flat.dtype)  # (E / N,), in low precision half the bytes travel
            # (E / N,) -> (E,)
            self.work = dist.all_gather_single(self.receive_buffer(), sent, self.group, async_op=True)

    def wait(self) -> None:
        """Until the parameters are here."""
        # GATHERING -> WHOLE
        if self.work is not None:
            self.work.wait()
            self.work = None
            self.unpack()  # a copy in ZeRO-3, nothing in FSDP
            for parameter, view in self.views.items():
                parameter.data = view

    def free(self) -> None:
        """Give the memory of the whole parameters back, and keep the tensor: autograd has saved views of it, which are
        right again after the next gather."""
        # WHOLE -> SHARDED
        self.wait()  # one may have been prefetched in vain; freed under it, the all-gather would write anywhere
        for parameter in self.views:
            parameter.data = self.absent.expand(parameter.shape)
        self.flat.untyped_storage().resize_(0)

    def has_gradients(self) -> bool:
        return any(held(parameter) is not None for parameter in self.starts)

    def collect(self) -> None:
        """Add the parameters' gradients to the flat one, in ``reduce_dtype``; where there is none, what says so."""
        taken = {parameter: take(parameter) for parameter in self.starts}  # a whole gradient is held once
        arrived = {parameter: gradient for parameter, gradient in taken.items() if gradient is not None}
        is_first = self.gradient is None
        if self.gradient is None:
            self.gradient = torch.empty(self.total, dtype=self.reduce_dtype, device=self.shard.device)  # (E,)
            if len(arrived) < len(self.starts) or self.has_padding:
                self.gradient.fill_(ABSENT)  # a zero, in the padding too
        if arrived:
            # Shapes -> runs of (E,), from the parameters' dtype to ``reduce_dtype``: added up in that, not before it.
            runs = [self.gradient[self.starts[p] : self.starts[p] + p.numel()].view(p.shape) for p in arrived]
            move = torch._foreach_copy_ if is_first else torch._foreach_add_
            move(runs, list(arrived.values()))
            present_(runs)
            self.used.update(arrived)

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter, as if no rank's backward had reached it."""
        self.used.discard(parameter)
        self.shards[parameter].data.grad = None
        if self.gradient is not None:  # of `no_sync`
            self.gradient[self.starts[parameter] : self.starts[parameter] + parameter.numel()].fill_(ABSENT)

    def reduce_scatter(self) -> "Reduction":
        """Begin to sum the flat gradient over the ranks; each receives its own part."""
        assert self.gradient is not None
        whole, self.gradient = self.pack(self.gradient), None  # (E,), rank r's part is the r-th N-th of it
        local = whole.new_empty(self.shard.numel())  # (E,) -> (E / N,)
        return Reduction(self, whole, local, dist.reduce_scatter_single(local, whole, group=self.group, async_op=True))

    def buffers(self) -> list[Tensor]:
        """Tensors that are there only while something travels, besides ``flat``."""
        return []


class Reduction:
    """A reduce-scatter under way, and the buffers that it works on: whole (E,) and this rank's (E / N,)."""

    def __init__(self, unit: ShardedUnit, whole: Tensor, local: Tensor, work: dist.Work):
        self.unit, self.whole, self.local, self.work = unit, whole, local, work

    def finish(self) -> None:
        """Wait for it, average, and add to the gradients of the unit's shards."""
        self.work.wait()
        # (E / N,) in reduce_dtype -> in the shard's. Cast first, then divided: the mean of a sum in bf16 is not rounded
        # to bf16 once more.
        mean = self.local.to(self.unit.shard.dtype).div_(self.unit.world)
        parts = [(shard.data, mean[self.unit.shard_slices[p]]) for p, shard in self.unit.shards.items()]
        before = [(own.grad, part) for own, part in parts if own.grad is not None]
        if before:
            torch._foreach_add_(*map(list, zip(*before, strict=True)))
        # A parameter that no rank's backward has reached has no gradient. Of most this rank knows that it is used.
        doubtful = [
            parameter
            for parameter, shard in self.unit.shards.items()
            if parameter not in self.unit.used and shard.data.grad is None
        ]
        absent = are_absent([mean[self.unit.shard_slices[parameter]] for parameter in doubtful])
        left_alone = {id(self.unit.shards[p].data) for p, none in zip(doubtful, absent, strict=True) if none}
        # The first gradient of a shard is a view of `mean`: nothing is copied.
        for own, part in parts:
            if own.grad is None and id(own) not in left_alone:
                own.grad = part
