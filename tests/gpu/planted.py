"""Races and misuses of collectives, streams and memory, each beside the same thing done right.

Each function runs on every rank of an ``nccl`` group. With ``wrong`` it does what its docstring says, and the line
marked ``# here`` (``# or here``) is the one to be named; without it, the same work is done as it should be.
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
        function: called on each rank with ``wrong``.
        kind: of the finding that names it; ``error`` where torch or NCCL raises.
        ranks: how many it takes.
        hangs: whether a GPU would wait for ever, so that it has a process of its own.
        says: what the error, or the finding, says.
    """

    function: Callable[[bool], None]
    kind: str
    ranks: int
    hangs: bool
    says: str

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def lines(self) -> list[int]:
        """Of the file: those that are marked."""
        source, first = inspect.getsourcelines(self.function)
        return [first + i for i, line in enumerate(source) if line.rstrip().endswith(("# here", "# or here"))]


PLANTS: list[Plant] = []
READ, TWO, OVER, FLIGHT = (
    "read before it was written",
    "two writes at once",
    "written while it was read",
    "written in flight",
)


def plant(kind, ranks=2, hangs=False, says=""):
    def take(function):
        PLANTS.append(Plant(function, kind, ranks, hangs, says))
        return function

    return take


def ones(*shape, **options):
    return torch.ones(*(shape or (N,)), device="cuda", **options)


def other():
    return 1 - dist.get_rank()


# ---------------------------------------------------------------- read before it is there
@plant(READ)
def all_reduce_read(wrong):
    """A sum is read while it is being made."""
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    if not wrong:
        work.wait()
    y = x * 2  # here
    work.wait()
    return y


@plant(READ)
def all_gather_read(wrong):
    """A gathered parameter is used before it has come."""
    whole, part = ones(2 * N), ones()
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    if not wrong:
        work.wait()
    y = whole.sum()  # here
    work.wait()
    return y


@plant(READ)
def reduce_scatter_read(wrong):
    """A rank's share of the gradient is used before it has come."""
    part, whole = ones(), ones(2 * N)
    work = dist.reduce_scatter_tensor(part, whole, async_op=True)
    if not wrong:
        work.wait()
    y = part.norm()  # here
    work.wait()
    return y


@plant(READ)
def broadcast_read(wrong):
    """Weights are used before rank 0's have come."""
    x = ones()
    work = dist.broadcast(x, 0, async_op=True)
    if not wrong:
        work.wait()
    y = x + 1  # here
    work.wait()
    return y


@plant(READ)
def all_to_all_read(wrong):
    """Tokens of other ranks are worked on before they have come."""
    there, back = ones(), ones()
    work = dist.all_to_all_single(back, there, async_op=True)
    if not wrong:
        work.wait()
    y = back.relu()  # here
    work.wait()
    return y


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
def batch_read(wrong):
    """What a batch of messages brings is used before any of its works has been waited for."""
    there, back = ones(), ones()
    works = dist.batch_isend_irecv([P2POp(dist.isend, there, other()), P2POp(dist.irecv, back, other())])
    if not wrong:
        for work in works:
            work.wait()
    y = back + there  # here
    for work in works:
        work.wait()
    return y


@plant(READ)
def reduce_read(wrong):
    """Rank 0 reads a sum that is still being made for it."""
    x = ones()
    work = dist.reduce(x, 0, async_op=True)
    if not wrong:
        work.wait()
    y = x.mean()  # here
    work.wait()
    return y


@plant(READ)
def gather_list_read(wrong):
    """One of the tensors of an all_gather's list is read too soon."""
    parts, mine = [ones(), ones()], ones()
    work = dist.all_gather(parts, mine, async_op=True)
    if not wrong:
        work.wait()
    y = torch.stack(parts)  # here
    work.wait()
    return y


@plant(READ)
def scatter_read(wrong):
    """A share that rank 0 deals out is read too soon."""
    x = ones()
    work = dist.scatter(x, [ones(), ones()] if dist.get_rank() == 0 else None, src=0, async_op=True)
    if not wrong:
        work.wait()
    y = x - 1  # here
    work.wait()
    return y


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
def step_before_gradients(wrong):
    """The optimizer steps while a hook's all-reduce of the gradient is under way."""
    weight = torch.nn.Parameter(ones())
    works = []
    weight.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    (weight * 2).sum().backward()
    if not wrong:
        for work in works:
            work.wait()
    torch.optim.SGD([weight], lr=0.1, foreach=False).step()  # here
    for work in works:
        work.wait()


