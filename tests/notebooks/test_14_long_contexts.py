"""What lesson 14 claims, measured anew: who is right alone, the ring by hand, bytes, balance, labels, engines."""

import pytest
from transformers import TrainingArguments
from transformers.distributed import DistributedConfig

from tests.forked_process import import_deepspeed
from tests.notebooks.conftest import says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    import_deepspeed()
    return run_lesson("14_long_contexts", device="auto", world_size=2, steps=4)


def test_own_keys_alone_are_wrong_on_all_ranks_but_the_first(lesson):
    assert lesson["off_alone"][0] < 1e-5
    assert says(lesson, "With own keys alone 1 of 2 ranks is right")


def test_a_mean_is_wrong_sums_overflow_and_logarithms_are_exact(lesson):
    off = {way: list(map(float, both)) for way, both in lesson["merged_off"].items()}
    assert min(off["mean of outputs"]) > 0.1 and off["weighted by sums"][0] < 1e-5
    assert off["weighted by sums"][1] != off["weighted by sums"][1], "infinite over infinite"
    assert max(off["weighted by logarithms"]) < 1e-4


def test_the_ring_by_hand_is_one_process_and_shares_that_stay_are_seen_in_the_gradient_alone(lesson):
    assert lesson["ring_losses_apart"] < 2e-6 and lesson["gradient_off_ring"] < 1e-5
    assert lesson["first_loss_off_without_carry"] < 2e-6
    assert says(lesson, f"gradient is {lesson['gradient_off_without_carry']:.0%} off, and the first loss is right")


def test_bytes_are_the_formulas_and_ulysses_is_the_dear_one_where_heads_share_keys(lesson):
    assert lesson["bytes_counted"] == lesson["bytes_by_formula"]
    assert lesson["ring_over_allgather"] == (3 * 2 - 2) / (2 * 2 - 2) == 2
    assert lesson["forward_ring_over_allgather"] == 1 and lesson["ulysses_over_ring_all_heads"] == 0.5
    assert lesson["ulysses_over_ring_one_key_head"] == 3.5
    assert lesson["blocks_in_flight"] == [2, 2, 2]
    assert says(lesson, "on 4 ranks it keeps 2.1 blocks, the all-gather 5.1. Ulysses sends 0.50 times")
    for n, saved in lesson["blocks_saved"].items():
        assert [round(saved[way], 1) for way in ("ring", "allgather", "ulysses")] == [2.1, int(n) + 1.1, 2.1]


def test_zigzag_balances_and_what_it_costs_to_leave_it_out(lesson):
    assert lesson["contiguous_lasts"] == pytest.approx(1.5, abs=0.02)
    assert lesson["zigzag_lasts"] == pytest.approx(1, abs=1e-9)
    work = lesson["work_by_rank"]
    assert work["zigzag"][0] == work["zigzag"][1] and work["contiguous"][1] > 2.9 * work["contiguous"][0]
    assert lesson["zigzag_losses_apart"] < 2e-6
    assert says(lesson, "a causal ring of 2 last 1.49 times as long as equal shares by the count")
    assert says(lesson, "lose 1 of 95 targets")
    assert lesson["packed_off"]["mask and share of the mean"] < 2e-6


def test_what_is_typed_at_work_is_what_the_pinned_releases_take(lesson):
    at_work = lesson["accelerates"]
    assert at_work["ranks"] == 16 and at_work["sharded over"] == ["dp_shard_cp"]
    assert "cp_size=2 and sp_size=2" in at_work["both"], "one or the other"
    assert not [name for name in DistributedConfig.__dataclass_fields__ if name.startswith(("cp_", "context"))]
    assert "parallelism_config" in TrainingArguments.__dataclass_fields__
    assert (lesson["ring_of_64"], lesson["eight_rings_of_8"]) == (1008, 238)


def test_the_engines_of_work_are_one_process_too(lesson):
    assert lesson["ways_at_work"][-2:] == ["torch's ring", "DeepSpeed's Ulysses"] and len(lesson["ways_at_work"]) == 5
    assert lesson["at_work_losses_apart"] < 2e-6 and lesson["at_work_gradient_off"] < 1e-5
