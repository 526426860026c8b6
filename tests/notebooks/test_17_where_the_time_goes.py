"""What lesson 17 claims, measured anew: FLOPs and bytes by kind, one clock, what changes move, attention, 8 bits."""

import pytest

from tests.notebooks.conftest import says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("17_where_the_time_goes", world_size=2, tries=1, steps=16)


def test_flops_by_formula_by_the_counter_and_by_torch(lesson):
    flops = lesson["flops_by"]
    assert flops["library"] == pytest.approx(flops["formula"], rel=0.03)
    assert lesson["tiny_over_library"] == pytest.approx(1, abs=0.1)  # attention's FLOPs are not in the one by hand
    assert lesson["matrix_shares"]["FLOPs"] > 0.985 and lesson["matrix_shares"]["bytes"] < 0.4
    assert says(lesson, f"{lesson['matrix_shares']['FLOPs']:.1%} of this step's FLOPs are matrix products")


def test_a_clock_that_is_wrong_on_purpose_is_found(lesson):
    widths = [high - low for low, high in lesson["clock_bounds"]]
    assert all(low <= 1.5 <= high for low, high in lesson["clock_bounds"]) and widths == sorted(widths, reverse=True)


def test_the_table_adds_up_to_the_step(lesson):
    assert lesson["parts_over_whole"] == pytest.approx([1, 1], rel=0.02)
    assert 0 <= lesson["hidden_share"] <= 100 and 0 < lesson["job_mfu"] < 1.5


def test_what_each_change_moves_and_holds(lesson):
    moved, held, flops = lesson["moved_gb"], lesson["held_mib"], lesson["gflop"]
    assert moved["+ fused AdamW"] < 0.9 * moved["+ fused attention"] < 0.9 * 0.9 * moved["as in the textbook"]
    assert held["+ chunked cross-entropy"] < 0.62 * held["+ fused AdamW"]
    assert flops["or all but products again"] == pytest.approx(flops["+ chunked cross-entropy"], rel=0.005)
    assert lesson["losses_apart"] < 1e-4 and len(lesson["saved_ms"]) == 4


def test_attention_in_blocks_is_exact_and_keeps_no_matrix(lesson):
    apart = lesson["attention_apart"]
    assert len(apart) == 5 and max(max(of.values()) for of in apart.values()) < 5e-6
    assert lesson["kept_ratio"] == pytest.approx(20 / 4.016, rel=0.02)
    assert lesson["kept_mib"]["by hand, in blocks"] == pytest.approx(lesson["kept_mib"]["PyTorch's"], rel=0.01)


def test_eight_bits(lesson):
    errors = lesson["rounding_errors"]
    assert errors["e4m3 per tensor"][2] == pytest.approx(errors["e4m3 per tensor"][0], rel=0.05)
    assert errors["int8 per tensor"][2] > 0.5 and lesson["kernel_off"] < 1e-3
    assert lesson["zero_gradients"]["e4m3, no scale"] == [1, 1] and lesson["zero_gradients"]["e5m2, scaled"][0] < 0.01
    assert says(lesson, "without any NaN")
