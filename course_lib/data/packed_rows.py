"""Tokenized texts packed into rows that several of them share; see :mod:`course_lib.data.packing`."""

import itertools
from typing import Any

import datasets

from course_lib.data.cache import cached_map, column, digest
from course_lib.data.packing import best_fit


def pack(pieces: datasets.Dataset, capacity: int, key: str, describe: str) -> datasets.Dataset:
    """The rows that pieces of text make by best fit, memory-mapped from the cache.

    Args:
        pieces: columns `input_ids`, `length`, at most ``capacity``, and others with a value per token.
        capacity: tokens of a row.
        key: names the pieces and the capacity.
        describe: for the progress bar.
    Returns:
        The columns of the pieces, joined, and `documents`, int32: the length of each piece in a row.
    """
    plan = best_fit(column(pieces, "length").to_pylist(), capacity)
    by_token = pieces.remove_columns("length")

    features = datasets.Features(pieces.features | {"documents": datasets.List(datasets.Value("int32"))})
    return cached_map(
        datasets.Dataset.from_dict({"pieces": plan}),
        lambda batch: join(batch["pieces"].to_pylist(), by_token),
        key=digest("rows", key),
        features=features,
        describe=describe,
        row_bytes=8 * capacity,
    )


def join(plan: list[list[int]], by_token: datasets.Dataset) -> dict[str, list[Any]]:
    """The columns of some rows, given the numbers of each one's pieces.

    Args:
        plan: for each row the numbers of its pieces.
        by_token: the pieces, all of whose columns have a value per token.
    """
    numbers = list(itertools.chain.from_iterable(plan))
    columns = by_token[numbers]
    ends = list(itertools.accumulate(map(len, plan)))
    rows = [slice(end - len(row), end) for row, end in zip(plan, ends, strict=True)]
    made = {
        name: [list(itertools.chain.from_iterable(values[row])) for row in rows] for name, values in columns.items()
    }
    lengths = [len(ids) for ids in columns["input_ids"]]
    return made | {"documents": [lengths[row] for row in rows], "length": [sum(lengths[row]) for row in rows]}
