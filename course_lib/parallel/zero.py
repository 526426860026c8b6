"""ZeRO stages 1 and 2 from scratch: optimizer states split over the ranks, then gradients too.

Every rank still computes with whole parameters. But a parameter is updated on one rank alone, so the others need
neither its optimizer state (stage 1) nor, once it has been averaged, its gradient (stage 2). An all-reduce is a
reduce-scatter and an all-gather; ZeRO puts the optimizer's step between the two, and so sends no byte more than
plain data parallel does (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.1, 5.2 and 7).
"""

import contextlib
import functools
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.parallel.clipping import scale_down_, sum_of_squares
from course_lib.parallel.sharding import Shard, check_elementwise, names_of, overlap, padded, repoint
from course_lib.parallel.wrap_checks import UnchangedModule, check_ranks_agree


class ShardedBucket:
    """Parameters of one group and dtype, laid end to end and cut into N equal shards, one per rank.

    E is their number of elements, padded to a multiple of N. Rank r's shard is elements r E / N to (r + 1) E / N, which
    begins and ends wherever that falls, within a parameter too.

    Attributes:
        flat: (E,), all the parameters, which are views of it.
        local_shard: (E / N,), this rank's part of ``flat``, a view.
        master: (E / N,), what the optimizer updates: ``local_shard``, or an fp32 copy where the parameters are of lower
            precision (section 3.1 of the paper: the copy is one of the optimizer's states).
        gradient: (E / N,), fp32, the averaged gradient of this rank's shard; None until it has been reduced.
        send_buffer: (E,), the whole gradient on its way; None where none is.
        param_slices: where each parameter lies in ``flat``.
        shard_slices: where what this rank updates of each parameter lies in ``local_shard``; may be empty.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None):
        self.group, self.world, rank = group, dist.get_world_size(group), dist.get_rank(group)

        # The module's parameters become views of one flat tensor.
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

        # This rank's shard, and of each parameter the piece that lies in it.
        length = self.flat.numel() // self.world  # E / N
        self.local_shard = self.flat[rank * length : (rank + 1) * length]
        self.master = self.local_shard if self.flat.dtype == torch.float32 else self.local_shard.float()
        self.pieces: dict[nn.Parameter, Shard] = {}
        self.shard_slices: dict[nn.Parameter, slice] = {}
        for parameter, param_slice in self.param_slices.items():
            first, numel = overlap(param_slice.start, parameter.numel(), rank * length, length)
            begin = param_slice.start + first - rank * length if numel else 0
            self.shard_slices[parameter] = shard_slice = slice(begin, begin + numel)
            self.pieces[parameter] = Shard(parameter.shape, first, nn.Parameter(self.master[shard_slice]))
        self.gradient: Tensor | None = None
        self.send_buffer: Tensor | None = None
        self.received: Tensor | None = None
        self.work: dist.Work | None = None
        self.missing = set(self.param_slices)

    def collect(self, parameters: Collection[nn.Parameter]) -> None:
        """Move some parameters' gradients into the buffer that will be sent; zeros where there is none."""
        if self.send_buffer is None:
            self.send_buffer = torch.empty_like(self.flat)
            self.send_buffer[self.filled :].zero_()  # the padding
        targets = {p: self.send_buffer[self.param_slices[p]].view(p.shape) for p in parameters}
        arrived = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
        if arrived:
            torch._foreach_copy_([targets[parameter] for parameter in arrived], list(arrived.values()))
        for parameter, target in targets.items():
            if parameter not in arrived:
                target.zero_()
            parameter.grad = None  # a whole gradient is held once, in the buffer
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
            mean = self.received.to(self.master.dtype).div_(self.world)
            self.gradient = mean if self.gradient is None else self.gradient.add_(mean)
            self.work = self.send_buffer = self.received = None
            self.missing = set(self.param_slices)

    def gather(self) -> dist.Work:
        """Begin to bring every rank's updated slice to all."""
        if self.master is not self.local_shard:
            self.local_shard.copy_(self.master)  # rounded to the parameters' own precision
        # (E / N,) -> (E,). A copy is sent: the shard itself lies in what is received.
        return dist.all_gather_single(self.flat, self.local_shard.clone(), group=self.group, async_op=True)


