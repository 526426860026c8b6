"""What lesson 04 claims, from the values that its cells record."""

import pytest

ROWS, PADDED = 100, 128
"""Rows of the test split that are scored, and with those that repeat to even out two ranks' batches of 64."""


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson("04_distributed_evaluation", device="auto", world_size=2, steps=30, scored_rows=ROWS)


def test_the_right_figures_are_the_single_process_s(values):
    assert values["difference_on_ranks"] < 1e-6
    assert values["rows_on_ranks"] == [ROWS] * 3
    assert values["macro_f1_from_counts"] == pytest.approx(values["macro_f1"], abs=1e-12)
    assert values["rows_counted"] == ROWS


def test_the_short_cuts_are_off_and_within_their_limits(values):
    assert values["accuracy"] > 0.6, "the model has to beat the commonest class, 0.545"
    assert 0 < values["error_of_repeats"] <= (PADDED - ROWS) / PADDED
    assert 0 <= values["error_of_averaging"] <= 0.07
    assert values["worst_macro_f1_error"] > 0.001 and 0 <= values["look_better"] <= values["wrong_values"] == 6
    assert values["rows_with_plain_gather"] == PADDED and values["loss_error_with_plain_gather"] > 1e-4
    assert len(set(values["macro_f1_of_each_rank"])) == 2


def test_the_page_says_what_the_score_hides(values):
    """The sampling error, and a class that is never answered, stand beside the scores."""
    confusion = values["confusion"]
    assert sum(map(sum, confusion)) == ROWS
    hits = sum(row[number] for number, row in enumerate(confusion))
    assert values["accuracy"] == pytest.approx(hits / ROWS)
    assert values["standard_error"] == pytest.approx((hits * (ROWS - hits)) ** 0.5 / ROWS**1.5)
    assert values["standard_error"] > values["error_of_averaging"] > 0, "a reader would blame the sample"
    unanswered = [number for number, column in enumerate(zip(*confusion, strict=True)) if not sum(column)]
    assert values["never_predicted"] == [("negative", "neutral", "positive")[number] for number in unanswered]
    assert [number for number, score in enumerate(values["f1_by_class"]) if not score] == unanswered
    assert sum(values["f1_by_class"]) / 3 == pytest.approx(values["macro_f1"])


def test_perplexities_and_bytes(values):
    assert values["perplexity_on_ranks"] == pytest.approx(values["perplexity"], rel=1e-9)
    assert values["perplexity_from_mean_of_losses"] != pytest.approx(values["perplexity"], rel=1e-3)
    assert values["mean_of_perplexities"] >= values["perplexity_from_mean_of_losses"], "Jensen"
    assert values["bytes_of_counts"] == 72 and values["bytes_of_rows"] == ROWS * 24
