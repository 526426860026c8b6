"""Compressing communication hooks on real ranks, each against its definition in one process, and against torch's.

In float64 where a hook sends the gradients' own dtype, so that the order of a sum shows in the 16th digit only.
"""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from course_lib.errors import ConfigError
from course_lib.metering.meter import Meter
from course_lib.parallel.communication.block_quantization import dequantize, levels, quantize, quantized_bytes
from course_lib.parallel.communication.hierarchical import HierarchicalAllReduce, machine_groups
from course_lib.parallel.communication.hooks import ErrorFeedback, all_gather_bytes, all_reduce_bytes
from course_lib.parallel.communication.power_sgd import PowerSGD, matrix_shape
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.communication.top_k import TopK
from course_lib.parallel.ddp import Bucket, DataParallel, sum_gradients
from tests.ranks import on_ranks

SHAPES = {"matrix": (20, 12), "kernel": (9, 3, 3, 2), "vector": (17,), "small": (3, 2)}
"""With a rank of 2 the first two are compressed."""
SIZES = {name: math.prod(shape) for name, shape in SHAPES.items()}
STEPS = 4
compressing, sparse = (functools.partial(kind, error_feedback=True) for kind in (PowerSGD, TopK))
HOOKS = {
    "powersgd": lambda: compressing(2),
    "topk": lambda: sparse(0.1),
    "powersgd without feedback": lambda: PowerSGD(2, error_feedback=False),
    "topk without feedback": lambda: TopK(0.1, error_feedback=False),
    "int8": lambda: QuantizedAllReduce(8, 16),
    "int4": lambda: QuantizedAllReduce(4, 16),
}
remembering = pytest.mark.parametrize("name", ["powersgd", "topk"])
close = functools.partial(assert_close, rtol=0)


class Weights(nn.Module):
    """Parameters whose gradients are whatever one gives in."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients):
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def gradients(rank, step):
    """One rank's of one step, by name."""
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=numbers, dtype=torch.float64) for name, shape in SHAPES.items()}


def mean(step):
    drawn = [gradients(rank, step) for rank in range(dist.get_world_size())]
    return {name: sum(of_rank[name] for of_rank in drawn) / len(drawn) for name in SHAPES}


def means():
    return [mean(step) for step in range(STEPS)]


def engine_of(hook):
    return DataParallel(Weights(), communication_hook=hook, bucket_bytes=1200, first_bucket_bytes=1200)


def stream(engine, steps=range(STEPS)):
    """The reduced gradients of some steps, by step and name."""
    reduced = []
    for step in steps:
        engine(gradients(dist.get_rank(), step)).backward()
        reduced.append({name: p.grad.clone() for name, p in engine.module.named_parameters()})
        engine.zero_grad()
    return reduced


def reduced(hook):
    """Those of all steps, which are the same bits on all ranks."""
    found = stream(engine_of(hook))
    own = torch.cat([each.view(-1) for step in found for each in step.values()])
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(own, first)
    return found


def flat(by_name, names):
    return torch.cat([by_name[name].view(-1) for name in names])


def apart(mine, theirs):
    """The largest difference of the matrix over all steps."""
    return max((a["matrix"] - b["matrix"]).abs().max().item() for a, b in zip(mine, theirs, strict=True))


@on_ranks(2, 3)
def test_without_compression_it_is_the_mean_and_with_it_another():
    for exact in (sum_gradients, sparse(1.0)):
        close(reduced(exact), means(), atol=1e-14)
    for name, make in HOOKS.items():
        assert apart(reduced(make()), means()) > 1e-3, name


# --- PowerSGD ---


def power_sgd(feedback):
    """Algorithms 1 and 2 of the paper for one worker, which has the mean gradient."""
    hook, q, left, approximations = compressing(2), {}, {}, []
    for name, parameter in list(Weights().named_parameters())[::-1]:
        if hook.compresses(parameter.shape):
            q[name] = hook._q_of(name, parameter.detach().view(matrix_shape(parameter.shape)))
    for gradient in means():
        step = dict(gradient)
        for name in q:
            matrix = gradient[name].reshape(gradient[name].shape[0], -1) + left.get(name, 0)
            p, _ = torch.linalg.qr(matrix @ q[name])
            q[name] = matrix.T @ p
            step[name] = (p @ q[name].T).view(gradient[name].shape)
            left[name] = matrix - p @ q[name].T if feedback else 0
        approximations.append(step)
    return approximations


@on_ranks(2, 3)
def test_power_sgd_is_that_of_one_process_with_the_mean_gradient():
    # An orthonormal basis of nearly parallel columns magnifies what sums in another order differ by.
    fed_back, without = reduced(compressing(2)), reduced(PowerSGD(2, error_feedback=False))
    close(fed_back, power_sgd(feedback=True), atol=1e-11)
    close(without, power_sgd(feedback=False), atol=1e-11)
    assert apart(without, fed_back) > 0.1
    assert torch.equal(without[0]["matrix"], fed_back[0]["matrix"])  # nothing was left before


