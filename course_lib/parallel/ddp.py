"""Data parallelism: every rank holds the whole model and sees other rows, and gradients are averaged while they arise.

One step, from left to right; buckets are sent in the same order on every rank::

    backward     layer 4   layer 3   layer 2   layer 1   wait
    bucket 0               [==== all-reduce ====]          |
    bucket 1                         [==== all-reduce ====]|
    bucket 2                                     [=========| all-reduce: of the first layers, hidden by nothing

Sources: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (VLDB 2020): section 3.2.2
(buckets), 3.2.3 (overlap), 3.2.4 (``no_sync``), 4.1 (broadcast of buffers), 6.2.3 (compression). The shortest
form is :mod:`course_lib.parallel.minimal.data_parallel`.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from course_lib import torch_names  # noqa: F401
from course_lib.errors import CourseError
from course_lib.parallel.sharding import names_of
from course_lib.parallel.wrapping import UnchangedModule, check_kinds, check_ranks_agree

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


class ReductionHandle(Protocol):
    """Handle of a reduction under way: a ``Work`` of torch.distributed, or a ``torch.futures.Future``."""

    def wait(self) -> Any: ...


class Bucket:
    """The gradients of some parameters of one dtype, one after another in one flat tensor.

    Attributes:
        flat: 1-D, all the gradients; already divided by the number of ranks when a communication hook gets them.
        views: each parameter's gradient within ``flat``, by the parameter's name.
        group: the ranks to sum over.
        missing: names of the parameters whose gradient has not come yet in this backward.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None):
        self.parameters, self.group = parameters, group
        tensors = list(parameters.values())
        # (E,), E the number of elements of all the parameters: one message instead of one per parameter.
        self.flat = torch.zeros(sum(p.numel() for p in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
        self.views: dict[str, Tensor] = {}
        start = 0
        for name, parameter in parameters.items():
            # (numel,) -> the parameter's shape. With the parameter's own strides, which fused optimizers take for
            # granted: channels-last weights are contiguous in another order of dimensions.
            strides = torch.empty_like(parameter, device="meta").stride()
            self.views[name] = self.flat.as_strided(parameter.shape, strides, start)
            start += parameter.numel()
        self.missing = set(parameters)
        self.work: ReductionHandle | None = None


def sum_gradients(bucket: Bucket) -> ReductionHandle:
    """The default communication hook: all-reduce in the gradients' own dtype."""
    return dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def bf16_compression(bucket: Bucket) -> ReductionHandle:
    """Communication hook that halves the bytes of fp32 gradients: cast to bf16, all-reduce, cast back.

    Each gradient is rounded to 8 significant bits, and so is every partial sum.
    """
    # (E,) fp32, 4 E bytes -> (E,) bf16, 2 E bytes. It holds sums of gradients that were divided before, see below.
    work = dist.all_reduce(bucket.flat.to(torch.bfloat16), group=bucket.group, async_op=True)
    # Cast back as soon as it has come, so that whoever waits finds fp32 in the place that the gradients are views of.
    return work.get_future().then(lambda reduced: bucket.flat.copy_(reduced.value()[0]))


class DataParallel(nn.Module):
    """A module whose gradients are the averages over all ranks as soon as ``loss.backward()`` returns.

    At the start all ranks take the parameters and buffers of the group's first, and before each training forward its
    buffers again (the means of BatchNorm). Each ``parameter.grad`` is a view of a
    flat bucket, and stays one after ``zero_grad(set_to_none=True)``: the next gradient is copied into its place.

    Parameters that a rank's loss does not use are sent as zeros, once the backward has ended. A parameter that no rank
    used has a gradient of zeros afterwards, or, with ``find_unused_parameters``, the gradient that it had before: None
    after ``zero_grad()``, as on a single process, so that weight decay and momentum leave it alone.

    Unlike ``DistributedDataParallel`` it keeps the buckets that it made at the start, in reverse order of the
    parameters, and broadcasts buffers in training only, so that ranks may evaluate different numbers of batches.

    Args:
        module: the same on all ranks; its parameters on one device or several.
        group: the ranks to average over; None is all ranks.
        groups: by parameter, for one that only some ranks of ``group`` hold, such as an expert: those ranks. Its
            gradient is summed over them and divided by the number of all ranks of ``group``, which its loss came from.
        bucket_bytes: a bucket is sent once it holds so many bytes.
        first_bucket_bytes: the same for the first bucket, small so that communication begins early.
        find_unused_parameters: let the ranks tell each other which parameters they used: one all-reduce of a byte a
            parameter at the end of each backward.
        communication_hook: sums a bucket's ``flat`` over its ranks, in place, and returns something to wait for.
    Raises:
        ModelError: the ranks' models differ, or an embedding has sparse gradients; said on every rank, before anything
            is sent.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        groups: Mapping[nn.Parameter, dist.ProcessGroup] | None = None,
        bucket_bytes: int = 25 * 2**20,
        first_bucket_bytes: int = 2**20,
        find_unused_parameters: bool = False,
        communication_hook: Callable[[Bucket], ReductionHandle] = sum_gradients,
    ):
        super().__init__()
        check_kinds(module, "DataParallel", flat=False)
        check_ranks_agree(module, group)
        self.module, self.group = module, group
        self.bucket_bytes, self.find_unused_parameters = bucket_bytes, find_unused_parameters
        self.communication_hook = communication_hook
        self._unchanged = UnchangedModule(module, "DataParallel")
        self._scale = 1 / dist.get_world_size(group)
        self._synchronises = True

        # --- all ranks begin alike: from then on the same gradients keep the weights alike, and none is sent again ---
        names, groups = names_of(module), groups or {}
        held_by = {
            over: [p for p in names if groups.get(p, group) is over]
            for over in dict.fromkeys([group, *groups.values()])
        }
        for over, held in held_by.items():
            self._broadcast([*held, *(module.buffers() if over is group else ())], over)

        # --- buckets: they are sent in this order; a gradient that backward makes early leaves early ---
        order = {p: place for place, p in enumerate(self.bucket_order([p for p in names if p.requires_grad]))}
        in_groups = [
            (parameters, over)
            for over, held in held_by.items()
            for parameters in in_buckets(
                sorted((p for p in held if p in order), key=order.__getitem__), first_bucket_bytes, bucket_bytes
            )
        ]
        in_groups.sort(key=lambda bucket: order[bucket[0][-1]])  # by when backward fills them, whatever their ranks
        self.buckets = [Bucket({names[p]: p for p in parameters}, over) for parameters, over in in_groups]
        self._sent = 0  # buckets sent in this backward; all ranks send them in the same order
        self._backward_runs = False

        # --- hooks: on the gradient's accumulation, not on the tensor. A weight that is used twice has two gradients in
        # one backward, and this hook is called once, when they have been added up. ---
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                arrived = functools.partial(self._arrived, bucket, name, bucket.views[name])
                parameter.register_post_accumulate_grad_hook(arrived)

    def bucket_order(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The order in which parameters, given in the module's, fill the buckets: the reverse.

        Backward makes the gradients of the last layers first: with these in the first bucket it can leave early.
        """
        return parameters[::-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            ModelError: a parameter was added, replaced, frozen or the like since the module was wrapped.
        """
        if not self._unchanged.is_unchanged():
            self._unchanged.refuse()
        # A rank's BatchNorm has seen its own rows alone; those of the first rank count, as in DistributedDataParallel.
        # Not in evaluation: there ranks may take different numbers of batches, and a collective would hang.
        if self._synchronises and self.module.training and torch.is_grad_enabled():
            self._broadcast(self.module.buffers(), self.group)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards and backwards within it send nothing; gradients add up, until a backward outside it averages them.

        All ranks have to do alike.
        """
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def _arrived(self, bucket: Bucket, name: str, view: Tensor, parameter: nn.Parameter) -> None:
        """Called by autograd when a parameter's gradient of this backward is complete, all its uses added up."""
        if not self._synchronises:  # accumulate: the sum of all backwards is divided once, in the last
            self._into_view(parameter, view)
            return
        # --- phase 1: the first gradient of a backward asks autograd to be told of its end. In the forward nobody knows
        # whether a backward will follow, and after the last gradient no hook is called. ---
        if not self._backward_runs:
            self._backward_runs = True
            Variable._execution_engine.queue_callback(self._finish)
        if name not in bucket.missing:
            raise CourseError(
                f"the gradient of `{name}` came twice in one backward, or an earlier backward raised",
                "checkpoint with use_reentrant=False; wrap the model anew after an error",
            )
        # --- phase 2: into the bucket, divided by N; when it is full it leaves, and backward goes on ---
        # Divided before the sum, not after it: in low precision the sum of N gradients may overflow.
        bucket.missing.remove(name)
        self._into_view(parameter, view, self._scale)
        if not bucket.missing:
            self._send_complete()

    @staticmethod
    def _into_view(parameter: nn.Parameter, view: Tensor, scale: float = 1.0) -> None:
        """Scale a gradient, and move it into its bucket where it is not there yet; one pass over it."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient is not view or scale != 1.0:
            torch.mul(gradient, scale, out=view)
            parameter.grad = view

    def _send_complete(self) -> None:
        """Start the reduction of the buckets that are complete, in order, while backward goes on.

        A full bucket waits for those before it: collectives are matched by their order, the same on all ranks.
        """
        while self._sent < len(self.buckets) and not self.buckets[self._sent].missing:
            bucket = self.buckets[self._sent]
            bucket.work = self.communication_hook(bucket)
            self._sent += 1

    def _finish(self) -> None:
        """Called by autograd at the end of backward: send what is left, wait for all, and hand out the averages."""
        # --- phase 3: send what is left. A parameter that the loss did not use takes part with zeros: other ranks wait
        # for its sum. ---
        unused: dict[str, Bucket] = {}
        for bucket in self.buckets:
            for name in bucket.missing:
                if bucket.parameters[name].grad is None:
                    unused[name] = bucket
                    bucket.views[name].zero_()
                else:  # what earlier backwards left, under no_sync
                    self._into_view(bucket.parameters[name], bucket.views[name], self._scale)
            bucket.missing.clear()
        self._send_complete()

        # --- phase 4: wait, and hand out. Used parameters have their views already; those of the unused are set now ---
        used_somewhere = self._used_somewhere(unused) if self.find_unused_parameters else unused
        for bucket in self.buckets:
            self._wait(bucket)
            bucket.missing = set(bucket.parameters)
        for name in used_somewhere:
            unused[name].parameters[name].grad = unused[name].views[name]
        self._sent, self._backward_runs = 0, False

    def _used_somewhere(self, unused: Collection[str]) -> list[str]:
        """Those of the parameters that this rank did not use which another rank did; a collective call."""
        names = [name for bucket in self.buckets for name in bucket.views]
        # (P,) of bytes, P parameters: 1 where this rank used one. The largest is 1 if any rank did.
        used = torch.tensor(
            [name not in unused for name in names], dtype=torch.uint8, device=self.buckets[0].flat.device
        )
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        return [name for name, somewhere in zip(names, used.tolist(), strict=True) if somewhere and name in unused]

    @staticmethod
    def _wait(bucket: Bucket) -> None:
        assert bucket.work is not None
        try:
            bucket.work.wait()
        except RuntimeError as error:
            names = list(bucket.views)
            raise RuntimeError(
                f"rank {dist.get_rank()} waited for the gradients of `{names[0]}` to `{names[-1]}`, and not every rank "
                f"sent them: one died, skipped a backward, or ran it under no_sync ({error})"
            ) from error
        bucket.work = None

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
        """Take over the group's first rank's values, in place; one message for many small tensors."""
        for bucket in in_buckets(tensors, self.bucket_bytes, self.bucket_bytes):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])  # shapes -> (sum of numel,)
            dist.broadcast(flat, group=group, group_src=0)
            for tensor, values in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def average_gradients(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, bucket_bytes: int = 25 * 2**20
) -> None:
    """Replace gradients by their mean over a group, in buckets, after the last backward.

    For where backwards come in parts and none is the last by itself, as in a pipeline; :class:`DataParallel` sends
    each bucket as soon as it is full. So none of it hides behind computing: it could in the drain of the pipeline, for
    which schedules would need an action of its own. A collective call: all ranks lack the same gradients.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # --- phase 1: begin them all. The links work on the first while the next is put together ---
    under_way = []
    for bucket in in_buckets(reversed(gradients), bucket_bytes, bucket_bytes):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])  # shapes -> (sum of numel,)
        under_way.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
    # --- phase 2: wait in the same order, divide, and copy back to the gradients' own places ---
    for work, flat, bucket in under_way:
        work.wait()
        flat /= dist.get_world_size(group)
        means = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [mean.view_as(own) for own, mean in zip(bucket, means, strict=True)])


def in_buckets(tensors: Iterable[AnyTensor], first_bytes: int, bytes_each: int) -> list[list[AnyTensor]]:
    """Part tensors, in order, into lists of one dtype and device that are closed once they hold so many bytes.

    The first list is closed at ``first_bytes``, the others at ``bytes_each``.
    """
    closed: list[list[AnyTensor]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)  # one flat tensor has one of each
        filling.setdefault(kind, []).append(tensor)
        if sum(tensor.nbytes for tensor in filling[kind]) >= (bytes_each if closed else first_bytes):
            closed.append(filling.pop(kind))
    return closed + list(filling.values())
