"""What lesson 15 claims, measured anew: who is chosen, the two all-to-alls, gradients, waiting, remedies, engines."""

import papermill
import pytest

from tests.forked_process import import_deepspeed
from tests.notebooks.conftest import execute, says


@pytest.fixture(scope="module")
def lesson(run_lesson):
    import_deepspeed()
    return run_lesson("15_experts", device="auto", world_size=2, steps=4)


def test_a_token_uses_a_part_of_the_parameters(lesson):
    assert 0.2 < lesson["share_used"] < 0.4
    assert says(lesson, f"Each token uses 2 of 12 experts, {lesson['share_used']:.0%} of the parameters")


def test_the_dispatch_by_hand_is_one_process_and_its_bytes_do_not_know_how_many_experts_there_are(lesson):
    assert lesson["by_hand_losses_apart"] < 2e-6 and lesson["gradient_off_by_hand"] < 1e-5
    assert lesson["bytes_counted"] == lesson["bytes_by_counts"]
    assert sum(map(sum, lesson["bytes_counted"])) == pytest.approx(2 * lesson["bytes_even"], rel=0.1)
    assert lesson["gradients_over_tokens"] == pytest.approx(3 * 12 * 64 / (2 * 2 * 256), rel=0.1)
    assert lesson["tokens_break_even"] == 576 and lesson["tokens_break_even_mixtral"] == 86016
    assert says(lesson, f"not with experts: {lesson['twice_the_experts']:.2f} times with twice as many")


def test_gradients_that_are_not_scaled_are_seen_in_the_gradient_alone(lesson):
    assert lesson["first_loss_off_unscaled"] < 2e-6 and lesson["losses_apart_unscaled"] < 1e-3
    assert lesson["times_too_large"] == pytest.approx(2, rel=1e-5)
    assert lesson["gradient_off_unscaled"] == pytest.approx(1, rel=1e-5) and lesson["others_off_unscaled"] < 1e-5
    assert lesson["times_too_large_in_groups"] == pytest.approx({"1": 1, "2": 2, "4": 4}, rel=1e-5)
    assert lesson["ours_losses_apart"] < 2e-6 and lesson["ours_gradient_off"] < 1e-5
    assert says(lesson, "Without the division it is 2 times too large on 2 ranks")


def test_the_busiest_rank_is_computed_for_more_ranks(lesson):
    by_ranks = lesson["busiest_by_ranks"]
    assert by_ranks["2"] == pytest.approx(lesson["busiest_rank"])
    assert by_ranks["12"] == pytest.approx(lesson["busiest_trained"], rel=1e-3)
    assert says(lesson, f"of 12 ranks it would be {by_ranks['12']:.1f}")


def test_each_factor_and_each_remedy_is_trained_with_three_seeds(lesson):
    for run in [*lesson["capacity"].values(), *lesson["remedies"].values()]:
        assert {len(of_seeds) for of_seeds in run.values()} == {3}
    assert lesson["capacity"]["none"]["dropped"] == [0, 0, 0]
    assert says(lesson, f"A capacity factor of 1 drops {lesson['dropped_at_capacity_one']:.0%} of the copies")


def test_the_engines_of_work_are_one_process_and_deepspeed_sends_empty_room(lesson):
    assert lesson["deepspeed_losses_apart"] < 2e-6 and lesson["deepspeed_gradient_off"] < 1e-5
    assert lesson["olmoe_losses_apart"] < 3e-6
    assert 1.4 < lesson["deepspeed_bytes_over_ours"] < 2
    assert says(lesson, f"sends {lesson['deepspeed_bytes_over_ours']:.2f} times the bytes of ours")


def test_ranks_that_cannot_share_the_experts_are_refused_in_one_line(tmp_path):
    with pytest.raises(papermill.PapermillExecutionError) as error:
        execute("15_experts", tmp_path, world_size=5)
    assert error.value.evalue == "12 experts for 5 ranks: take 2, 3 or 4 ranks that share them evenly"
    assert error.value.exec_count <= 4
