"""Compressing communication hooks on real ranks, each against its definition in one process, and against torch's.

In float64 where a hook sends the gradients' own dtype, so that the order of a sum shows in the 16th digit only.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.parallel.communication import block_quantization
from course_lib.parallel.communication.hierarchical import HierarchicalAllReduce, machine_groups
from course_lib.parallel.communication.hooks import ErrorFeedback, all_gather_bytes, all_reduce_bytes
from course_lib.parallel.communication.power_sgd import PowerSGD, matrix_shape
from course_lib.parallel.communication.quantized_all_reduce import QuantizedAllReduce
from course_lib.parallel.communication.top_k import TopK
from course_lib.parallel.ddp import Bucket
from tests.parallel.communication import compression_cases
from tests.parallel.communication.compression_cases import SHAPES, STEPS, gradients

NAMES = (
    "plain",
    "powersgd",
    "powersgd without feedback",
    "topk",
    "topk without feedback",
    "topk of all",
    "int8",
    "int4",
)
RANKS = (2, 3)
compressing, sparse = (functools.partial(kind, error_feedback=True) for kind in (PowerSGD, TopK))


@functools.cache
def results(ranks):
    """Of every rank, every hook's."""
    return launch(compression_cases.reductions, NAMES, num_processes=ranks, timeout=400)


def reduced(ranks, name):
    """The reduced gradients, step by step, which are the same bits on all ranks."""
    first, *others = [of_rank[name][0] for of_rank in results(ranks)]
    for other in others:
        assert all(torch.equal(a[key], b[key]) for a, b in zip(first, other, strict=True) for key in SHAPES)
    return first


def mean(step, ranks):
    drawn = [gradients(step, rank) for rank in range(ranks)]
    return {name: sum(of_rank[name] for of_rank in drawn) / ranks for name in SHAPES}


def furthest(mine, theirs):
    """The largest difference over all steps, by name."""
    return {
        name: max((a[name] - b[name]).abs().max().item() for a, b in zip(mine, theirs, strict=True)) for name in SHAPES
    }


@pytest.mark.parametrize("ranks", RANKS)
def test_without_compression_it_is_the_mean_and_with_it_another(ranks):
    means = [mean(step, ranks) for step in range(STEPS)]
    assert max(furthest(reduced(ranks, "plain"), means).values()) < 1e-14
    assert max(furthest(reduced(ranks, "topk of all"), means).values()) < 1e-14
    for name in NAMES[1:]:
        off = furthest(reduced(ranks, name), means)
        assert name == "topk of all" or off["matrix"] > 1e-3, name


# --- PowerSGD ---


def power_sgd(means, rank, feedback=True):
    """Algorithms 1 and 2 of the paper for one worker, which has the mean gradient."""
    hook, left, approximations = compressing(rank), {}, []
    start = compression_cases.Weights(torch.float64)
    q = {}
    for name, parameter in list(start.named_parameters())[::-1]:
        if hook.compresses(parameter.shape):
            q[name] = hook._q_of(name, parameter.detach().view(matrix_shape(parameter.shape)))
    for gradient in means:
        step = dict(gradient)
        for name in q:
            matrix = gradient[name].reshape(gradient[name].shape[0], -1) + left.get(name, 0)
            p, _ = torch.linalg.qr(matrix @ q[name])
            q[name] = matrix.T @ p
            step[name] = (p @ q[name].T).view(gradient[name].shape)
            left[name] = matrix - p @ q[name].T if feedback else 0
        approximations.append(step)
    return approximations


@pytest.mark.parametrize("ranks", RANKS)
def test_power_sgd_is_that_of_one_process_with_the_mean_gradient(ranks):
    means = [mean(step, ranks) for step in range(STEPS)]
    # An orthonormal basis of nearly parallel columns magnifies what sums in another order differ by.
    assert max(furthest(reduced(ranks, "powersgd"), power_sgd(means, 2)).values()) < 1e-11
    without = reduced(ranks, "powersgd without feedback")
    assert max(furthest(without, power_sgd(means, 2, feedback=False)).values()) < 1e-11
    assert furthest(without, reduced(ranks, "powersgd"))["matrix"] > 0.1
    assert torch.equal(without[0]["matrix"], reduced(ranks, "powersgd")[0]["matrix"])  # nothing was left before


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["powersgd", "topk"])
def test_what_was_sent_and_what_is_left_are_all_gradients(ranks, name):
    """Error feedback: nothing is lost, on no element."""
    of_ranks = results(ranks)
    buckets = of_ranks[0][name][2]
    assert sum(len(bucket) for bucket in buckets) == len(SHAPES) and len(buckets) > 1
    for names in buckets:
        left = sum(of_rank[name][1][f"left_out.{names[0]}"] for of_rank in of_ranks)
        for key, part in zip(names, left.split([torch.Size(SHAPES[key]).numel() for key in names]), strict=True):
            sent = sum(step[key] for step in reduced(ranks, name))
            given = sum(mean(step, ranks)[key] for step in range(STEPS))
            assert torch.allclose(sent + part.view(SHAPES[key]), given, rtol=0, atol=1e-12)
            if key == "vector" and name == "powersgd":
                assert not part.any()


