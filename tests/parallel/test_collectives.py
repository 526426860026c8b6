"""Collectives from send and receive against torch.distributed's, at 1, 2, 3 and 4 ranks, and the bytes that they send.

Values are small whole numbers, whose sums are exact in every dtype and every order: results have to be equal.
"""

import contextlib
import functools
import itertools
import math
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.parallel import collectives
from tests.parallel.between_ranks import here, spread
from tests.ranks import on_ranks

SHAPES = ((12,), (3, 4), (7,), (1,), (), (0,), (2, 0, 3), (5, 3, 3))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
OPS = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)


def tensor_of(rank, shape, dtype):
    """Whole numbers from 0 to 4, other ones on each rank."""
    return ((torch.arange(math.prod(shape)) * 3 + 2 * rank * rank + rank) % 5).reshape(shape).to(dtype)


@contextlib.contextmanager
def messages_sent(alone=False):
    """Bytes of each message that this rank hands to isend: in a batch, as all do, or alone, as the tree does."""
    batch, isend, messages = dist.batch_isend_irecv, dist.isend, []

    def count_batch(operations):
        messages.extend(each.tensor.nbytes for each in operations if each.op is isend)
        return batch(operations)

    def count_alone(tensor, **options):
        messages.append(tensor.nbytes)
        return isend(tensor, **options)

    with mock.patch.object(dist, *(("isend", count_alone) if alone else ("batch_isend_irecv", count_batch))):
        yield messages


def assert_equal(mine, theirs, *what):
    assert_close(mine, theirs, rtol=0, atol=0, msg=lambda said: f"{what}: {said}")


def total(of_rank):
    return sum(of_rank(other) for other in range(dist.get_world_size()))


@on_ranks(1, 2, 3, 4)
def test_all_reduce_equals_torchs():
    """8 shapes (fewer elements than ranks, none at all, no dimension), 7 dtypes, 4 operations."""
    for shape, dtype, op in itertools.product(SHAPES, DTYPES, OPS):
        mine, theirs = (tensor_of(dist.get_rank(), shape, dtype) for _ in range(2))
        collectives.all_reduce(mine, op)
        dist.all_reduce(theirs, op)
        assert_equal(mine, theirs, shape, dtype, op)


@on_ranks(1, 2, 3, 4)
def test_those_that_scatter_gather_and_swap_equal_torchs():
    rank, ranks = here()
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        inputs = [tensor_of(rank + 7 * i, shape, dtype) for i in range(ranks)]
        kept = [each.clone() for each in inputs]
        mine, theirs = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        collectives.reduce_scatter(mine, inputs)
        dist.reduce_scatter(theirs, kept)
        assert_equal(mine, theirs, "reduce_scatter", shape, dtype)
        assert_equal(inputs, kept, "reduce_scatter's inputs", shape, dtype)

        mine, theirs = ([torch.empty(shape, dtype=dtype) for _ in range(ranks)] for _ in range(2))
        collectives.all_gather(mine, inputs[0])
        dist.all_gather(theirs, inputs[0])
        assert_equal(mine, theirs, "all_gather", shape, dtype)

        collectives.all_to_all(mine, inputs)
        flat = torch.empty(ranks * math.prod(shape), dtype=dtype)
        dist.all_to_all_single(flat, torch.cat([each.reshape(-1) for each in inputs]))
        assert_equal(torch.cat([each.reshape(-1) for each in mine]), flat, "all_to_all", shape, dtype)

        for source in range(ranks):
            mine = tensor_of(rank, shape, dtype)
            collectives.broadcast(mine, source)
            assert_equal(mine, tensor_of(source, shape, dtype), "broadcast", shape, dtype, source)


@on_ranks(1, 2, 3, 4)
def test_parts_of_unequal_shapes():
    rank, ranks = here()
    uneven = [tensor_of(rank, (i, 3), torch.float32) for i in range(ranks)]
    mine = torch.empty(rank, 3)
    collectives.reduce_scatter(mine, uneven)
    assert_equal(mine, total(lambda other: tensor_of(other, (rank, 3), torch.float32)))
    gathered = [torch.empty(i, 3) for i in range(ranks)]
    collectives.all_gather(gathered, uneven[rank])
    assert_equal(gathered, [tensor_of(i, (i, 3), torch.float32) for i in range(ranks)])
    swapped = [torch.empty(rank, 3) for _ in range(ranks)]
    collectives.all_to_all(swapped, uneven)
    assert_equal(swapped, [tensor_of(i, (rank, 3), torch.float32) for i in range(ranks)])


@on_ranks(1, 2, 3, 4)
def test_means_booleans_strides_and_dtypes_that_gloo_refuses():
    rank, ranks = here()
    mean = tensor_of(rank, (5,), torch.float32)
    collectives.all_reduce(mean, ReduceOp.AVG)
    assert_equal(mean, total(lambda other: tensor_of(other, (5,), torch.float32)) / ranks)

    flags = torch.stack([tensor_of(other, (6,), torch.int64) > 1 for other in range(ranks)])
    for op, combine in ((ReduceOp.SUM, torch.any), (ReduceOp.MAX, torch.any), (ReduceOp.MIN, torch.all)):
        flag = flags[rank].clone()
        collectives.all_reduce(flag, op)
        assert_equal(flag, combine(flags, 0), op)

    base = torch.zeros(4, 6)
    strided = base.t()[1:5]
    strided.copy_(tensor_of(rank, (4, 4), torch.float32))
    collectives.all_reduce(strided)
    assert_equal(strided, total(lambda other: tensor_of(other, (4, 4), torch.float32)))
    assert not strided.is_contiguous() and base[:, 0].count_nonzero() == 0

    short = tensor_of(rank, (5,), torch.int16)
    collectives.all_reduce(short)
    assert_equal(short, total(lambda other: tensor_of(other, (5,), torch.int16)))


