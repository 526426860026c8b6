"""What lesson 04 claims, from the values that its cells record."""

import pytest


@pytest.fixture(scope="module")
def found(run_lesson):
    return run_lesson("04_distributed_evaluation", device="auto", world_size=2, steps=60)


@pytest.mark.timeout(300)
def test_the_right_figures_are_the_single_process_s(found):
    assert found["difference_on_ranks"] < 1e-6
    assert found["rows_on_ranks"] == [455] * 3
    assert found["macro_f1_from_counts"] == pytest.approx(found["macro_f1"], abs=1e-12)
    assert found["rows_counted"] == 455


@pytest.mark.timeout(300)
def test_the_short_cuts_are_off_and_within_their_limits(found):
    assert found["accuracy"] > 0.62, "the model has to beat the commonest class, 0.587"
    assert 0 < found["error_of_repeats"] <= 57 / 512
    assert 0 <= found["error_of_averaging"] <= 0.07
    assert found["worst_macro_f1_error"] > 0.001 and 0 < found["look_better"] <= found["wrong_figures"] == 6
    assert found["rows_with_plain_gather"] == 512 and found["loss_error_with_plain_gather"] > 1e-4
    assert len(set(found["macro_f1_of_each_rank"])) == 2


@pytest.mark.timeout(300)
def test_perplexities_and_bytes(found):
    assert found["perplexity_from_mean_of_losses"] != pytest.approx(found["perplexity"], rel=1e-3)
    assert found["mean_of_perplexities"] >= found["perplexity_from_mean_of_losses"]
    assert found["bytes_of_counts"] == 72 and found["bytes_of_rows"] == 455 * 24
