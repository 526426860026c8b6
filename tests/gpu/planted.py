"""Races and misuses of collectives, streams and memory, each beside the same thing done right.

Each function runs on every rank of an ``nccl`` group. With ``wrong`` it does what its docstring says, and the line
marked ``# here`` (``# or here``), or a table's last one, is the one to be named; without it, the same work is done as
it should be. What it returns is kept until the device has done all.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import P2POp

N = 1 << 10


@dataclass(frozen=True)
class Plant:
    """A planted mistake.

    Attributes:
        function: called on each rank with ``wrong``; its docstring says what the mistake is.
        lines: of this file, to be named.
        kind: of the finding that names it; ``error`` where torch or NCCL raises.
        ranks: how many it takes.
        hangs: whether a GPU would wait for ever, so that it has a process of its own.
        says: what the error, or the finding, says.
    """

    function: Callable[[bool], None]
    lines: tuple[int, ...]
    kind: str
    ranks: int = 2
    hangs: bool = False
    says: str = ""

    @property
    def name(self) -> str:
        return inspect.cleandoc(self.function.__doc__).splitlines()[0]


PLANTS: list[Plant] = []
READ, TWO, OVER, FLIGHT = (
    "read before it was written",
    "two writes at once",
    "written while it was read",
    "written in flight",
)


def plant(kind, **options):
    def take(function):
        source, first = inspect.getsourcelines(function)
        marked = (first + i for i, line in enumerate(source) if line.rstrip().endswith(("# here", "# or here")))
        PLANTS.append(Plant(function, tuple(marked), kind, **options))
        return function

    return take


def in_a_line(kind, what, line, **options):
    """Plants what is done in one line, which is told whether to do it wrong."""

    line.__doc__ = what
    PLANTS.append(Plant(line, (line.__code__.co_firstlineno,), kind, **options))


def too_soon(kind, what, start, use):
    """Plants a use of a collective's tensors before what its start returned, one work or several, has been waited for.

    Both are given a tensor, and one that is as large as both ranks' together.
    """

    def function(wrong):
        part, whole = ones(), ones(2 * N)
        works = start(part, whole)
        works = works if isinstance(works, list) else [works]
        if not wrong:
            wait_for(works)
        used = use(part, whole)
        wait_for(works)
        return used

    function.__doc__ = what
    PLANTS.append(Plant(function, (use.__code__.co_firstlineno,), kind))


def ones(*shape, **options):
    return torch.ones(*(shape or (N,)), device="cuda", **options)


def other():
    return 1 - dist.get_rank()


def messages(there, back):
    """What goes to the other rank, and what comes from it."""
    return [P2POp(dist.isend, there, other()), P2POp(dist.irecv, back, other())]


def wait_for(works):
    for work in works:
        work.wait()


# ---------------------------------------------------------------- read before it is there
too_soon(
    READ,
    "A sum is read while it is being made.",
    lambda part, whole: dist.all_reduce(part, async_op=True),
    lambda part, whole: part * 2,
)
too_soon(
    READ,
    "A gathered parameter is used before it has come.",
    lambda part, whole: dist.all_gather_into_tensor(whole, part, async_op=True),
    lambda part, whole: whole.sum(),
)
too_soon(
    READ,
    "A rank's share of the gradient is used before it has come.",
    lambda part, whole: dist.reduce_scatter_tensor(part, whole, async_op=True),
    lambda part, whole: part.norm(),
)
too_soon(
    READ,
    "Weights are used before rank 0's have come.",
    lambda part, whole: dist.broadcast(part, 0, async_op=True),
    lambda part, whole: part + 1,
)
too_soon(
    READ,
    "Tokens of other ranks are worked on before they have come.",
    lambda part, whole: dist.all_to_all_single(part, whole[:N], async_op=True),
    lambda part, whole: part.relu(),
)
too_soon(
    READ,
    "What a batch of messages brings is used before any of its works has been waited for.",
    lambda part, whole: dist.batch_isend_irecv(messages(whole[:N], part)),
    lambda part, whole: part + 1,
)


@plant(READ)
def received_read(wrong):
    """An activation is used before its receive has ended."""
    x = ones()
    if dist.get_rank() == 0:
        dist.isend(x, 1).wait()
    else:
        work = dist.irecv(x, 0)
        if not wrong:
            work.wait()
        x = x * 2  # here
        work.wait()


@plant(READ)
def functional_read(wrong):
    """A functional collective's result is read without wait_tensor."""
    functional = torch.ops._c10d_functional
    x = functional.all_reduce(ones(), "sum", dist.group.WORLD.group_name)
    if not wrong:
        x = functional.wait_tensor(x)
    y = x * 3  # here
    functional.wait_tensor(x)
    return y