class Zero1(nn.Module):
    """A module whose optimizer states are split over a group of ranks.

    All ranks start from the weights and buffers of the group's first. A trainable parameter that no backward reaches
    counts as having a gradient of zeros.

    The three phases of :meth:`step` stand apart, and none hides behind computing. :class:`OverlappedZero1` sends while
    the last backward runs. The gathers could run beneath the next forward, with a hook at each module that waits for
    its bucket: such hooks are FSDP's subject, and left to it.

    Args:
        module: its trainable parameters become views of flat buckets.
        optimizer: over the module's parameters, before its first step; repointed to this rank's pieces, its groups
            and options kept.
        group: of the ranks; the default group by default.
        bucket_bytes: of gradients that travel together.
    Raises:
        ConfigError: the optimizer is not elementwise.
        ModelError: the ranks' models differ; or, in forward, the module was changed since.
    """

    stage = 1

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, group: dist.ProcessGroup | None = None,
                 bucket_bytes: int = 25 * 2**20):
        super().__init__()
        check_elementwise(optimizer, f"zero{self.stage}")
        check_ranks_agree(module, group)
        self.module, self.optimizer, self.group = module, optimizer, group
        self.names = names_of(module)

        # A bucket is within one group of the optimizer, whose options its shard keeps; backward ends with the first
        # parameters, so the last ones fill the first bucket.
        groups = [[p for p in reversed(group["params"]) if p.requires_grad] for group in optimizer.param_groups]
        self.buckets = [ShardedBucket(parameters, group) for parameters in _cut(groups, bucket_bytes)]
        trained: dict[Tensor, Shard] = {p: piece for bucket in self.buckets for p, piece in bucket.pieces.items()}
        self.frozen = [parameter for parameter in self.names if parameter not in trained]
        for tensor in [*self.frozen, *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        self._pieces = {p: trained.get(p) or Shard(p.shape, 0, p.detach().view(-1)) for p in self.names}
        repoint(optimizer, {p: _worth_updating(piece) for p, piece in self._pieces.items()})
        self._unchanged = UnchangedModule(module, type(self).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._unchanged.check()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate. Nothing travels before :meth:`step` anyway: whole gradients add up in place."""
        yield

    # --- one step, in three phases -----------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce: every rank receives the mean gradient of its own shard. Done once, however often called."""
        if any(p.grad is not None for bucket in self.buckets for p in bucket.param_slices):
            previous: ShardedBucket | None = None
            for bucket in self.buckets:  # two at a time: one travels while the next is filled
                bucket.send()
                if previous is not None:
                    previous.finish()
                previous = bucket
            self.buckets[-1].finish()

    def step(self) -> None:
        """Reduce the gradients, update this rank's shards, gather everybody's."""
        self.reduce()
        # Update: the optimizer has the pieces as its parameters, and sees no element of another rank's.
        for bucket in self.buckets:
            if bucket.gradient is not None:
                for parameter, piece in bucket.pieces.items():
                    piece.data.grad = bucket.gradient[bucket.shard_slices[parameter]]
        self.optimizer.step()
        self.refresh()

    def refresh(self) -> None:
        """Gather: bring the pieces' present values to the parameters of all ranks."""
        for work in [bucket.gather() for bucket in self.buckets]:
            work.wait()

    # --- what a trainer calls besides --------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global L2 norm of at most ``max_norm``; returns the norm before."""
        self.reduce()
        gradients = [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]
        square = sum_of_squares(gradients, self.buckets[0].flat.device)  # of this rank's shards; the padding is zero
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        scale_down_(gradients, norm, max_norm)
        return norm

    def zero_grad(self) -> None:  # type: ignore[override]
        """Forget the gradients, whole and reduced."""
        for bucket in self.buckets:
            bucket.gradient = None
            for parameter, piece in bucket.pieces.items():
                parameter.grad = piece.data.grad = None

    def pieces(self) -> dict[str, Shard]:
        """This rank's piece of every parameter, by its first name, in module order; a frozen one is whole."""
        return {name: self._pieces[parameter] for parameter, name in self.names.items()}

    def resident(self) -> dict[str, list[Tensor]]:
        """The tensors alive on this rank by kind; an fp32 master that is a copy is a state of the optimizer."""
        states = [t for t in tree_leaves(dict(self.optimizer.state)) if isinstance(t, Tensor)]
        states += [bucket.master for bucket in self.buckets if bucket.master is not bucket.local_shard]
        gradients = [bucket.gradient for bucket in self.buckets] + [parameter.grad for parameter in self.names]
        return {"parameters": [bucket.flat for bucket in self.buckets] + [p.detach() for p in self.frozen],
                "gradients": [gradient for gradient in gradients if gradient is not None],
                "optimizer states": states,
                "communication buffers": [t for bucket in self.buckets for t in (bucket.send_buffer, bucket.received)
                                          if t is not None]}


class Zero2(Zero1):
    """A module whose optimizer states and gradients are split over a group of ranks.

    A bucket's gradients are reduced as soon as backward has made the last of them, and freed: no rank ever holds
    the whole gradient. Under accumulation every micro-batch is reduced, which is the price of that: the bytes of the
    reduce-scatter once a micro-batch.

    Arguments are those of :class:`Zero1`.
    """

    stage = 2

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, group: dist.ProcessGroup | None = None,
                 bucket_bytes: int = 25 * 2**20):
        super().__init__(module, optimizer, group=group, bucket_bytes=bucket_bytes)
        self._next: int | None = None  # the bucket to be sent next, while a backward runs
        for bucket in self.buckets:
            for parameter in bucket.param_slices:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate. Each micro-batch is reduced all the same, for a rank has no room for whole gradients."""
        yield

    def _arrived(self, bucket: ShardedBucket, parameter: nn.Parameter) -> None:
        """A gradient is there: move it, and send what is complete, in the same order on every rank."""
        if self._next is None:
            self._next = 0
            Variable._execution_engine.queue_callback(self._end_backward)
        bucket.collect([parameter])
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send_next()

    def _send_next(self) -> None:
        assert self._next is not None
        self.buckets[self._next].send()
        if self._next > 0:
            self.buckets[self._next - 1].finish()  # at most two are under way
        self._next += 1

    def _end_backward(self) -> None:
        """What this backward did not complete goes now; then everything has arrived."""
        while self._next is not None and self._next < len(self.buckets):
            self._send_next()
        self.buckets[-1].finish()
        self._next = None

    def reduce(self) -> None:
        """Reduce: backward has done it."""


class OverlappedZero1(Zero2):
    """:class:`Zero1` for a loop that says which backward is the last, by running the others within ``no_sync``.

    Until then whole gradients add up in place, as in stage 1. In the last backward they leave bucket by bucket while it
    goes on, as in stage 2: with one micro-batch it is stage 2. Arguments and bytes are those of :class:`Zero1`.
    """

    stage = 1
    synchronise = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients stay on this rank, until a backward outside it sends the sums."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before

    def _arrived(self, bucket: ShardedBucket, parameter: nn.Parameter) -> None:
        if self.synchronise:
            super()._arrived(bucket, parameter)


def _worth_updating(piece: Shard) -> Tensor | None:
    """A piece's data, or None where this rank holds nothing of the parameter."""
    return piece.data if piece.data.numel() else None


def _cut(groups: list[list[nn.Parameter]], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Each group's parameters in runs of one dtype and of about so many bytes, those that backward reaches first
    before the others."""
    closed: list[list[nn.Parameter]] = []
    for parameters in groups:
        open_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            filling = open_by_dtype.setdefault(parameter.dtype, [])
            if filling and sum(p.nbytes for p in filling) + parameter.nbytes > bucket_bytes:
                closed.append(filling)
                filling = open_by_dtype[parameter.dtype] = []
            filling.append(parameter)
        closed += open_by_dtype.values()
    return closed
