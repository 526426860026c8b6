"""Caches on disk what is made of a data set, under a key: one process works while the others wait."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from huggingface_hub.utils import WeakFileLock

from course_lib.errors import DataError

FORMAT = 2
"""Part of every key; to be raised when the same inputs give another result."""

BATCH_ROWS = 10_000
"""Worked on at a time, at most."""

BATCH_BYTES = 1 << 18
"""Worked on at a time, about; at least a row."""

RECORD_ROWS = 50_000
"""At most, whose results make one record of the cache: every process keeps some kilobytes in memory for each."""

RECORD_BYTES = 1 << 21
"""About as much, of longer rows."""

BAR_ROWS = 20_000
"""Rows above which work is long enough for a progress bar."""


def digest(*parts: Any) -> str:
    """32 hexadecimal digits that name JSON-serialisable values, the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def column_digest(rows: datasets.Dataset, name: str) -> str:
    """Counterpart of `digest` for a column of strings, numbers or lists; how it is stored is no difference.

    No string counts as an empty one.
    """
    lengths, content = hashlib.sha256(), hashlib.sha256()
    for values in batches(rows, name):
        if pa.types.is_floating(values.type) or pa.types.is_boolean(values.type):
            values = values.cast(pa.string())
        if not pa.types.is_integer(values.type):
            strings = (json.dumps(value) if isinstance(value, list) else value for value in values.to_pylist())
            encoded = [(value or "").encode() for value in strings]
            lengths.update(np.fromiter(map(len, encoded), "<i8", len(encoded)).tobytes())
            content.update(b"".join(encoded))
        else:
            content.update(values.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
    return digest(lengths.hexdigest(), content.hexdigest())


def batches(rows: datasets.Dataset, name: str) -> Iterator[pa.Array]:
    """One column, BATCH_ROWS rows at a time, so that a file of any size takes the same memory."""
    for batch in rows.select_columns(name).with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield batch[name].combine_chunks()


def column(rows: datasets.Dataset, name: str) -> pa.ChunkedArray:
    """One column as Arrow holds it, in the order of the rows."""
    return rows.select_columns(name).with_format("arrow")[:][name]


def cached_map(
    rows: datasets.Dataset,
    function: Callable[[pa.Table], Mapping[str, Any]],
    *,
    key: str,
    features: datasets.Features,
    describe: str,
    row_bytes: float = 1,
) -> datasets.Dataset:
    """``rows.map(function, batched=True)``, memory-mapped from the cache of `datasets` (HF_DATASETS_CACHE).

    Processes that ask for the same key at the same time wait for the first of them, and read what it wrote.

    Args:
        rows: not empty.
        function: makes all columns of the result, lists or Arrow's, from a batch of rows; it is given them in their
            order, and how many at a time must make no difference.
        key: names everything that the result depends on.
        features: columns of the result.
        describe: for the progress bar.
        row_bytes: about as much memory is needed for a row, where it is more than the row itself has.
    Raises:
        DataError: the cache cannot be written.
    """
    row_bytes = max(row_bytes, rows.data.nbytes / max(1, rows.data.num_rows))
    size = max(1, min(BATCH_ROWS, int(BATCH_BYTES / row_bytes)))
    record = max(size, min(RECORD_ROWS, int(RECORD_BYTES / row_bytes)))

    def in_batches(table: pa.Table) -> pa.Table:
        parts = (table.slice(start, size) for start in range(0, len(table), size))
        return pa.concat_tables([pa.table(function(part), features.arrow_schema) for part in parts])

    path = folder() / f"{key}.arrow"
    with unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{path}.lock"), progress_bars(len(rows) > BAR_ROWS):
            return (
                rows.with_format("arrow")
                .map(
                    in_batches,
                    batched=True,
                    batch_size=record,
                    writer_batch_size=record,
                    features=features,
                    remove_columns=rows.column_names,
                    desc=describe,
                    cache_file_name=str(path),
                    load_from_cache_file=True,
                    new_fingerprint=key,
                )
                .with_format(None)
            )


def folder() -> Path:
    """Folder of all that is made of data sets, within the cache of `datasets`."""
    return Path(datasets.config.HF_DATASETS_CACHE, "course")


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """One clear line where a file of the cache cannot be written.

    Raises:
        DataError: it cannot.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot write {path} ({error.strerror or error})",
            "set HF_DATASETS_CACHE to a folder that can be written and has room",
        ) from error


def cached_filter(rows: datasets.Dataset, kept: pa.ChunkedArray, describe: str) -> datasets.Dataset:
    """Some of the rows, in their order, memory-mapped as :func:`cached_map` does; a selection would stay in memory.

    Args:
        rows: not empty.
        kept: bool [rows]; at least one of them.
        describe: for the progress bar.
    Raises:
        DataError: the cache cannot be written.
    """
    chosen = hashlib.sha256()
    for start in range(0, len(kept), BATCH_ROWS):
        chosen.update(np.packbits(kept.slice(start, BATCH_ROWS).to_numpy()).tobytes())
    key = digest(FORMAT, "rows", [column_digest(rows, name) for name in rows.column_names], chosen.hexdigest())
    begun = 0

    def filtered(batch: pa.Table) -> dict[str, pa.ChunkedArray]:
        nonlocal begun
        begun += len(batch)
        rest = batch.filter(kept.slice(begun - len(batch), len(batch)))
        return dict(zip(rest.column_names, rest.columns, strict=True))

    return cached_map(rows, filtered, key=key, features=rows.features, describe=describe)


@contextlib.contextmanager
def progress_bars(shown: bool = True) -> Iterator[None]:
    """Bars of `datasets` for the block on the main rank where ``shown``, and none elsewhere."""
    hide = not datasets.are_progress_bars_disabled() and not (shown and os.environ.get("RANK", "0") == "0")
    if hide:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            datasets.enable_progress_bars()
