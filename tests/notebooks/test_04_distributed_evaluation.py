"""What lesson 04 counts beside its claims (tests/notebooks/claims): rows and bytes."""

ROWS, ROUND = 455, 128
"""Rows of the test split, and of one batch on each of two ranks."""


PARAMETERS = {"device": "auto", "world_size": 2}


def test_rows_bytes_by_the_ring_and_what_the_model_has_learnt(lesson):
    assert lesson["rows_right"] == [ROWS] * 4
    assert lesson["rows_with_plain_gather"] == ROWS + -ROWS % ROUND
    assert lesson["bytes_of_counts"] == 2 * 3 * 3 * 8 // 2
    assert lesson["bytes_of_rows"] == (ROWS + -ROWS % ROUND) * 2 * 8 // 2
    assert lesson["accuracy"] > lesson["commonest_share"] + 0.05
