"""What lesson 17 claims, measured anew: FLOPs and bytes by kind, one clock, what changes move, attention, 8 bits."""

import pytest

from tests.notebooks.conftest import says

PARAMETERS = {"world_size": 2, "tries": 1, "steps": 16}


def test_flops_by_formula_by_the_counter_and_by_torch(lesson):
    assert lesson["tiny_over_library"] == pytest.approx(1, abs=0.1)  # attention's FLOPs are not in the one by hand
    assert says(lesson, f"{lesson['matrix_shares']['FLOPs']:.1%} of this step's FLOPs are matrix products")


def test_a_clock_that_is_wrong_on_purpose_is_found(lesson):
    widths = [high - low for low, high in lesson["clock_bounds"]]
    assert widths == sorted(widths, reverse=True)


def test_what_it_says_of_the_job_and_of_each_change(lesson):
    assert 0 <= lesson["hidden_share"] <= 100 and 0 < lesson["job_mfu"] < 1.5
    assert len(lesson["saved_ms"]) == 4


def test_attention_in_blocks_is_exact_and_keeps_no_matrix(lesson):
    assert lesson["kept_ratio"] == pytest.approx(20 / 4.016, rel=0.02)
    assert lesson["kept_mib"]["by hand, in blocks"] == pytest.approx(lesson["kept_mib"]["PyTorch's"], rel=0.01)


def test_eight_bits(lesson):
    assert lesson["zero_gradients"]["e5m2, scaled"][0] < 0.01
    assert says(lesson, "without any NaN")
