"""Collectives from send and receive against torch.distributed's, at 1, 2, 3 and 4 ranks, and the bytes that they send.

Values are small whole numbers, whose sums are exact in every dtype and every order: results have to be equal.
"""

import contextlib
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.parallel import collectives

SIZES = (1, 2, 3, 4)
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


def same(mine, theirs):
    return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


def compare_all_reduce(group, rank):
    outcomes = []
    for shape in SHAPES:
        for dtype in DTYPES:
            for op in OPS:
                mine = tensor_of(rank, shape, dtype)
                theirs = mine.clone()
                assert collectives.all_reduce(mine, op, group) is None
                dist.all_reduce(theirs, op, group)
                outcomes.append(same(mine, theirs))
    return outcomes


def compare_the_others(group, rank, ranks):
    """Those that scatter, gather and swap; parts of unequal shapes against what they are by definition."""
    first = dist.get_global_rank(group, 0)
    outcomes = []
    for shape in SHAPES:
        for dtype in DTYPES:
            inputs = [tensor_of(rank + 7 * i, shape, dtype) for i in range(ranks)]
            kept = [each.clone() for each in inputs]
            mine, theirs = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
            collectives.reduce_scatter(mine, inputs, group=group)
            dist.reduce_scatter(theirs, kept, group=group)
            outcomes += [same(mine, theirs), all(map(same, inputs, kept))]

            mine, theirs = ([torch.empty(shape, dtype=dtype) for _ in range(ranks)] for _ in range(2))
            collectives.all_gather(mine, inputs[0], group)
            dist.all_gather(theirs, inputs[0], group)
            outcomes.append(all(map(same, mine, theirs)))

            collectives.all_to_all(mine, inputs, group)
            flat = torch.empty(ranks * math.prod(shape), dtype=dtype)
            dist.all_to_all_single(flat, torch.cat([each.reshape(-1) for each in inputs]), group=group)
            outcomes.append(same(torch.cat([each.reshape(-1) for each in mine]), flat))

            for source in range(ranks):
                mine = tensor_of(rank, shape, dtype)
                collectives.broadcast(mine, first + source, group)
                outcomes.append(same(mine, tensor_of(source, shape, dtype)))

    uneven = [tensor_of(rank, (i, 3), torch.float32) for i in range(ranks)]
    mine = torch.empty(rank, 3)
    collectives.reduce_scatter(mine, uneven, group=group)
    outcomes.append(same(mine, sum(tensor_of(other, (rank, 3), torch.float32) for other in range(ranks))))
    gathered = [torch.empty(i, 3) for i in range(ranks)]
    collectives.all_gather(gathered, uneven[rank], group)
    outcomes.append(all(same(gathered[i], tensor_of(i, (i, 3), torch.float32)) for i in range(ranks)))
    swapped = [torch.empty(rank, 3) for _ in range(ranks)]
    collectives.all_to_all(swapped, uneven, group)
    outcomes.append(all(same(swapped[i], tensor_of(i, (rank, 3), torch.float32)) for i in range(ranks)))
    return outcomes


def special_tensors(group, rank, ranks):
    """Mean, booleans, tensors that are not contiguous, dtypes that gloo refuses, and the same bits on all ranks."""
    mean = tensor_of(rank, (5,), torch.float32)
    collectives.all_reduce(mean, ReduceOp.AVG, group)
    expected = sum(tensor_of(other, (5,), torch.float32) for other in range(ranks)) / ranks

    flags = {}
    for op, combine in ((ReduceOp.SUM, torch.any), (ReduceOp.MAX, torch.any), (ReduceOp.MIN, torch.all)):
        flag = tensor_of(rank, (6,), torch.int64) > 1
        collectives.all_reduce(flag, op, group)
        flags[op] = same(flag, combine(torch.stack([tensor_of(o, (6,), torch.int64) > 1 for o in range(ranks)]), 0))

    base = torch.zeros(4, 6)
    strided = base.t()[1:5]
    strided.copy_(tensor_of(rank, (4, 4), torch.float32))
    collectives.all_reduce(strided, group=group)
    total = sum(tensor_of(other, (4, 4), torch.float32) for other in range(ranks))

    short = tensor_of(rank, (5,), torch.int16)
    collectives.all_reduce(short, group=group)

    real = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    exact = sum(torch.randn(1001, generator=torch.Generator().manual_seed(o)).double() for o in range(ranks))
    collectives.all_reduce(real, group=group)
    copies = [torch.empty(1001) for _ in range(ranks)]
    dist.all_gather(copies, real, group=group)
    return {
        "mean": torch.equal(mean, expected),
        "booleans": all(flags.values()),
        "strided": torch.equal(strided, total) and not strided.is_contiguous() and float(base[:, 0].sum()) == 0,
        "int16": same(short, sum(tensor_of(other, (5,), torch.int16) for other in range(ranks))),
        "same bits": all(torch.equal(copy, real) for copy in copies),
        "rounding": bool(torch.allclose(real.double(), exact, atol=1e-6)),
    }


