"""What lesson 04 claims, from the values that its cells record."""

import pytest


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson("04_distributed_evaluation", device="auto", world_size=2, steps=60)


@pytest.mark.timeout(300)
def test_the_right_figures_are_the_single_process_s(values):
    assert values["difference_on_ranks"] < 1e-6
    assert values["rows_on_ranks"] == [455] * 3
    assert values["macro_f1_from_counts"] == pytest.approx(values["macro_f1"], abs=1e-12)
    assert values["rows_counted"] == 455


@pytest.mark.timeout(300)
def test_the_short_cuts_are_off_and_within_their_limits(values):
    assert values["accuracy"] > 0.62, "the model has to beat the commonest class, 0.587"
    assert 0 < values["error_of_repeats"] <= 57 / 512
    assert 0 <= values["error_of_averaging"] <= 0.07
    assert values["worst_macro_f1_error"] > 0.001 and 0 < values["look_better"] <= values["wrong_figures"] == 6
    assert values["rows_with_plain_gather"] == 512 and values["loss_error_with_plain_gather"] > 1e-4
    assert len(set(values["macro_f1_of_each_rank"])) == 2


@pytest.mark.timeout(300)
def test_perplexities_and_bytes(values):
    assert values["perplexity_from_mean_of_losses"] != pytest.approx(values["perplexity"], rel=1e-3)
    assert values["mean_of_perplexities"] >= values["perplexity_from_mean_of_losses"]
    assert values["bytes_of_counts"] == 72 and values["bytes_of_rows"] == 455 * 24