def test_power_sgd_of_a_gradient_of_its_rank_is_exact():
    for ranks in (1, 2):
        for own in launch(low_rank, num_processes=ranks, timeout=240):
            assert own[0] < 1e-12 and own[1] > 0.1


def low_rank():
    """How far a mean of rank 2 comes back from itself, in rank 2 and in rank 1."""
    dist.init_process_group("gloo")
    numbers = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, 2, generator=numbers, dtype=torch.float64) for size in (20, 12))
    off = []
    for rank in (2, 1):
        bucket = Bucket({"w": torch.nn.Parameter(torch.zeros(20, 12, dtype=torch.float64))}, None)
        bucket.views["w"].copy_(left @ right.T / dist.get_world_size())
        compressing(rank)(bucket).wait()
        off.append((bucket.views["w"] - left @ right.T).abs().max().item())
    return off


def test_power_sgd_is_torchs():
    for expected, mine in launch(compression_cases.beside_torchs_power_sgd, 2, num_processes=2, timeout=400):
        assert len(expected) == len(mine) == STEPS
        assert max(furthest(mine, expected).values()) < 1e-10
        assert furthest(mine, [mean(step, 2) for step in range(STEPS)])["matrix"] > 0.1


# --- top-k ---


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["topk", "topk without feedback"])
def test_top_k_is_the_sum_of_the_ranks_largest_elements(ranks, name):
    for names in results(ranks)[0][name][2]:
        left = [0] * ranks
        for step in range(STEPS):
            total = 0
            for rank in range(ranks):
                whole = torch.cat([gradients(step, rank)[key].view(-1) for key in names]) / ranks + left[rank]
                order = sorted(range(len(whole)), key=lambda i, whole=whole: -abs(whole[i].item()))
                sparse = torch.zeros_like(whole)
                kept = order[: round(0.1 * len(whole))]
                sparse[kept] = whole[kept]
                left[rank] = whole - sparse if name == "topk" else 0
                total = total + sparse
            mine = torch.cat([reduced(ranks, name)[step][key].view(-1) for key in names])
            assert torch.allclose(mine, total, rtol=0, atol=1e-14)


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
    packed = block_quantization.quantize(values, bits, 16)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 64 * bits // 8 + 4 * 4)
    assert packed.shape[1] == block_quantization.quantized_bytes(64, bits, 16)
    back = block_quantization.dequantize(packed, bits, 16)
    assert torch.equal(back, torch.stack([by_hand(row, bits, 16) for row in values]))
    largest = values.view(3, -1, 16).abs().amax(-1, keepdim=True)
    assert ((back - values).view(3, -1, 16).abs() <= largest / block_quantization.levels(bits) * 0.500001).all()
    # Each code comes back as itself, the outermost too.
    steps = torch.arange(-block_quantization.levels(bits), block_quantization.levels(bits) + 1).float()
    steps = torch.cat([steps, steps[-1:]]).view(1, -1)
    block = steps.shape[1]
    assert torch.equal(
        block_quantization.dequantize(block_quantization.quantize(steps, bits, block), bits, block), steps
    )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so(bits, odd):
    values = torch.ones(1, 32)
    values[0, 3] = odd
    back = block_quantization.dequantize(block_quantization.quantize(values, bits, 16), bits, 16)
    assert not back[0, :16].isfinite().any() and torch.equal(back[0, 16:], torch.ones(16))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_sum_is_rounded_twice_whatever_the_number_of_ranks(ranks, bits):
    block = 16
    for names in results(ranks)[0][f"int{bits}"][2]:
        for step in range(STEPS):
            whole = [torch.cat([gradients(step, rank)[key].view(-1) for key in names]) / ranks for rank in range(ranks)]
            part = -(-len(whole[0]) // (ranks * block)) * block
            expected = []
            for owner in range(ranks):
                cut = [
                    torch.nn.functional.pad(row, (0, ranks * part - len(row)))[owner * part : (owner + 1) * part]
                    for row in whole
                ]
                expected.append(by_hand(torch.stack([by_hand(row, bits, block) for row in cut]).sum(0), bits, block))
            mine = torch.cat([reduced(ranks, f"int{bits}")[step][key].view(-1) for key in names])
            # A sum in another order may round to the neighbouring code: none did, here.
            assert torch.allclose(mine.float(), torch.cat(expected)[: len(mine)], rtol=1e-6, atol=0)
            off = (mine - sum(whole)).abs().max() / sum(whole).abs().max()
            assert off < 1.5 * ranks / block_quantization.levels(bits)


# --- hierarchical ---


def test_the_hierarchical_sum_is_that_of_all_ranks_and_sends_little_between_machines():
    names = ("plain", "hierarchical")
    of_ranks = launch(compression_cases.reductions, names, num_processes=4, timeout=400)
    for rank, of_rank in enumerate(of_ranks):
        assert max(furthest(of_rank["hierarchical"][0], of_rank["plain"][0]).values()) < 1e-14
        calls = of_rank["hierarchical"][3]
        machine, peers = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        buckets = len(of_rank["hierarchical"][2])
        assert sorted((name, group) for name, _, _, group in calls) == sorted(
            [("reduce_scatter", machine), ("all_reduce", peers), ("all_gather", machine)] * buckets
        )
        within = sum(sent for _, _, sent, group in calls if group == machine)
        between = sum(sent for _, _, sent, group in calls if group == peers)
        sizes = [sum(torch.Size(SHAPES[key]).numel() for key in bucket) for bucket in of_rank["hierarchical"][2]]
        hook = HierarchicalAllReduce(GroupOf(2), GroupOf(2))
        assert (within, between) == tuple(map(sum, zip(*(hook.bytes_per_step(size, 8) for size in sizes), strict=True)))
        flat_ring = sum(sent for _, _, sent, _ in of_rank["plain"][3])
        assert between < flat_ring / 2.9  # 2 (M - 1) / M / G = 1 / 2 beside 2 (N - 1) / N = 3 / 2


class GroupOf:
    def __init__(self, ranks):
        self.size = lambda: ranks


# --- bytes ---


@pytest.mark.parametrize("ranks", RANKS)
def test_what_is_sent_is_the_formula(ranks):
    for of_rank in results(ranks):
        for name, formula in {
            "plain": lambda _, elements: all_reduce_bytes(8 * elements, ranks),
            "powersgd": lambda names, _: compressing(2).bytes_per_step(
                [torch.Size(SHAPES[name]) for name in names], ranks, 8
            ),
            "topk": lambda _, elements: sparse(0.1).bytes_per_step(elements, ranks, 8),
            "int8": lambda _, elements: QuantizedAllReduce(8, 16).bytes_per_step(elements, ranks),
            "int4": lambda _, elements: QuantizedAllReduce(4, 16).bytes_per_step(elements, ranks),
        }.items():
            _, _, buckets, calls = of_rank[name]
            sizes = [(names, sum(torch.Size(SHAPES[key]).numel() for key in names)) for names in buckets]
            assert sum(sent for _, _, sent, _ in calls) == sum(formula(*size) for size in sizes), name


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


def test_a_hook_that_was_saved_and_loaded_goes_on_with_the_same_bits():
    names = ("powersgd", "topk")
    for of_rank in launch(compression_cases.resumed, names, num_processes=2, timeout=400):
        for name in names:
            undisturbed, loaded, fresh = of_rank[name]
            assert all(torch.equal(a[key], b[key]) for a, b in zip(undisturbed, loaded, strict=True) for key in SHAPES)
            assert furthest(undisturbed, fresh)["matrix"] > 1e-3


def test_what_cannot_be_is_refused():
    for wrong, words in (
        (lambda: compressing(0), "rank 0"),
        (lambda: sparse(0.0), "density of 0"),
        (lambda: sparse(1.5), "density of 1.5"),
        (lambda: QuantizedAllReduce(5, 256), "5 bits"),
        (lambda: QuantizedAllReduce(4, 7), "blocks of 7"),
    ):
        with pytest.raises(ConfigError, match=words):
            wrong()
    for said in launch(odd_machines, num_processes=2, timeout=240):
        assert "2 ranks on machines of 3" in said
    feedback = ErrorFeedback()
    feedback.load_state_dict({"left_out.w": torch.zeros(4)})
    with pytest.raises(ConfigError, match="4 elements for a bucket of 6"):
        feedback.add_to(Bucket({"w": torch.nn.Parameter(torch.zeros(6))}, None))


def odd_machines():
    dist.init_process_group("gloo")
    try:
        machine_groups(3)
    except ConfigError as error:
        return str(error)
