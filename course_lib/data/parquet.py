"""Reads Parquet files into the cache of ``datasets``, a batch of rows at a time.

``datasets`` reads them by Arrow's scanner, which runs ahead of who takes its rows, as far as the file is read faster
than the cache is written: up to a gigabyte of them waits in memory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.builder import Key
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from datasets.packaged_modules.parquet.parquet import Parquet

from course_lib.data.cache import RECORD_ROWS

BATCH_BYTES = 1 << 22
"""At most, of a batch; and RECORD_ROWS rows."""

BUFFER_BYTES = 1 << 20
"""Of a column, read at a time."""


class BatchedParquet(Parquet):
    """The builder of ``datasets`` for Parquet files, but for what it holds."""

    def _generate_tables(self, files: Sequence[str], row_groups_list: object = None) -> Iterator[tuple[Key, pa.Table]]:
        for number, path in enumerate(files):
            with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                for part, batch in enumerate(file.iter_batches(batch_rows(file.metadata))):
                    yield Key(number, part), self._cast_table(pa.Table.from_batches([batch]))


def batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a file to read at a time."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size / group.num_rows for group in groups if group.num_rows), default=1.0)
    return max(1, min(RECORD_ROWS, int(BATCH_BYTES / max(longest, 1.0))))


def read_parquet(files: Sequence[Path]) -> datasets.Dataset:
    """The rows of Parquet files as one split, memory-mapped from the cache.

    Raises:
        datasets.exceptions.DatasetGenerationError: a file cannot be read, or there are no rows.
    """
    builder = BatchedParquet(data_files={"train": list(map(str, files))}, writer_batch_size=RECORD_ROWS,
                             hash=_PACKAGED_DATASETS_MODULES["parquet"][1])
    builder.download_and_prepare()
    return builder.as_dataset(split="train")