def bytes_of_each(group, rank, ranks):
    sent = {}
    for numel in (24, 25, 2):
        with messages_sent() as messages:
            collectives.all_reduce(torch.zeros(numel), group=group)
        sent["all_reduce", numel] = messages
    parts = [torch.zeros(6) for _ in range(ranks)]
    with messages_sent() as messages:
        collectives.reduce_scatter(torch.zeros(6), parts, group=group)
    sent["reduce_scatter"] = messages
    with messages_sent() as messages:
        collectives.all_gather(parts, torch.zeros(6), group)
    sent["all_gather"] = messages
    with messages_sent() as messages:
        collectives.all_to_all(parts, [torch.zeros(6) for _ in range(ranks)], group)
    sent["all_to_all"] = messages
    with messages_sent() as messages:
        collectives.barrier(group)
    sent["barrier"] = messages
    with messages_sent(alone=True) as messages:
        collectives.broadcast(torch.zeros(6), dist.get_global_rank(group, 0), group)
    sent["broadcast"] = messages
    return sent


def mistakes(group, rank, ranks):
    """What each mistake says; no rank waits for another."""
    said = []
    for call in (
        lambda: collectives.all_gather([torch.zeros(2)] * (ranks + 1), torch.zeros(2), group),
        lambda: collectives.all_gather([torch.zeros(1)] * ranks, torch.zeros(2), group),
        lambda: collectives.reduce_scatter(torch.zeros(2).int(), [torch.zeros(2)] * ranks, group=group),
        lambda: collectives.all_reduce(torch.zeros(2).int(), ReduceOp.AVG, group),
        lambda: collectives.all_to_all([torch.zeros(2)] * ranks, [torch.zeros(2)] * (ranks - 1), group),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))
    return said


def on_every_size():
    """On the groups of the first 1, 2, 3 and 4 ranks, and on one that is not the first ranks."""
    dist.init_process_group("gloo")
    me, results = dist.get_rank(), {}
    members = [list(range(size)) for size in SIZES] + [[1, 3]]
    groups = [dist.new_group(each) for each in members]
    for ranks, group in zip(members, groups, strict=True):
        if me not in ranks:
            continue
        rank, size = ranks.index(me), len(ranks)
        results[tuple(ranks)] = {
            "all_reduce": compare_all_reduce(group, rank),
            "special": special_tensors(group, rank, size),
            "sent": bytes_of_each(group, rank, size),
            "said": mistakes(group, rank, size),
            # A group whose first rank is not the job's: broadcast's source is a rank of the job.
            "others": compare_the_others(group, rank, size) if ranks != [1, 3] else sub_group(group, rank),
        }
    if me == 0:
        with pytest.raises(ConfigError, match="rank 0 called a collective of a group that it is not in"):
            collectives.all_reduce(torch.zeros(1), group=groups[-1])
    results["barrier"] = pass_a_barrier(me)
    return results


