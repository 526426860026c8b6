"""ZeRO stages 1 and 2 from scratch: optimizer states split over the ranks, then gradients too.

Every rank still computes with whole parameters. But a parameter is updated on one rank alone, so the others need
neither its optimizer state (stage 1) nor, once it has been averaged, its gradient (stage 2). An all-reduce is a
reduce-scatter and an all-gather; ZeRO puts the optimizer's step between the two, and so sends no byte more than
plain data parallel does (Rajbhandari et al. 2020, arXiv 1910.02054, sections 5.1, 5.2 and 7). For N ranks and a
bucket of E elements::

    backward          reduce-scatter          optimizer           all-gather
    gradient (E,)  -> mean (E / N,)        -> shard (E / N,)   -> parameters (E,)
    on every rank     of this rank's shard    updated             on every rank

Stage 1 begins the second column after the last backward, stage 2 in each backward, bucket by bucket.
:mod:`course_lib.parallel.minimal.zero1` is the shortest form.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from course_lib.errors import CourseError
from course_lib.parallel.clipping import norm_dtype, scale_down_, sum_of_squares
from course_lib.parallel.sharded_bucket import ShardedBucket, cut_into_buckets
from course_lib.parallel.sharded_gradient import ShardedGradients, held, refuse_grad_scaler
from course_lib.parallel.sharding import Shard, check_elementwise, names_of, repoint
from course_lib.parallel.wrapping import UnchangedModule, check_kinds, check_ranks_agree


class Zero1(nn.Module):
    """A module whose optimizer states are split over a group of ranks.

    All ranks start from the weights and buffers of the group's first. A trainable parameter that no rank's backward
    reaches has no gradient, and is left alone as on one process; where only some ranks reach it, the others count as
    having zeros. What is written into the parameters between steps, on every rank, is kept.

    ``optimizer.step()`` and ``optimizer.zero_grad()`` are the engine's own, and ``nn.utils.clip_grad_norm_`` over its
    parameters clips as :meth:`clip_grad_norm_`: ``.grad`` shows a
    :class:`~course_lib.parallel.sharded_gradient.ShardedGradient`. Setting it to None forgets the gradient, as
    ``module.zero_grad()`` does; another tensor there and a GradScaler raise.

    The three phases of :meth:`step` stand apart, and none hides behind computing. :class:`OverlappedZero1` sends while
    the last backward runs. The gathers could run beneath the next forward, with a hook at each module that waits for
    its bucket: such hooks are FSDP's subject, and left to it.

    Args:
        module: its trainable parameters become views of flat buckets.
        optimizer: over the module's parameters, before its first step; repointed to this rank's shards, its groups
            and options kept.
        group: of the ranks; the default group by default.
        groups: by parameter, for one that only some ranks of ``group`` hold, such as an expert: those ranks. Its state
            is split over them; its gradient is summed over them and divided by the number of all ranks of ``group``.
        bucket_bytes: of gradients that travel together.
    Raises:
        ConfigError: the optimizer is not elementwise, has made steps, or has another module's parameters.
        ModelError: the ranks' models differ, parameters that are complex, sparse gradients; or, in forward, the module
            was changed since.
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        *,
        group: dist.ProcessGroup | None = None,
        groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
        bucket_bytes: int = 25 * 2**20,
    ):
        super().__init__()
        check_elementwise(optimizer, f"zero{self.stage}")
        check_kinds(module, type(self).__name__)
        check_ranks_agree(module, group)
        self.module, self.optimizer, self.group = module, optimizer, group
        self.names = names_of(module)

        # --- phase 1: cut into buckets. One is within one group of the optimizer, whose options its shard keeps, and
        # of the same ranks; backward ends with the first parameters, so the last ones fill the first bucket. ---
        groups, self.buckets = groups or {}, []
        for options in optimizer.param_groups:
            in_turn = [p for p in reversed(options["params"]) if p.requires_grad and p in self.names]
            trainable = {parameter: at for at, parameter in enumerate(in_turn)}
            cut = [
                (parameters, over)
                for over in dict.fromkeys([group, *groups.values()])
                for parameters in cut_into_buckets(
                    [[p for p in trainable if groups.get(p, group) is over]], bucket_bytes
                )
            ]
            cut.sort(key=lambda bucket: trainable[bucket[0][-1]])  # by when backward fills them, whatever their ranks
            self.buckets += [ShardedBucket(parameters, over, dist.get_world_size(group)) for parameters, over in cut]
        trained: dict[Tensor, Shard] = {p: shard for bucket in self.buckets for p, shard in bucket.shards.items()}
        # --- phase 2: what is in no bucket has to begin alike, too ---
        self.frozen = [parameter for parameter in self.names if parameter not in trained]
        for tensor in [*self.frozen, *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        # --- phase 3: the optimizer sees this rank's shards alone, so that its states have E / N elements. The shards
        # are the same memory as the module's parameters, or their fp32 masters. ---
        self._shards = {p: trained.get(p) or Shard(p.shape, 0, p.detach().view(-1)) for p in self.names}
        repoint(optimizer, {p: _worth_updating(shard) for p, shard in self._shards.items()})
        # --- phase 4: the optimizer's own step reduces before it and gathers after it, whoever calls it ---
        refuse_grad_scaler(optimizer)
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(lambda *_: self.refresh())
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        # --- phase 5: `.grad` shows gradients of all ranks, from the end of each backward ---
        self._gradients = ShardedGradients(
            {p: name for p, name in self.names.items() if p in trained},
            self._reduced_parts,
            self._is_pending,
            self._forget_one,
            group,
        )
        self._backward_runs = False
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._ask_for_end)  # type: ignore[attr-defined]
        self._unchanged = UnchangedModule(module, type(self).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._unchanged.is_unchanged():
            self._unchanged.refuse()
        self._backward_runs = False  # one that raised had no end
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate. Nothing travels before :meth:`step` anyway: whole gradients add up in place."""
        yield

    def _ask_for_end(self, parameter: Tensor) -> None:
        """The first gradient of a backward asks to be told of its end."""
        if not self._backward_runs:
            self._backward_runs = True
            Variable._execution_engine.queue_callback(self._show_gradients)

    def _show_gradients(self) -> None:
        self._backward_runs = False
        self._gradients.show()

    # --- one step, in three phases -----------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce: every rank receives the mean gradient of its own shard. Done once, however often called."""
        self._gradients.heed()
        self._gradients.changed()
        # A second call finds no gradient in a parameter: `collect` has moved them all.
        if any(held(p) is not None for bucket in self.buckets for p in bucket.param_slices):
            previous: ShardedBucket | None = None
            for bucket in self.buckets:  # two at a time: one travels while the next is filled, and no more memory
                bucket.send()
                if previous is not None:
                    previous.finish()
                previous = bucket
            self.buckets[-1].finish()
            self._gradients.show()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, update this rank's shards, gather everybody's. Gives what ``closure`` gave."""
        result = None if closure is None else closure()
        # --- phase 1: reduce. (E,) -> (E / N,) ---
        self.reduce()
        # --- phase 2: update. The optimizer has the shards as its parameters, and sees no element of another rank's ---
        self.optimizer.step()  # hooks around it hand out the gradients, `_before_update`, and gather, `refresh`
        # --- phase 3: gather. (E / N,) -> (E,): the hook has done it ---
        return result

    def _before_update(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Reduce, and give the optimizer's parameters, the shards, their gradients."""
        if any(callable(given) for given in (*args[1:], *kwargs.values())):
            raise CourseError(
                "optimizer.step(closure) would reduce the gradients before the closure makes them",
                "use engine.step(closure)",
            )
        self.reduce()
        for bucket in self.buckets:
            bucket.adopt()
            bucket.hand_out()

    def refresh(self) -> None:
        """Gather: bring the shards' present values to the parameters of all ranks."""
        for work in [bucket.gather() for bucket in self.buckets]:  # all are begun before one is waited for
            work.wait()

    # --- what a trainer calls besides --------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a global L2 norm of at most ``max_norm``; returns the norm before."""
        self.reduce()
        gradients = [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]
        # Of this rank's shards; the padding is zero. 0-D fp32, or float64 where a parameter is.
        square = sum_of_squares(gradients, self.buckets[0].flat.device, norm_dtype(b.master for b in self.buckets))
        dist.all_reduce(square, group=self.group)  # each element is on one rank, so the sum is that of the whole
        norm = square.sqrt()  # the same on every rank
        scale_down_(gradients, norm, max_norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, whole and reduced, or let them be zeros."""
        for bucket in self.buckets:
            bucket.forget(set_to_none)
        (self._gradients.forgotten if set_to_none else self._gradients.changed)()

    def _reduced_parts(self) -> dict[nn.Parameter, Tensor]:
        self.reduce()
        return {
            parameter: bucket.gradient[part]
            for bucket in self.buckets
            if bucket.gradient is not None
            for parameter, part in bucket.shard_slices.items()
        }

    def _forget_one(self, parameter: nn.Parameter) -> None:
        next(bucket for bucket in self.buckets if parameter in bucket.shards).forget_one(parameter)

    def _is_pending(self) -> bool:
        return any(held(parameter) is not None for parameter in self.names)

    def shards(self) -> dict[str, Shard]:
        """This rank's shard of every parameter, by its first name, in module order; a frozen one is whole."""
        return {name: self._shards[parameter] for parameter, name in self.names.items()}

    def resident(self) -> dict[str, list[Tensor]]:
        """The tensors alive on this rank by kind; an fp32 master that is a copy is a state of the optimizer."""
        states = [t for t in tree_leaves(dict(self.optimizer.state)) if isinstance(t, Tensor)]
        states += [bucket.master for bucket in self.buckets if bucket.master is not bucket.local_shard]
        gradients = [bucket.gradient for bucket in self.buckets] + [held(parameter) for parameter in self.names]
        return {
            "parameters": [bucket.flat for bucket in self.buckets] + [p.detach() for p in self.frozen],
            "gradients": [gradient for gradient in gradients if gradient is not None],
            "optimizer states": states,
            "communication buffers": [
                t for bucket in self.buckets for t in (bucket.send_buffer, bucket.received) if t is not None
            ],
        }


class Zero2(Zero1):
    """A module whose optimizer states and gradients are split over a group of ranks.

    A bucket's gradients are reduced as soon as backward has made the last of them, and freed: no rank ever holds
    the whole gradient. Under accumulation every micro-batch is reduced, which is the price of that: the bytes of the
    reduce-scatter once a micro-batch.

    Arguments are those of :class:`Zero1`.
    """

    stage = 2

    def __init__(self, module: nn.Module, optimizer: Optimizer, **options: Any):
        super().__init__(module, optimizer, **options)
        self._next: int | None = None  # the bucket to be sent next, while a backward runs
        # After accumulation, since the hook takes `.grad` away: with a hook on the tensor it would not be there yet.
        for bucket in self.buckets:
            for parameter in bucket.param_slices:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, bucket))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate. Each micro-batch is reduced all the same, for a rank has no room for whole gradients."""
        yield

    def _arrived(self, bucket: ShardedBucket, parameter: nn.Parameter) -> None:
        """A gradient is there: move it, and send what is complete, in the same order on every rank."""
        if self._next is None:  # the first of this backward: ask to be told of the end
            self._next = 0
            Variable._execution_engine.queue_callback(self._end_backward)
        bucket.collect([parameter])
        # A bucket that is complete before its turn waits: collectives are matched by their order alone.
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
        self._gradients.show()

    def reduce(self) -> None:
        """Reduce: backward has done it."""
        self._gradients.heed()
        self._gradients.changed()  # who asks for what is reduced may change it


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


def _worth_updating(shard: Shard) -> Tensor | None:
    """A shard's data, or None where this rank holds nothing of the parameter."""
    return shard.data if shard.data.numel() else None