@plant(READ)
def forward_before_gather(wrong):
    """A layer computes with a flat parameter whose gather it has not waited for."""
    whole, part, x = ones(2 * N), ones(), ones(4, 2)
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    weight = whole.view(N, 2)
    if not wrong:
        work.wait()
    y = torch.nn.functional.linear(x, weight)  # here
    work.wait()
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
@plant(TWO)
def all_reduce_written(wrong):
    """A gradient is cleared while it is being summed."""
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    if not wrong:
        work.wait()
    x.zero_()  # here
    work.wait()


@plant(OVER)
def reduce_scatter_input_written(wrong):
    """The next micro-batch's gradients are added to what is still being sent."""
    part, whole = ones(), ones(2 * N)
    work = dist.reduce_scatter_tensor(part, whole, async_op=True)
    if not wrong:
        work.wait()
    whole.add_(1)  # here
    work.wait()


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


@plant(OVER)
def gather_input_written(wrong):
    """The optimizer updates a shard that is being gathered."""
    whole, part = ones(2 * N), ones()
    work = dist.all_gather_into_tensor(whole, part, async_op=True)
    if not wrong:
        work.wait()
    part.mul_(0.9)  # here
    work.wait()


@plant(TWO)
def bucket_written(wrong):
    """One parameter's gradient is written into its view of a bucket that is being reduced."""
    bucket = ones(4 * N)
    work = dist.all_reduce(bucket, async_op=True)
    if not wrong:
        work.wait()
    bucket[N : 2 * N].copy_(ones())  # here
    work.wait()


@plant(TWO)
def one_buffer_two_groups(wrong):
    """One buffer is reduced over two groups at once."""
    x, second = ones(), dist.new_group([0, 1])
    dist.all_reduce(ones(), group=second)
    first = dist.all_reduce(x, async_op=True)
    if not wrong:
        first.wait()
    then = dist.all_reduce(x, group=second, async_op=True)  # here
    first.wait()
    then.wait()


@plant(FLIGHT)
def pinned_written(wrong):
    """The next batch is collated into pinned memory that is still being copied to the device."""
    host = torch.ones(N, pin_memory=True)
    x = host.to("cuda", non_blocking=True)  # here
    if not wrong:
        torch.cuda.current_stream().synchronize()
    host.fill_(2)
    torch.cuda.synchronize()
    return x


@plant(READ)
def receive_buffer_reused(wrong):
    """A stage computes on the buffer of its last receive while the next one arrives in it."""
    x = ones()
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.isend(x, 1).wait()
    else:
        dist.irecv(x, 0).wait()
        work = dist.irecv(x, 0)
        if not wrong:
            work.wait()
        y = x.exp()  # here
        work.wait()
        return y


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
    torch.cuda.synchronize()
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
    side = torch.cuda.Stream()
    x = ones()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    z = y + 1  # here
    torch.cuda.synchronize()
    return z


@plant(READ)
def side_stream_reads_too_soon(wrong):
    """A side stream reads what the main one has not made yet."""
    side, x = torch.cuda.Stream(), ones()
    x.mul_(3)
    if not wrong:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1  # here
    torch.cuda.synchronize()
    return y


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
    torch.cuda.synchronize()


@plant(READ)
def waited_on_the_wrong_stream(wrong):
    """A side stream waits for a gather that the main one reads."""
    side, x = torch.cuda.Stream(), ones()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side if wrong else torch.cuda.current_stream()):
        work.wait()
    y = x * 2  # here
    torch.cuda.synchronize()
    return y


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
    torch.cuda.synchronize()
    return z


@plant(READ)
def prefetched_batch(wrong):
    """A copy stream brings the next batch, for which the computing stream does not wait."""
    copies, host = torch.cuda.Stream(), torch.ones(N, pin_memory=True)
    with torch.cuda.stream(copies):
        batch = host.to("cuda", non_blocking=True)
    if not wrong:
        torch.cuda.current_stream().wait_stream(copies)
    y = batch.relu()  # here
    torch.cuda.synchronize()
    return y


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
    torch.cuda.synchronize()
    return y


