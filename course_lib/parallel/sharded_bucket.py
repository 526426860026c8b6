"""A bucket of ZeRO stages 1 and 2: parameters that are whole on every rank, and updated in N parts.

What a bucket holds and moves; when it does is said by :mod:`course_lib.parallel.zero`. For parameters a, b and c of
together 13 elements and N = 2, with - for padding::

    flat, on both ranks     a a a a a b b b b b b c c -      the parameters are views of it
    local_shard of rank 0   a a a a a b b                    updated here,
    local_shard of rank 1                 b b b b c c -      and here; then each is gathered to all

Source: Rajbhandari et al. 2020, *ZeRO* (arXiv 1910.02054), section 5.1 and, for what is reduced in buckets, 5.2.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.absence import ABSENT, are_absent, present_, zero_present_
from course_lib.parallel.sharded_gradient import held, take
from course_lib.parallel.sharding import Shard, overlap, padded


class ShardedBucket:
    """Parameters of one group and dtype, laid end to end and cut into N equal shards, one per rank.

    E is their number of elements, padded to a multiple of N. Rank r's shard is elements r E / N to (r + 1) E / N, which
    begins and ends wherever that falls, within a parameter too.

    Args:
        parameters: of one group of the optimizer and one dtype.
        group: the N ranks.
        summands: by how many the sum of gradients is divided; N by default.

    Attributes:
        flat: (E,), all the parameters, which are views of it.
        local_shard: (E / N,), this rank's part of ``flat``, a view.
        master: (E / N,), what the optimizer updates: ``local_shard``, or an fp32 copy where the parameters are of lower
            precision (section 3.1 of the paper: the copy is one of the optimizer's states).
        gradient: (E / N,), in the master's dtype, the averaged gradient of this rank's shard; None until it has been
            reduced.
        used: the parameters that this rank's backwards have reached since the gradients were forgotten.
        send_buffer: (E,), the whole gradient on its way; None where none is.
        param_slices: where each parameter lies in ``flat``.
        shard_slices: where what this rank updates of each parameter lies in ``local_shard``; may be empty.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, summands: int | None = None):
        self.group, self.world, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.summands = summands or self.world

        # --- phase 1: the module's parameters become views of one flat tensor, (E,) with the padding. What is gathered
        # into it later is thereby in the module, without a copy. ---
        self.flat = parameters[0].new_zeros(padded(sum(p.numel() for p in parameters), self.world), requires_grad=False)
        self.param_slices: dict[nn.Parameter, slice] = {}
        start = 0
        for parameter in parameters:
            self.param_slices[parameter] = param_slice = slice(start, start + parameter.numel())
            self.flat[param_slice].copy_(parameter.detach().flatten())
            parameter.data = self.flat[param_slice].view(parameter.shape)
            start = param_slice.stop
        self.filled = start
        dist.broadcast(self.flat, group=group, group_src=0)

        # --- phase 2: cut. This rank's shard, and of each parameter the run that lies in it, by element: a cut by
        # parameter would give the rank with the embedding far more than its share. ---
        length = self.flat.numel() // self.world  # E / N
        self.local_shard = self.flat[rank * length : (rank + 1) * length]
        self.master = self.local_shard if self.flat.itemsize >= 4 else self.local_shard.float()
        self.shards: dict[nn.Parameter, Shard] = {}
        self.shard_slices: dict[nn.Parameter, slice] = {}
        for parameter, param_slice in self.param_slices.items():
            first, numel = overlap(param_slice.start, parameter.numel(), rank * length, length)
            begin = param_slice.start + first - rank * length if numel else 0
            self.shard_slices[parameter] = shard_slice = slice(begin, begin + numel)
            self.shards[parameter] = Shard(parameter.shape, first, nn.Parameter(self.master[shard_slice]))
        self.gradient: Tensor | None = None
        self.send_buffer: Tensor | None = None
        self.received: Tensor | None = None
        self.work: dist.Work | None = None
        self.missing = set(self.param_slices)
        self.used: set[nn.Parameter] = set()

    def collect(self, parameters: Collection[nn.Parameter]) -> None:
        """Move some parameters' gradients into the buffer that will be sent; where there is none, what says so."""
        if self.send_buffer is None:
            self.send_buffer = torch.empty_like(self.flat)  # (E,), in the parameters' dtype
            self.send_buffer[self.filled :].zero_()  # the padding: what is in `empty` could be NaN, and is summed
        targets = {p: self.send_buffer[self.param_slices[p]].view(p.shape) for p in parameters}
        taken = {parameter: take(parameter) for parameter in parameters}  # a whole gradient is held once, in the buffer
        arrived = {parameter: gradient for parameter, gradient in taken.items() if gradient is not None}
        if arrived:  # one call for all: one by one, a transformer's hundred launches take longer than the copies
            torch._foreach_copy_([targets[parameter] for parameter in arrived], list(arrived.values()))
            present_([targets[parameter] for parameter in arrived])
        for parameter, target in targets.items():
            if parameter not in arrived:
                target.fill_(ABSENT)
        self.used.update(arrived)
        self.missing.difference_update(parameters)

    def send(self) -> None:
        """Begin the reduce-scatter: each rank receives the sum of its own shard."""
        self.collect(tuple(self.missing))  # of stage 2, those that this backward did not reach
        assert self.send_buffer is not None
        self.received = torch.empty_like(self.local_shard)  # (E,) -> (E / N,)
        self.work = dist.reduce_scatter_single(self.received, self.send_buffer, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the reduce-scatter, add the mean to this rank's gradient, and free the whole one."""
        if self.work is not None and self.received is not None:
            self.work.wait()
            mean = self.received.to(self.master.dtype).div_(self.summands)  # (E / N,) -> (E / N,) fp32, divided there
            self.gradient = mean if self.gradient is None else self.gradient.add_(mean)  # of earlier micro-batches
            self.work = self.send_buffer = self.received = None
            self.missing = set(self.param_slices)

    def hand_out(self) -> None:
        """Give the shards their gradients; none to a parameter that no rank's backward has reached."""
        if self.gradient is None:
            return
        parts = {parameter: self.gradient[part] for parameter, part in self.shard_slices.items()}
        doubtful = [parameter for parameter in parts if parameter not in self.used]  # by this rank; by others?
        absent = are_absent([parts[parameter] for parameter in doubtful])
        left_alone = {parameter for parameter, none in zip(doubtful, absent, strict=True) if none}
        for parameter, shard in self.shards.items():
            shard.data.grad = None if parameter in left_alone else parts[parameter]

    def forget(self, set_to_none: bool = True) -> None:
        """Drop the gradients, whole and reduced, or let them be zeros."""
        if not set_to_none:
            whole = [gradient for p in self.param_slices if (gradient := held(p)) is not None]
            for gradient in [*whole, *([] if self.gradient is None else [self.gradient])]:
                zero_present_(gradient)
            return
        self.gradient = None
        self.used.clear()
        for parameter, shard in self.shards.items():
            take(parameter)
            shard.data.grad = None

    def forget_one(self, parameter: nn.Parameter) -> None:
        """Drop the gradient of one parameter, as if no rank's backward had reached it."""
        self.used.discard(parameter)
        if self.gradient is not None:
            self.gradient[self.shard_slices[parameter]].fill_(ABSENT)

    def adopt(self) -> None:
        """Take over what others have written into the parameters since the last step: loaded, clamped, swapped."""
        if self.master is not self.local_shard:
            changed = self.local_shard != self.master.to(self.local_shard.dtype)
            self.master.copy_(torch.where(changed, self.local_shard.to(self.master.dtype), self.master))

    def gather(self) -> dist.Work:
        """Begin to bring every rank's updated slice to all."""
        if self.master is not self.local_shard:
            self.local_shard.copy_(self.master)  # rounded to the parameters' own precision
        # (E / N,) -> (E,). A copy is sent: the shard itself lies in what is received.
        return dist.all_gather_single(self.flat, self.local_shard.clone(), group=self.group, async_op=True)


def cut_into_buckets(groups: list[list[nn.Parameter]], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Each group's parameters in runs of one dtype and of about so many bytes, those that backward reaches first
    before the others."""
    closed: list[list[nn.Parameter]] = []
    for parameters in groups:
        open_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            filling = open_by_dtype.setdefault(parameter.dtype, [])
            # Closed before it is too large: the two whole gradients that may be under way are the peak of stage 2.
            if filling and sum(p.nbytes for p in filling) + parameter.nbytes > bucket_bytes:
                closed.append(filling)
                filling = open_by_dtype[parameter.dtype] = []
            filling.append(parameter)
        closed += open_by_dtype.values()
    return closed