@plant(READ)
def waited_for_the_wrong_one(wrong):
    """Two gathers are under way, and the first one's work is waited for before the second one's tensor is read."""
    first, second, extra = ones(), ones(), dist.new_group([0, 1])
    early = dist.all_reduce(first, async_op=True)
    late = dist.all_reduce(second, async_op=True, group=extra)
    early.wait()
    if not wrong:
        late.wait()
    y = second + first  # here
    late.wait()
    return y


# ---------------------------------------------------------------- written while it is on its way
too_soon(
    TWO,
    "A gradient is cleared while it is being summed.",
    lambda part, whole: dist.all_reduce(part, async_op=True),
    lambda part, whole: part.zero_(),
)
too_soon(
    OVER,
    "The next micro-batch's gradients are added to what is still being sent.",
    lambda part, whole: dist.reduce_scatter_tensor(part, whole, async_op=True),
    lambda part, whole: whole.add_(1),
)


@plant(OVER)
def sent_buffer_written(wrong):
    """A send's buffer is filled anew before it has gone."""
    x = ones()
    if dist.get_rank() == 0:
        work = dist.isend(x, 1)
        if not wrong:
            work.wait()
        x.fill_(2)  # here
        work.wait()
    else:
        dist.irecv(x, 0).wait()


@plant(FLIGHT)
def pinned_written(wrong):
    """The next batch is collated into pinned memory that is still being copied to the device."""
    host = torch.ones(N, pin_memory=True)
    x = host.to("cuda", non_blocking=True)  # here
    if not wrong:
        torch.cuda.current_stream().synchronize()
    host.fill_(2)
    return x


# ---------------------------------------------------------------- freed while it is in use
@plant("freed in flight")
def freed_on_a_side_stream(wrong):
    """A tensor that a side stream still reads is let go of, and its memory given to the next one."""
    side, x = torch.cuda.Stream(), ones(4 * N)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2  # here
    if not wrong:
        x.record_stream(side)
    del x
    z = ones(4 * N)
    return y, z


@plant("freed in flight")
def resized_in_flight(wrong):
    """A unit's storage is freed while its gather is still filling it."""
    whole, part = torch.empty(2 * N, device="cuda"), ones()
    work = dist.all_gather_into_tensor(whole, part, async_op=True)  # here
    if not wrong:
        work.wait()
    whole.untyped_storage().resize_(0)
    x = ones(2 * N)
    work.wait()
    return x


@plant("error", says="storage of no bytes")
def used_after_free(wrong):
    """A unit computes with a parameter whose storage it has freed."""
    x = ones()
    if wrong:
        x.untyped_storage().resize_(0)
    return x * 2  # here


# ---------------------------------------------------------------- the wrong stream
@plant(READ)
def produced_on_a_side_stream(wrong):
    """A side stream's result is read without waiting for that stream."""
    side, x = torch.cuda.Stream(), ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    z = y + 1  # here
    return y, z


@plant(READ)
def reduced_too_soon(wrong):
    """A side stream's gradient is reduced on a stream that has not waited for it."""
    side = torch.cuda.Stream()
    source, whole, part = ones(2 * N), ones(2 * N), ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole.copy_(source)
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    work = dist.reduce_scatter_tensor(part, whole, async_op=True)  # here
    work.wait()


