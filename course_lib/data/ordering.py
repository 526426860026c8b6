"""The order of an epoch: which rows make up which global batch, for any number of processes."""

from collections.abc import Sequence

import numpy as np

WINDOW = 50
"""Global batches that are sorted by length together; more pad less, fewer shuffle better."""


def global_batches(
    lengths: np.ndarray, size: int, seed: Sequence[int], group_by_length: bool = True, drop_last: bool = False
) -> list[np.ndarray]:
    """Row numbers of each global batch of one epoch, longest row first where grouped by length.

    Args:
        lengths: tokens of each row.
        size: rows of a global batch.
        seed: whole numbers that decide the order.
        group_by_length: sort windows of the shuffled order by length, then shuffle the batches.
        drop_last: leave out the last rows in the shuffled order where they fill no batch.
    """
    random = np.random.default_rng(list(seed))
    rows = random.permutation(len(lengths))
    if drop_last:
        rows = rows[: len(rows) // size * size]
    if not group_by_length:
        return [rows[start : start + size] for start in range(0, len(rows), size)]
    batches = []
    for start in range(0, len(rows), WINDOW * size):
        window = rows[start : start + WINDOW * size]
        # Longest first: the short batch at the end, with its filler, holds the shortest rows.
        window = window[np.argsort(-lengths[window], kind="stable")]
        batches += [window[place : place + size] for place in range(0, len(window), size)]
    return [batches[number] for number in random.permutation(len(batches))]