@remembering
@on_ranks(2, 3)
def test_what_was_sent_and_what_is_left_are_all_gradients(name):
    """Error feedback: nothing is lost, on no element."""
    hook = HOOKS[name]()
    engine = engine_of(hook)
    found, given = stream(engine), means()
    assert len(engine.buckets) > 1
    for bucket in engine.buckets:
        names = list(bucket.views)
        left = hook.state_dict()[f"left_out.{names[0]}"].clone()
        dist.all_reduce(left)
        close(sum(flat(step, names) for step in found) + left, sum(flat(step, names) for step in given), atol=1e-12)
        parts = dict(zip(names, left.split([SIZES[key] for key in names]), strict=True))
        assert name == "topk" or not parts.get("vector", torch.zeros(1)).any()


@on_ranks(1, 2)
def test_power_sgd_of_a_gradient_of_its_rank_is_exact():
    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 2, generator=numbers, dtype=torch.float64) for size in (20, 12))
    off = []
    for rank in (2, 1):
        bucket = Bucket({"w": nn.Parameter(torch.zeros(20, 12, dtype=torch.float64))}, None)
        bucket.views["w"].copy_(left @ right.T / dist.get_world_size())
        compressing(rank)(bucket).wait()
        off.append((bucket.views["w"] - left @ right.T).abs().max().item())
    assert off[0] < 1e-12 and off[1] > 0.1


@on_ranks(2)
def test_power_sgd_is_torchs():
    """From the same Q on."""
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
    theirs = DistributedDataParallel(Weights())
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    stream(theirs, [90, 91])  # until then they all-reduce, and form their buckets anew
    firsts, compress = {}, powerSGD_hook._orthogonalize

    def noted(matrices, epsilon=0):
        compress(matrices, epsilon)
        if len(firsts) < 2:  # the two Q, before the two P
            firsts[matrices.shape[1]] = matrices[0].clone()

    with mock.patch.object(powerSGD_hook, "_orthogonalize", noted):
        expected = stream(theirs)
    own = compressing(2)
    own.q = {"matrix": firsts[12], "kernel": firsts[18]}
    mine = stream(DataParallel(Weights(), communication_hook=own))
    close(mine, expected, atol=1e-10)
    assert apart(mine, means()) > 0.1


# --- top-k ---


@pytest.mark.parametrize("feedback", [True, False])
@on_ranks(2, 3)
def test_top_k_is_the_sum_of_the_ranks_largest_elements(feedback):
    hook = TopK(0.1, error_feedback=feedback)
    found, ranks = reduced(hook), dist.get_world_size()
    for bucket in engine_of(hook).buckets:
        names, left = list(bucket.views), [0] * ranks
        for step in range(STEPS):
            total = 0
            for rank in range(ranks):
                whole = flat(gradients(rank, step), names) / ranks + left[rank]
                kept = whole.abs().argsort(descending=True)[: round(0.1 * len(whole))]
                largest = torch.zeros_like(whole)
                largest[kept] = whole[kept]
                left[rank] = whole - largest if feedback else 0
                total = total + largest
            close(flat(found[step], names), total, atol=1e-14)


# --- quantization ---


