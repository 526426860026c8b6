"""What lesson 05 computes beside its claims (tests/notebooks/claims): what each phase changes, and the paper's row."""

import pytest

from tests.forked_process import import_deepspeed
from tests.narrow_presets import narrow_presets  # noqa: F401


@pytest.fixture(scope="module")
def lesson(run_lesson):
    import_deepspeed()
    return run_lesson("05_zero_stages", device="auto", world_size=2, steps=3)


def test_by_hand_each_phase_changes_what_it_says(lesson):
    """Of 8 elements on 2 ranks: none by the reduce-scatter, the own four by the step, all alike by the all-gather."""
    changed = lesson["changed_by_phase"]
    for rank in (0, 1):
        assert changed[f"after reduce, rank {rank}"] == [0.0] * 8
        own, other = (changed[f"after the step, rank {rank}"][4 * r : 4 * r + 4] for r in (rank, 1 - rank))
        assert all(own) and not any(other)
    whole = changed["after gather, rank 0"]
    assert whole == changed["after gather, rank 1"] and whole[:6] == [-1.5] * 6 and whole[6:] == [-1.0] * 2


def test_the_stages_hold_the_formulas_bytes_and_what_moves(lesson):
    assert list(lesson["by_hand_should_hold"].values()) == [12, 10, 8]
    assert lesson["plain_bytes_per_parameter"] == pytest.approx(16, rel=0.001)
    assert [lesson[f"stage_{s}_bytes_per_parameter"] for s in (1, 2, 3)] == pytest.approx([10, 7, 4], rel=0.001)
    assert "all_reduce" not in lesson["collectives"]["stage 2"]
    for stage, steps in lesson["wire_of_all_steps"].items():
        assert isinstance(steps, str) or (len(steps) == 3 and min(steps) == lesson["wire_over_ring"][stage])
    assert lesson["gb_stage_3"] == 1.875