@on_ranks(1, 2, 3, 4)
def test_sums_of_real_numbers_have_the_same_bits_on_all_ranks():
    def real(rank):
        return torch.randn(1001, generator=torch.Generator().manual_seed(rank))

    mine = real(dist.get_rank())
    collectives.all_reduce(mine)
    assert spread([mine]) == 0
    assert_close(mine.double(), total(lambda other: real(other).double()), rtol=1e-5, atol=1e-6)


@on_ranks(1, 2, 3, 4)
def test_bytes_are_those_of_the_formula():
    """all_reduce: 2 (N - 1) / N times the tensor, exactly, in 2 (N - 1) messages; the others as documented."""
    _, size = here()
    parts, more = ([torch.zeros(6) for _ in range(size)] for _ in range(2))
    rounds = math.ceil(math.log2(size))
    for call, expected in (
        (functools.partial(collectives.all_reduce, torch.zeros(24)), [24 * 4 // size] * (2 * (size - 1))),
        (functools.partial(collectives.reduce_scatter, torch.zeros(6), parts), [6 * 4] * (size - 1)),
        (functools.partial(collectives.all_gather, parts, torch.zeros(6)), [6 * 4] * (size - 1)),
        (functools.partial(collectives.all_to_all, parts, more), [6 * 4] * (size - 1)),
        (collectives.barrier, [1] * rounds),
    ):
        with messages_sent() as messages:
            call()
        assert messages == expected, call

    with messages_sent(alone=True) as messages:
        collectives.broadcast(torch.zeros(6))
    assert len(messages) <= rounds
    sent = torch.tensor(sum(messages))
    dist.all_reduce(sent)
    assert sent == 6 * 4 * (size - 1), "once to each of the others"


@pytest.mark.parametrize("numel", [25, 2])
@on_ranks(1, 2, 3, 4)
def test_bytes_where_the_elements_do_not_divide(numel):
    """Nothing is padded: all ranks together send 2 (N - 1) times the tensor, and one rank 2 elements more at most."""
    size = dist.get_world_size()
    with messages_sent() as messages:
        collectives.all_reduce(torch.zeros(numel))
    of_all = torch.tensor(sum(messages))
    dist.all_reduce(of_all)
    assert of_all == 2 * (size - 1) * numel * 4
    assert sum(messages) == pytest.approx(of_all.item() / size, abs=2 * 4)


@on_ranks(4)
def test_a_group_whose_first_rank_is_not_the_jobs():
    group, rank = dist.new_group([1, 3]), dist.get_rank()
    if rank in (1, 3):
        reduced, scattered, sent = torch.full((3,), float(rank)), torch.zeros(2), torch.tensor([10.0 * rank])
        collectives.all_reduce(reduced, group=group)
        assert_equal(reduced, torch.full((3,), 4.0))
        collectives.reduce_scatter(scattered, [torch.full((2,), rank + 10.0 * i) for i in range(2)], group=group)
        assert_equal(scattered, torch.full((2,), 4.0 if rank == 1 else 24.0))
        collectives.broadcast(sent, src=3, group=group)  # a rank of the job
        assert sent == 30
        parts, swapped = [torch.zeros(2) for _ in range(2)], [torch.zeros(1) for _ in range(2)]
        collectives.all_gather(parts, torch.full((2,), float(rank)), group)
        assert_equal(parts, [torch.ones(2), torch.full((2,), 3.0)])
        collectives.all_to_all(swapped, [torch.tensor([rank + 10.0 * i]) for i in range(2)], group)
        assert_equal(swapped, [torch.tensor([one + 10.0 * (rank // 2)]) for one in (1, 3)])
        collectives.barrier(group)
    else:
        with pytest.raises(ConfigError, match=f"rank {rank} called a collective of a group that it is not in"):
            collectives.all_reduce(torch.zeros(1), group=group)


@on_ranks(2)
def test_mistakes_are_told_before_anyone_waits():
    one, two = torch.zeros(1), torch.zeros(2)
    for says, call, *arguments in (
        ("all_gather was given 3 tensors for 2 ranks", collectives.all_gather, [two] * 3, two),
        ("of the list is (1,) torch.float32, and the other (2,)", collectives.all_gather, [one] * 2, two),
        ("torch.int32", collectives.reduce_scatter, two.int(), [two] * 2),
        ("no RedOpType.AVG of torch.int32", collectives.all_reduce, two.int(), ReduceOp.AVG),
        ("all_to_all was given 1 tensors for 2 ranks", collectives.all_to_all, [two] * 2, [two]),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            call(*arguments)


@on_ranks(4)
def test_a_barrier_holds_the_others_back():
    """Rank 0 comes late, after it has heard that the others are about to call the barrier."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait([f"rank {other} waits" for other in (1, 2, 3)])
        time.sleep(0.3)
        store.set("rank 0 is here", "")
        collectives.barrier()
    else:
        assert not store.check(["rank 0 is here"])
        store.set(f"rank {rank} waits", "")
        collectives.barrier()
        assert store.check(["rank 0 is here"])