def by_hand(values, bits, block):
    """What arrives of one row of numbers, block by block."""
    arrived = []
    for part in values.float().split(block):
        scale = part.abs().max() / (127 if bits == 8 else 7)
        arrived.append(torch.round(part / scale) * scale if scale else part)
    return torch.cat(arrived)


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_come_back_as_the_nearest_multiple_of_their_blocks_scale(bits):
    numbers = torch.Generator().manual_seed(0)
    values = torch.randn(3, 64, generator=numbers) * torch.logspace(-6, 6, 64)
    values[1, 16:32] = 0
    packed = quantize(values, bits, 16)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 64 * bits // 8 + 4 * 4)
    assert packed.shape[1] == quantized_bytes(64, bits, 16)
    assert torch.equal(dequantize(packed, bits, 16), torch.stack([by_hand(row, bits, 16) for row in values]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bits, odd):
    values = torch.ones(1, 32)
    values[0, 3] = odd
    back = dequantize(quantize(values, bits, 16), bits, 16)
    assert not back[0, :16].isfinite().any() and torch.equal(back[0, 16:], torch.ones(16))


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(2, 3)
def test_a_quantized_sum_is_rounded_twice_whatever_the_number_of_ranks(bits):
    block, ranks, hook = 16, dist.get_world_size(), QuantizedAllReduce(bits, 16)
    found = reduced(hook)
    for bucket in engine_of(hook).buckets:
        names = list(bucket.views)
        part = -(-bucket.flat.numel() // (ranks * block)) * block
        for step in range(STEPS):
            whole = torch.stack([flat(gradients(rank, step), names) / ranks for rank in range(ranks)])
            padded = nn.functional.pad(whole, (0, ranks * part - whole.shape[1]))
            once = torch.stack([by_hand(row, bits, block) for row in padded])
            twice = by_hand(once.sum(0), bits, block)[: whole.shape[1]]
            mine = flat(found[step], names)
            # A sum in another order may round to the neighbouring code: none did, here.
            assert_close(mine.float(), twice, rtol=1e-6, atol=0)
            total = whole.sum(0)
            assert (mine - total).abs().max() < 1.5 * ranks / levels(bits) * total.abs().max()


# --- bytes ---


def sent_in_a_step(hook):
    """Its collectives, and the names in each bucket."""
    engine = engine_of(hook)
    with Meter() as meter:
        stream(engine, [0])
    return meter.collectives, [list(bucket.views) for bucket in engine.buckets]


@on_ranks(4)
def test_the_hierarchical_sum_is_that_of_all_ranks_and_sends_little_between_machines():
    rank, hook = dist.get_rank(), HierarchicalAllReduce(*machine_groups(2))
    close(reduced(hook), reduced(sum_gradients), atol=1e-14)
    calls, buckets = sent_in_a_step(hook)
    machine, peers = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    assert sorted((call.name, call.ranks) for call in calls) == sorted(
        [("reduce_scatter", machine), ("all_reduce", peers), ("all_gather", machine)] * len(buckets)
    )
    within, between = (sum(call.sent for call in calls if call.ranks == group) for group in (machine, peers))
    formula = [hook.bytes_per_step(sum(SIZES[name] for name in names), 8) for names in buckets]
    assert (within, between) == tuple(map(sum, zip(*formula, strict=True)))
    flat_ring = sum(call.sent for call in sent_in_a_step(sum_gradients)[0])
    assert between < flat_ring / 2.9  # 2 (M - 1) / M / G = 1 / 2 beside 2 (N - 1) / N = 3 / 2


@on_ranks(2, 3)
def test_what_is_sent_is_the_formula():
    ranks = dist.get_world_size()
    for hook, formula in (
        (sum_gradients, lambda _, elements: all_reduce_bytes(8 * elements, ranks)),
        (compressing(2), lambda shapes, _: compressing(2).bytes_per_step(shapes, ranks, 8)),
        (sparse(0.1), lambda _, elements: sparse(0.1).bytes_per_step(elements, ranks, 8)),
        (QuantizedAllReduce(8, 16), lambda _, elements: QuantizedAllReduce(8, 16).bytes_per_step(elements, ranks)),
        (QuantizedAllReduce(4, 16), lambda _, elements: QuantizedAllReduce(4, 16).bytes_per_step(elements, ranks)),
    ):
        calls, buckets = sent_in_a_step(hook)
        shapes = [[torch.Size(SHAPES[name]) for name in names] for names in buckets]
        expected = [formula(of_bucket, sum(map(torch.Size.numel, of_bucket))) for of_bucket in shapes]
        assert sum(call.sent for call in calls) == sum(expected), hook


def test_the_formulas_at_size():
    assert all_reduce_bytes(4_000_000, 8) == 7_000_000 and all_gather_bytes(4_000_000, 8) == 3_500_000
    million = 2**20
    eight, four = (QuantizedAllReduce(bits, 256).bytes_per_step(million, 8) for bits in (8, 4))
    assert eight == 2 * 7 / 8 * million * (1 + 4 / 256) and four == 2 * 7 / 8 * million * (1 / 2 + 4 / 256)
    assert sparse(0.01).bytes_per_step(million, 8, 4) == 7 * 8 * round(million / 100)
    assert compressing(4).bytes_per_step([torch.Size([1024, 1024])], 8, 4) == 2 * 7 * 1024 * 4 * 4 / 8 * 2
    assert compressing(4).compresses((1024, 1024)) and not compressing(4).compresses((1024,))
    assert not compressing(4).compresses((8, 8)) and compressing(3).compresses((8, 8))


# --- what it remembers ---


@remembering
@on_ranks(2)
def test_a_hook_that_was_saved_and_loaded_goes_on_with_the_same_bits(name):
    def goes_on(hook, steps):
        return stream(DataParallel(Weights(torch.float32), communication_hook=hook), steps)

    hook, loaded = HOOKS[name](), HOOKS[name]()
    goes_on(hook, range(2))
    loaded.load_state_dict({key: tensor.clone() for key, tensor in hook.state_dict().items()})
    undisturbed = goes_on(hook, [2, 3])
    close(goes_on(loaded, [2, 3]), undisturbed, atol=0)
    assert apart(goes_on(HOOKS[name](), [2, 3]), undisturbed) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: compressing(0), "rank 0"),
        (lambda: sparse(0.0), "density of 0"),
        (lambda: sparse(1.5), "density of 1.5"),
        (lambda: QuantizedAllReduce(5, 256), "5 bits"),
        (lambda: QuantizedAllReduce(4, 7), "blocks of 7"),
    ],
)
def test_what_cannot_be_is_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        wrong()


def test_feedback_of_another_bucket_is_refused():
    feedback = ErrorFeedback()
    feedback.load_state_dict({"left_out.w": torch.zeros(4)})
    with pytest.raises(ConfigError, match="4 elements for a bucket of 6"):
        feedback.add_to(Bucket({"w": nn.Parameter(torch.zeros(6))}, None))


@on_ranks(2)
def test_machines_that_the_ranks_do_not_fill_are_refused():
    with pytest.raises(ConfigError, match="2 ranks on machines of 3"):
        machine_groups(3)
