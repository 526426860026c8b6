"""What lesson 05 claims, measured anew: bytes held, bytes moved, phases left out, engines that agree."""

import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def lesson(run_lesson):
    return run_lesson("05_zero_stages", device="auto", world_size=2, steps=3)


def test_the_bill_is_the_formula(lesson):
    assert lesson["plain_bytes_per_parameter"] == pytest.approx(16, rel=0.001)
    assert [lesson[f"stage_{s}_bytes_per_parameter"] for s in (1, 2, 3)] == pytest.approx([10, 7, 4], rel=0.001)
    assert lesson["cells_of_the_bill"] == 4 * 3 * 3 and 0 < lesson["largest_error_of_the_formula"] < 0.01


def test_what_moves(lesson):
    assert [lesson[f"volume_stage_{s}"] for s in (0, 1, 2)] == pytest.approx([2, 2, 2], rel=0.001)
    assert 2.8 < lesson["volume_stage_3"] < 3, "the root is gathered once"
    assert lesson["volume_stage_1_accumulating"] == pytest.approx(2, rel=0.001)
    assert lesson["volume_stage_2_accumulating"] == pytest.approx(3, rel=0.001)
    calls = lesson["collectives"]
    assert "all_reduce" not in calls["stage 2"] and calls["stage 3"] == {"all_gather": 9, "reduce_scatter": 5}


def test_the_wire_where_it_can_be_counted(lesson):
    ratios = lesson["wire_over_ring"]
    if not isinstance(ratios["stage 2"], float):
        assert "network" in ratios["stage 2"]
    else:
        for stage, steps in lesson["wire_of_all_steps"].items():
            assert len(steps) == 3 and min(steps) == ratios[stage], "all of them, and the least is told"
        assert ratios["plain data parallel"] == pytest.approx(1.0, abs=0.04)
        assert ratios["stage 2"] == pytest.approx(1.5, abs=0.06), "gloo's reduce-scatter is an all-reduce"


def test_a_phase_left_out_shows(lesson):
    assert lesson["spread_right"] == 0 and lesson["spread_without_gather"] > 1e-3
    assert lesson["spread_clipped_alone"] == 0, "the ranks agree with each other, and are wrong"
    assert lesson["clipped_right_from_plain"] < 1e-6 < 1e-4 < lesson["clipped_alone_from_plain"]


def test_the_engines_agree(lesson):
    assert lesson["pairs_compared"] == 9 and lesson["largest_loss_difference"] < 2e-6


def test_the_papers_row(lesson):
    assert lesson["gb_stage_3"] == 1.88 and lesson["rows_like_the_paper"] == 4