@plant(READ)
def event_recorded_too_soon(wrong):
    """An event is recorded before the kernel that it should stand for."""
    side, x, event = torch.cuda.Stream(), ones(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if wrong:
            event.record()
        y = x * 2
        if not wrong:
            event.record()
    event.wait()
    z = y + 1  # here
    return y, z


@plant(OVER)
def prefetch_overwrites(wrong):
    """A copy stream writes the next batch over the one that is being computed on."""
    copies, host, batch = torch.cuda.Stream(), torch.ones(N, pin_memory=True), ones()
    copies.wait_stream(torch.cuda.current_stream())
    y = batch.relu()
    if not wrong:
        copies.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(copies):
        batch.copy_(host, non_blocking=True)  # here
    return host, batch, y


# ---------------------------------------------------------------- ranks that do not agree
DISAGREE = {"kind": "mismatch", "hangs": True}
in_a_line(
    what="One rank reduces where the other broadcasts.",
    line=lambda wrong: dist.broadcast(ones(), 0) if wrong and dist.get_rank() else dist.all_reduce(ones()),
    says="broadcast",
    **DISAGREE,
)
in_a_line(
    what="The last batch is shorter on one rank.",
    line=lambda wrong: dist.all_gather_into_tensor(ones(16), ones(7 if wrong and dist.get_rank() else 8)),
    **DISAGREE,
)
in_a_line(
    what="One rank's metric has become float64.",
    line=lambda wrong: dist.all_reduce(ones(dtype=torch.float64 if wrong and dist.get_rank() else torch.float32)),
    says="Double",
    **DISAGREE,
)
in_a_line(
    what="One rank asks for the sum, the other for the largest.",
    line=lambda wrong: dist.all_reduce(ones(), dist.ReduceOp.MAX if wrong and dist.get_rank() else dist.ReduceOp.SUM),
    says="op",
    **DISAGREE,
)
in_a_line(
    what="Each rank believes that it is the one to broadcast.",
    line=lambda wrong: dist.broadcast(ones(), dist.get_rank() if wrong else 0),
    says="root",
    **DISAGREE,
)


@plant("nobody came", hangs=True)
def missing_rank(wrong):
    """Only rank 0 evaluates, and evaluation reduces."""
    dist.all_reduce(ones())
    if dist.get_rank() == 0 or not wrong:
        dist.all_reduce(ones())  # here


@plant("nobody came", hangs=True)
def unbatched_exchange(wrong):
    """Both ranks send first and receive then, unbatched: a pair's communicator does one after the other."""
    there, back = ones(), ones()
    if wrong:
        wait_for([dist.isend(there, other()), dist.irecv(back, other())])  # here
    else:
        wait_for(dist.batch_isend_irecv(messages(there, back)))


@plant("nobody came", ranks=3, hangs=True, says="initialise")
def first_use_by_some(wrong):
    """A group's first call is a batch of messages in which one rank has no part."""
    if not wrong:
        dist.barrier()
    x = ones()
    if dist.get_rank() == 0:
        wait_for(dist.batch_isend_irecv([P2POp(dist.isend, x, 2)]))  # here
    elif dist.get_rank() == 2:
        wait_for(dist.batch_isend_irecv([P2POp(dist.irecv, x, 0)]))  # or here


@plant("mismatch", hangs=True, says="message")
def message_sizes(wrong):
    """A stage expects another shape than it is sent."""
    if dist.get_rank() == 0:
        dist.isend(ones(4), 1).wait()  # here
    else:
        dist.irecv(ones(8 if wrong else 4), 0).wait()  # or here


@plant("never waited for")
def dropped_work(wrong):
    """The last all-reduce of an epoch is never waited for."""
    work = dist.all_reduce(ones(), async_op=True)  # here
    if not wrong:
        work.wait()
    del work


@plant("duplicate GPU", hangs=True, says="Duplicate GPU detected")
def device_not_set(wrong):
    """Every rank works on GPU 0."""
    if wrong:
        torch.cuda.set_device(0)
    dist.all_reduce(ones())  # here


# ---------------------------------------------------------------- the device, and what NCCL takes
in_a_line(
    "error",
    "A metric on the host is reduced over NCCL.",
    lambda wrong: dist.all_reduce(torch.ones(4, device="cpu" if wrong else "cuda")),
    says="device type cpu",
)
in_a_line(
    "error",
    "int16 has no NCCL type.",
    lambda wrong: dist.all_reduce(ones(dtype=torch.int16 if wrong else torch.int32)),
    says="not supported for NCCL",
)
in_a_line(
    "error",
    "Every other column is reduced in place.",
    lambda wrong: dist.all_reduce(ones(8, 8)[:, :: 2 if wrong else 1]),
    says="contiguous",
)
in_a_line(
    "error",
    "A batch was left on the host.",
    lambda wrong: ones(4, 4) @ torch.ones(4, 4, device="cpu" if wrong else "cuda"),
    says="same device",
)


@plant("error", says="same device")
def optimizer_state_on_the_host(wrong):
    """A fused optimizer's step count was loaded onto the host."""
    weight = torch.nn.Parameter(ones())
    weight.grad = ones()
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    if wrong:
        optimizer.state[weight]["step"] = torch.tensor(1.0)
    optimizer.step()  # here
