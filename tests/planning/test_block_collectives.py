"""What of a block's collectives nothing hides: by hand, and against what was taken as hidden before."""

from dataclasses import replace

import pytest

from course_lib.planning import block_collectives, cost, hardware, memory, models, work
from course_lib.planning.block_collectives import collective
from course_lib.planning.plan import Plan

LLAMA = models.load("llama-8b")


def parts(plan, model=LLAMA, gpu="H100"):
    """Cluster, and what a block computes forward and backward."""
    cluster = hardware.cluster(gpu, plan.gpus)
    return cluster, *work.block(model, plan, cluster.accelerator)


def test_a_small_matmul_does_not_hide_a_large_sum():
    """All matmuls together take longer than all collectives, and still one collective is seen."""
    plan = Plan(8192, "megatron", tensor=8, overlap_tensor=True, compiled=True)
    cluster, forward, backward = parts(plan)
    size = 8192 * LLAMA.hidden * 2
    gather, scatter = (collective(name, size, 8, 1, cluster) for name in ("all_gather", "reduce_scatter"))
    assert forward.matmul > 2 * (gather + scatter), "as one sum nothing would be left"
    shares = block_collectives.matmul_shares(LLAMA)
    assert sum(shares) == pytest.approx(1) and shares[1] == min(shares)
    by_hand = sum(
        max(0, moved - 7 / 8 * forward.matmul * share)
        for moved, share in zip((gather, scatter) * 2, shares, strict=True)
    )
    first, second = block_collectives.exposed(LLAMA, plan, cluster, forward, backward)
    assert 0 < first == second == pytest.approx(by_hand)
    assert first < block_collectives.exposed(LLAMA, replace(plan, overlap_tensor=False), cluster, forward, backward)[0]
    again = block_collectives.exposed(LLAMA, replace(plan, checkpointing="full"), cluster, forward, backward)
    assert again == (pytest.approx(by_hand), pytest.approx(2 * by_hand))


def test_a_ring_has_a_last_hop_and_puts_blocks_together():
    plan = Plan(2**17, "fsdp", 3, context=8, compiled=True)
    cluster, forward, backward = parts(plan)
    tokens, keys, queries = 2**14, 2 * 1024, 4096
    moved = collective("all_gather", 8 * tokens * keys * 2, 8, 1, cluster)
    assert moved < forward.attention, "all of it was taken as hidden"
    first, second = block_collectives.exposed(LLAMA, plan, cluster, forward, backward)
    rate = cluster.accelerator.memory_rate
    assert first == pytest.approx(7 * 10 * tokens * queries / rate)
    assert second == pytest.approx(moved / 7 + 7 * 10 * tokens * (queries + keys) / rate)
    plain = block_collectives.exposed(LLAMA, replace(plan, compiled=False), cluster, forward, backward)
    assert plain[0] == pytest.approx(3.8 * first)
    again = block_collectives.exposed(LLAMA, replace(plan, checkpointing="full"), cluster, forward, backward)
    assert again == (pytest.approx(first), pytest.approx(first + second))
    slow = replace(cluster, accelerator=replace(cluster.accelerator, bus=cluster.accelerator.bus / 1000))
    late = block_collectives.exposed(LLAMA, plan, slow, forward, backward)
    assert late[0] > 900 * moved, "seven pieces of attention hide what they can, and no more"


def test_gathered_keys_and_ulysses_by_hand():
    """arXiv 2407.21783 section 3.3.2: nothing hides the gather. arXiv 2309.14509 section 3.2: 4 N h / P elements."""
    gpt = models.load("gpt2-xl")  # as many key heads as query heads
    plan = Plan(1024, "megatron", context=4, context_by="ulysses")
    cluster, forward, backward = parts(plan, gpt)
    first, second = block_collectives.exposed(gpt, plan, cluster, forward, backward)
    latency = 2 * cluster.latency(4, 1)
    sent = (first - latency) * cluster.bus(4, 1) / 2  # elements of 2 bytes
    assert sent == pytest.approx(4 * 1024 * 1600 / 4 * 3 / 4) and first == second
    gathered = block_collectives.exposed(gpt, replace(plan, context_by="gather"), cluster, forward, backward)
    keys = collective("all_gather", 1024 * 2 * 1600 * 2, 4, 1, cluster)
    assert gathered == (pytest.approx(keys), pytest.approx(2 * keys))


def test_fewer_key_heads_than_ulysses_ranks_are_copied():
    plan = Plan(2**15, "fsdp", 3, context=16, context_by="ulysses")  # Llama 3 8B has 8 key heads
    cluster, forward, backward = parts(plan)
    first, _ = block_collectives.exposed(LLAMA, plan, cluster, forward, backward)
    tokens = 2**11
    assert first == pytest.approx(
        sum(collective("all_to_all", tokens * elements * 2, 16, 1, cluster) for elements in (4096 + 2 * 2048, 4096))
    )


def test_a_step_counts_them():
    cluster = hardware.cluster("H100", 8)
    plan = Plan(2**17, "fsdp", 3, context=8, compiled=True)
    assert cost.estimate(LLAMA, plan, cluster).tensor > 0
    assert cost.estimate(LLAMA, Plan(2**13, "fsdp", 3, data=8), cluster).tensor == 0


def test_an_all_to_all_and_a_ring_cross_nodes_by_one_card_of_each_rank():
    """A ring of a collective uses all cards of a node at once; a rank's own message has its own card alone."""
    one, two = hardware.cluster("H100", 8), hardware.cluster("H100", 16)
    card = two.network * hardware.NETWORK_EFFICIENCY / 8
    size = 2**28
    assert collective("all_to_all", size, 8, 1, one) == pytest.approx(
        7 / 8 * size / one.accelerator.bus + one.latency(8, 1)
    )
    assert collective("all_to_all", size, 16, 1, two) == pytest.approx(size / 2 / card + two.latency(16, 1))
    plan = Plan(2**17, "fsdp", 3, context=16, compiled=True)
    _, forward, backward = parts(plan)
    tokens, keys, queries = 2**13, 2 * 1024, 4096
    hop = tokens * keys * 2 / card + hardware.NETWORK_LATENCY
    merging = 15 * 10 * tokens * queries / two.accelerator.memory_rate
    first, _ = block_collectives.exposed(LLAMA, plan, two, forward, backward)
    assert first == pytest.approx(max(0.0, 15 * hop - forward.attention * 15 / 16) + merging)


def test_keys_that_ulysses_copies_take_memory():
    """Eight key heads on 32 ranks: each has four copies' worth."""
    plan = Plan(2**17, "fsdp", 3, data=2, context=32, context_by="ulysses", compiled=True)
    tokens = 2**17 // 32
    ring = memory.estimate(LLAMA, replace(plan, context_by="ring"))
    more = memory.estimate(LLAMA, plan).activations - ring.activations
    assert more == 32 * tokens * 3 * 2 * 1024 * 2
    few = replace(plan, context=8, data=8)
    assert memory.estimate(LLAMA, few) == memory.estimate(LLAMA, replace(few, context_by="ring"))
