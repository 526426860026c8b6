"""What lesson 04 counts beside its claims (tests/notebooks/claims): rows and bytes."""

import pytest

ROWS, ROUND = 455, 128
"""Rows of the test split, and of one batch on each of two ranks."""


@pytest.fixture(scope="module")
def values(run_lesson):
    return run_lesson("04_distributed_evaluation", device="auto", world_size=2)


def test_rows(values):
    assert values["rows_right"] == [ROWS] * 4
    assert values["rows_with_plain_gather"] == ROWS + -ROWS % ROUND


def test_bytes_by_the_ring(values):
    assert values["bytes_of_counts"] == 2 * 3 * 3 * 8 // 2
    assert values["bytes_of_rows"] == (ROWS + -ROWS % ROUND) * 2 * 8 // 2


def test_the_model_has_learnt_something(values):
    assert values["accuracy"] > values["commonest_share"] + 0.05
