"""What lesson 05 claims, measured anew: bytes held, bytes moved, phases left out, engines that agree."""

import pytest
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from course_lib.launching.launch import launch
from course_lib.lessons import zero_lab
from course_lib.metering.meter import Meter
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
        own, other = (changed[f"after the step, rank {rank}"][4 * r:4 * r + 4] for r in (rank, 1 - rank))
        assert all(own) and not any(other)
    whole = changed["after gather, rank 0"]
    assert whole == changed["after gather, rank 1"] and whole[:6] == [-1.5] * 6 and whole[6:] == [-1.0] * 2


def test_by_hand_the_stages_train_as_one_process_and_hold_the_formulas_bytes(lesson):
    assert lesson["by_hand_differs_by"] < 2e-6 < 0.1 < lesson["loss_by_hand_falls_by"]
    assert lesson["by_hand_holds"] == pytest.approx(lesson["by_hand_should_hold"], rel=0.002)
    assert list(lesson["by_hand_should_hold"].values()) == [12, 10, 8]


def test_by_hand_a_missing_gather_shows_in_the_loss_and_a_sum_hardly(lesson):
    assert lesson["sum_shows_as"] < 2e-3 < 0.05 < lesson["losses_without_gather"]


def test_the_lines_of_work_train_as_one_process_but_without_the_key_deepspeed_clips(lesson):
    assert lesson["at_work_differs_by"] < 2e-6
    assert lesson["without_the_key_differs_by"] > 1e-4 and lesson["deepspeed_clips_at"] == 1


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


def step_of_torchs_stage_1():
    """(bytes that this rank sends in a step of ZeroRedundancyOptimizer, elements of the model)."""
    dist.init_process_group("gloo")
    model = zero_lab.small_gpt2()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=AdamW, lr=1e-3)
    ids = zero_lab.token_ids(dist.get_rank())
    zero_lab.one_step(ddp, optimizer, ids)
    with Meter(model, optimizer) as meter:
        zero_lab.one_step(ddp, optimizer, ids)
    dist.destroy_process_group()
    return meter.bytes_sent, sum(parameter.numel() for parameter in model.parameters())


def test_torchs_own_stage_1_moves_three_times_the_parameters():
    """What the lesson says of it: a whole all-reduce, 2Ψ, and the updated weights, Ψ."""
    ranks = launch(step_of_torchs_stage_1, num_processes=2, timeout=400, device="cpu")
    assert sum(sent for sent, _ in ranks) / (4 * ranks[0][1]) == pytest.approx(3, rel=0.01)