def pass_a_barrier(rank):
    """Whether rank 0 was there before and after the barrier."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait([f"rank {other} waits" for other in (1, 2, 3)])
        time.sleep(0.3)
        store.set("rank 0 is here", "")
        return collectives.barrier()
    before = "here before" if store.check(["rank 0 is here"]) else "away before"
    store.set(f"rank {rank} waits", "")
    collectives.barrier()
    return before, "here after" if store.check(["rank 0 is here"]) else "away after"


def sub_group(group, rank):
    tensor = torch.tensor([10.0 * (rank + 1)])
    collectives.broadcast(tensor, src=3, group=group)
    parts = [torch.zeros(2), torch.zeros(2)]
    collectives.all_gather(parts, torch.full((2,), float(rank)), group)
    return [tensor.item() == 20.0, parts[0].sum().item() == 0.0, parts[1].sum().item() == 2.0]


@pytest.fixture(scope="module")
def results():
    return launch(on_every_size, num_processes=4, timeout=440)


def each(results):
    return [
        (rank, ranks, found)
        for rank, of_rank in enumerate(results)
        for ranks, found in of_rank.items()
        if ranks != "barrier"
    ]


def test_all_reduce_equals_torchs(results):
    """8 shapes (fewer elements than ranks, none at all, no dimension), 7 dtypes, 4 operations."""
    assert len(each(results)) == 1 + 2 + 3 + 4 + 2
    for _, _, found in each(results):
        assert len(found["all_reduce"]) == 8 * 7 * 4 and all(found["all_reduce"])


def test_the_others_equal_torchs(results):
    for _, ranks, found in each(results):
        expected = 3 if ranks == (1, 3) else 8 * 7 * (4 + len(ranks)) + 3
        assert len(found["others"]) == expected and all(found["others"]), found["others"]


def test_means_booleans_strides_and_rounding(results):
    for rank, ranks, found in each(results):
        assert len(found["special"]) == 6
        assert all(found["special"].values()), (rank, ranks, found["special"])


def test_bytes_are_those_of_the_formula(results):
    """all_reduce: 2 (N - 1) / N times the tensor, exactly, in 2 (N - 1) messages; the others as documented."""
    for rank, ranks, found in each(results):
        size, sent = len(ranks), found["sent"]
        assert sent["all_reduce", 24] == [24 * 4 // size] * (2 * (size - 1))
        for name in ("reduce_scatter", "all_gather", "all_to_all"):
            assert sent[name] == [6 * 4] * (size - 1), (rank, ranks, name)
        assert sent["barrier"] == [1] * math.ceil(math.log2(size))
        assert len(sent["broadcast"]) <= math.ceil(math.log2(size))


def test_bytes_where_the_elements_do_not_divide(results):
    """Nothing is padded: all ranks together send 2 (N - 1) times the tensor, and one rank 2 elements more at most."""
    for ranks in {ranks for _, ranks, _ in each(results)}:
        for numel in (25, 2):
            sent = [sum(results[rank][ranks]["sent"]["all_reduce", numel]) for rank in ranks]
            assert sum(sent) == 2 * (len(ranks) - 1) * numel * 4
            assert all(abs(each - sum(sent) / len(ranks)) <= 2 * 4 for each in sent)


def test_a_broadcast_sends_the_tensor_once_to_each_of_the_others(results):
    for ranks in {ranks for _, ranks, _ in each(results)}:
        assert sum(sum(results[rank][ranks]["sent"]["broadcast"]) for rank in ranks) == 6 * 4 * (len(ranks) - 1)


def test_mistakes_are_told_before_anyone_waits(results):
    said = results[3][1, 3]["said"]
    assert "all_gather was given 3 tensors for 2 ranks" in said[0]
    assert "all_gather on rank 1: tensor 1 of the list is (1,) torch.float32, and the other (2,)" in said[1]
    assert "torch.int32" in said[2]
    assert "no RedOpType.AVG of torch.int32" in said[3]
    assert "all_to_all was given 1 tensors for 2 ranks" in said[4]


def test_a_barrier_holds_the_others_back(results):
    """Rank 0 comes late, after it has heard that the others are about to call the barrier."""
    assert [of_rank["barrier"] for of_rank in results] == [None] + [("away before", "here after")] * 3
