"""The order of an epoch: which rows make up which global batch, for any number of rows in the same memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

WINDOW = 50
"""Global batches that are sorted by length together; more pad less, fewer shuffle better."""

PART = 2**20
"""Rows that are shuffled together: all, where there are no more. The rows of a larger data set are drawn for each
part from all over it, in runs, so that a disk reads them in one go."""

RUN = 1024
"""About so many rows are in a run."""


class EpochBatches(Sequence[np.ndarray]):
    """Row numbers of each global batch of one epoch, worked out a part at a time.

    Up to ``PART`` rows, the order is a permutation of them all. Beyond, it is one of runs of rows, a part takes so many
    of them, and their rows are shuffled: 8 bytes per run and about 30 per row of one part are all that is held.

    Args:
        lengths: tokens of each row; an Arrow column stays on disk.
        size: rows of a global batch.
        seed: whole numbers that decide the order.
        group_by_length: sort windows of the shuffled order by length, then shuffle the batches.
        part: rows that are shuffled together.
        drop_last: leave out the last rows in the shuffled order where they fill no batch.
    """

    def __init__(
        self,
        lengths: Sequence[int] | pa.ChunkedArray,
        size: int,
        seed: Sequence[int],
        group_by_length: bool = True,
        part: int = PART,
        drop_last: bool = False,
    ):
        self.drop_last = drop_last
        self.lengths, self.size, self.seed, self.group_by_length = lengths, size, list(seed), group_by_length
        self.rows = len(lengths)
        self.run = self.rows if self.rows <= part else size * max(1, min(RUN, part // 16) // size)
        whole = self.rows // self.run
        order = np.random.default_rng(self.seed).permutation(whole) if self.rows > part else np.arange(whole)
        self.runs = np.concatenate([order, np.arange(whole, -(-self.rows // self.run))])  # a shorter one comes last
        self.runs_of_a_part = max(1, part // self.run)
        self.here: tuple[int, list[np.ndarray]] = (-1, [])

    def __len__(self) -> int:
        return self.rows // self.size if self.drop_last else -(-self.rows // self.size)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        part, place = divmod(index, max(1, self.runs_of_a_part * self.run // self.size))
        if self.rows == self.run:
            part, place = 0, index
        if self.here[0] != part:
            self.here = part, self._part(part)
        return self.here[1][place]

    def _part(self, part: int) -> list[np.ndarray]:
        """The batches of one part, longest row first where grouped by length."""
        runs = self.runs[part * self.runs_of_a_part : (part + 1) * self.runs_of_a_part]
        ends = [(run * self.run, min((run + 1) * self.run, self.rows)) for run in runs.tolist()]
        rows = np.concatenate([np.arange(*start_end) for start_end in ends])
        # All rows in one part are shuffled by the seed alone.
        random = np.random.default_rng(self.seed if self.rows == self.run else [*self.seed, part + 1])
        order, size = random.permutation(len(rows)), self.size
        if self.drop_last:
            order = order[: len(order) // size * size]
        rows = rows[order]
        if not self.group_by_length:
            return [rows[i : i + size] for i in range(0, len(rows), size)]
        lengths = np.concatenate([lengths_of(self.lengths, *start_end) for start_end in ends])[order]
        batches = []
        for start in range(0, len(rows), WINDOW * size):
            window = slice(start, start + WINDOW * size)
            # Longest first: the short batch at the end, with its filler, holds the shortest rows.
            sorted_rows = rows[window][np.argsort(-lengths[window], kind="stable")]
            batches += [sorted_rows[i : i + size] for i in range(0, len(sorted_rows), size)]
        return [batches[i] for i in random.permutation(len(batches))]


def lengths_at(lengths: Sequence[int] | pa.ChunkedArray, rows: np.ndarray) -> np.ndarray:
    """Tokens of some rows, by number and in any order; int64."""
    # One by one: Arrow's take joins the pieces of a long column anew for each call.
    tokens = (lengths[row] for row in rows.tolist())
    if isinstance(lengths, pa.ChunkedArray):
        tokens = (length.as_py() for length in tokens)
    return np.fromiter(tokens, np.int64, len(rows))


def lengths_of(lengths: Sequence[int] | pa.ChunkedArray, first: int, end: int) -> np.ndarray:
    """Tokens of some rows that follow each other."""
    return np.asarray(lengths.slice(first, end - first) if isinstance(lengths, pa.ChunkedArray) else lengths[first:end])