@plant(TWO)
def optimizer_on_a_side_stream(wrong):
    """An optimizer on a stream of its own clears gradients that the next backward already adds to."""
    side, weight = torch.cuda.Stream(), torch.nn.Parameter(ones())
    (weight * 2).sum().backward()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        weight.grad.zero_()
    if not wrong:
        torch.cuda.current_stream().wait_stream(side)
    weight.grad.add_(1)  # here
    torch.cuda.synchronize()


# ---------------------------------------------------------------- ranks that do not agree
@plant("mismatch", hangs=True, says="all_reduce")
def order_by_rank(wrong):
    """Two gradients are reduced in the order in which each rank's hooks happened to fire."""
    small, large = ones(4), ones(8)
    for x in (small, large) if dist.get_rank() == 0 or not wrong else (large, small):
        dist.all_reduce(x)  # here
    torch.cuda.synchronize()


@plant("mismatch", hangs=True, says="broadcast")
def different_collectives(wrong):
    """One rank reduces where the other broadcasts."""
    if dist.get_rank() == 0 or not wrong:
        dist.all_reduce(ones())  # here
    else:
        dist.broadcast(ones(), 0)  # or here
    torch.cuda.synchronize()


@plant("mismatch", hangs=True)
def different_sizes(wrong):
    """The last batch is shorter on one rank."""
    rows = 7 if wrong and dist.get_rank() == 1 else 8
    dist.all_gather_into_tensor(ones(2 * rows), ones(rows))  # here
    torch.cuda.synchronize()


@plant("mismatch", hangs=True, says="Double")
def different_dtypes(wrong):
    """One rank's metric has become float64."""
    dist.all_reduce(ones(dtype=torch.float64 if wrong and dist.get_rank() else torch.float32))  # here
    torch.cuda.synchronize()


@plant("mismatch", hangs=True, says="op")
def different_reductions(wrong):
    """One rank asks for the sum, the other for the largest."""
    dist.all_reduce(ones(), dist.ReduceOp.MAX if wrong and dist.get_rank() else dist.ReduceOp.SUM)  # here
    torch.cuda.synchronize()


@plant("mismatch", hangs=True, says="root")
def different_roots(wrong):
    """Each rank believes that it is the one to broadcast."""
    dist.broadcast(ones(), dist.get_rank() if wrong else 0)  # here
    torch.cuda.synchronize()


@plant("nobody came", hangs=True)
def missing_rank(wrong):
    """Only rank 0 evaluates, and evaluation reduces."""
    dist.all_reduce(ones())
    torch.cuda.synchronize()
    if dist.get_rank() == 0 or not wrong:
        dist.all_reduce(ones())  # here
        torch.cuda.synchronize()


@plant("nobody came", hangs=True)
def wrong_group(wrong):
    """Two groups of the same ranks, and each rank takes another one."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups:
        dist.all_reduce(ones(), group=group)
    torch.cuda.synchronize()
    dist.all_reduce(ones(), group=groups[dist.get_rank() if wrong else 0])  # here
    torch.cuda.synchronize()


@plant("nobody came", hangs=True)
def by_the_loss(wrong):
    """A rank whose own loss is small leaves the loop before the others."""
    loss = 0.1 if wrong and dist.get_rank() == 1 else 1.0
    for _ in range(3):
        dist.all_reduce(ones())  # here
        torch.cuda.synchronize()
        if loss < 0.5:
            break


@plant("nobody came", hangs=True)
def unbatched_ring(wrong):
    """Both ranks send first and receive then, one message after the other."""
    there, back = ones(), ones()
    if wrong or dist.get_rank() == 0:
        dist.send(there, other())  # here
        dist.recv(back, other())
    else:
        dist.recv(back, other())
        dist.send(there, other())
    torch.cuda.synchronize()


@plant("nobody came", hangs=True)
def unbatched_exchange(wrong):
    """The same with isend and irecv: a pair's communicator still does one after the other."""
    there, back = ones(), ones()
    sends, receives = P2POp(dist.isend, there, other()), P2POp(dist.irecv, back, other())
    if wrong:
        works = [dist.isend(there, other()), dist.irecv(back, other())]  # here
    else:
        works = dist.batch_isend_irecv([sends, receives])
    for work in works:
        work.wait()
    torch.cuda.synchronize()


@plant("nobody came", ranks=3, hangs=True, says="initialise")
def first_use_by_some(wrong):
    """A group's first call is a batch of messages in which one rank has no part."""
    if not wrong:
        dist.barrier()
    x = ones()
    if dist.get_rank() == 0:
        works = dist.batch_isend_irecv([P2POp(dist.isend, x, 2)])  # here
    elif dist.get_rank() == 2:
        works = dist.batch_isend_irecv([P2POp(dist.irecv, x, 0)])  # or here
    else:
        works = []
    for work in works:
        work.wait()
    torch.cuda.synchronize()


@plant("nobody came", hangs=True)
def one_message_more(wrong):
    """A stage sends a micro-batch more than the next one receives."""
    x = ones()
    if dist.get_rank() == 0:
        for _ in range(3 if wrong else 2):
            dist.isend(x, 1).wait()  # here
    else:
        for _ in range(2):
            dist.irecv(x, 0).wait()
    torch.cuda.synchronize()


@plant("mismatch", hangs=True, says="message")
def message_sizes(wrong):
    """A stage expects another shape than it is sent."""
    if dist.get_rank() == 0:
        dist.isend(ones(4), 1).wait()  # here
    else:
        dist.irecv(ones(8 if wrong else 4), 0).wait()  # or here
    torch.cuda.synchronize()


@plant("never waited for")
def dropped_work(wrong):
    """The last all-reduce of an epoch is never waited for."""
    work = dist.all_reduce(ones(), async_op=True)  # here
    if not wrong:
        work.wait()
    del work
    torch.cuda.synchronize()


# ---------------------------------------------------------------- the device, and what NCCL takes
@plant("duplicate GPU", hangs=True, says="Duplicate GPU detected")
def device_not_set(wrong):
    """Every rank works on GPU 0."""
    if wrong:
        torch.cuda.set_device(0)
    dist.all_reduce(ones())  # here


@plant("error", says="device type cpu")
def host_tensor(wrong):
    """A metric on the host is reduced over NCCL."""
    dist.all_reduce(torch.ones(4, device="cpu" if wrong else "cuda"))  # here


@plant("error", says="not supported for NCCL")
def short_integers(wrong):
    """int16 has no NCCL type."""
    dist.all_reduce(ones(dtype=torch.int16 if wrong else torch.int32))  # here


@plant("error", says="Cannot use ReduceOp.BAND")
def bitwise(wrong):
    """NCCL has no bitwise reductions."""
    dist.all_reduce(ones(dtype=torch.int32), dist.ReduceOp.BAND if wrong else dist.ReduceOp.MIN)  # here


@plant("error", says="contiguous")
def strided(wrong):
    """Every other column is reduced in place."""
    x = ones(8, 8)
    dist.all_reduce(x[:, ::2] if wrong else x[:, ::2].contiguous())  # here


@plant("error", says="same device")
def two_devices(wrong):
    """A batch was left on the host."""
    return ones(4, 4) @ torch.ones(4, 4, device="cpu" if wrong else "cuda")  # here


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


@plant("error", says="synchronizing CUDA operation")
def host_sync_in_the_loop(wrong):
    """The loss is read on the host in every step."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = ones().sum()
        if wrong:
            loss.item()  # here
    finally:
        torch.cuda.set_sync_debug_mode("default")


@plant("error", says="synchronizing CUDA operation")
def mask_in_the_loop(wrong):
    """Rows are chosen by a mask, whose length the host has to know."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        x = ones()
        y = x[x > 0] if wrong else torch.where(x > 0, x, 0)  # here
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return y


@plant("error", says="fork")
def fork_after_use(wrong):
    """A process that has used the device forks one that uses it too."""
    import os

    if not wrong:
        return
    ones()
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ones()
        except RuntimeError as error:
            os.write(sender, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(sender)
    said = os.read(receiver, 1000).decode()
    raise RuntimeError(said or "nothing was raised")  # here
