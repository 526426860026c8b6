"""Reads Parquet and Arrow files, a batch of rows at a time.

``datasets`` reads Parquet by Arrow's scanner, which runs ahead of who takes its rows, as far as the file is read faster
than the cache is written: up to a gigabyte of them waits in memory.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from course_lib.data import arrow_types
from course_lib.data.cache import RECORD_ROWS
from course_lib.data.conversations import as_json, holds_conversations
from course_lib.data.tables import Table
from course_lib.errors import DataError

BATCH_BYTES = 1 << 22
"""At most, of a batch; and RECORD_ROWS rows."""

BUFFER_BYTES = 1 << 20
"""Of a column, read at a time."""


def batch_rows(metadata: pq.FileMetaData) -> int:
    """Rows of a file to read at a time."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size / group.num_rows for group in groups if group.num_rows), default=1.0)
    return max(1, min(RECORD_ROWS, int(BATCH_BYTES / max(longest, 1.0))))


def _batches(path: Path, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a file, some of its columns alone."""
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            yield from file.iter_batches(batch_rows(file.metadata), columns=list(columns))
        return
    with pa.memory_map(str(path)) as source, _open_arrow(source) as reader:
        read = (
            reader
            if isinstance(reader, pa.ipc.RecordBatchStreamReader)
            else map(reader.get_batch, range(reader.num_record_batches))
        )
        for batch in read:
            for start in range(0, len(batch), RECORD_ROWS):
                yield batch.select(list(columns)).slice(start, RECORD_ROWS)


def column_from(path: Path, column: str, start: int) -> Iterator[pa.Array]:
    """One column of a file from a row on; groups of rows before it are not read."""
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            about = file.metadata
            ends = list(itertools.accumulate(about.row_group(group).num_rows for group in range(about.num_row_groups)))
            groups = [group for group, end in enumerate(ends) if end > start]
            start -= ends[groups[0] - 1] if groups and groups[0] else 0
            batches = file.iter_batches(batch_rows(about), row_groups=groups, columns=[column]) if groups else ()
            yield from _after(batches, start)
        return
    yield from _after(_batches(path, [column]), start)


def _after(batches: Iterable[pa.RecordBatch], start: int) -> Iterator[pa.Array]:
    """The only column of some batches, without their first rows."""
    for batch in batches:
        if len(batch) > start:
            batch.validate(full=True)  # see table_of
            yield batch.column(0).slice(start)
        start = max(0, start - len(batch))


def _open_arrow(source: pa.MemoryMappedFile) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    """An Arrow file in either of its two forms."""
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)


def _schema(path: Path) -> pa.Schema:
    if path.suffix.lower() == ".parquet":
        return pq.read_schema(path)
    with pa.memory_map(str(path)) as source, _open_arrow(source) as reader:
        return reader.schema


def table_of(files: Sequence[Path], chats: bool = False) -> Table:
    """The rows of Parquet or Arrow files as one split.

    Args:
        files: of one kind.
        chats: columns of conversations become JSON text.
    Raises:
        DataError: the files have other columns, or columns of other types.
    """
    schemas = [_schema(file) for file in files]
    first = schemas[0]
    if repeated := next((name for name in first.names if first.names.count(name) > 1), None):
        raise DataError(f"{files[0]} has two columns `{repeated}`", "rename one of them")
    types: dict[str, pa.DataType | str] = {}
    talks: list[str] = []
    for name in first.names:
        if lacks := next((file for file, schema in zip(files, schemas, strict=True) if name not in schema.names), None):
            raise DataError(
                f"{lacks} has no column `{name}`, and {files[0].name} has", "give all files of a split the same columns"
            )
        kinds = {arrow_types.plain_type(schema.field(name).type) for schema in schemas}
        known = kinds - {pa.null()} or {pa.null()}
        if known == {pa.int64(), pa.float64()}:
            known = {pa.float64()}
        held = dict.fromkeys(arrow_types.shown(schema.field(name).type) for schema in schemas)
        if chats and all(holds_conversations(name, schema.field(name).type) for schema in schemas):
            known, talks = {pa.string()}, [*talks, name]
        one = next(iter(known))
        types[name] = one if len(known) == 1 and one is not None else " in one file and ".join(held)
    refused = {name for name, kind in types.items() if isinstance(kind, str)}
    kept = [name for name in first.names if name not in refused]

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        for batch in itertools.chain.from_iterable(_batches(file, kept) for file in files):
            batch.validate(full=True)  # a damaged file may hold indices and offsets that end the process
            yield {name: as_json(batch.column(name)) if name in talks else batch.column(name) for name in kept}

    named = [_class_names(schema, types) for schema in schemas]
    if other := next((file for file, names in zip(files, named, strict=True) if names != named[0]), None):
        raise DataError(
            f"{other} names its classes otherwise than {files[0].name}",
            "write all files of a split anew, as one data set",
        )
    return Table(
        types,
        batches,
        named[0],
        {name: arrow_types.way_out(first.field(name).type, name) for name in refused},
        chats=talks,
    )


def _class_names(schema: pa.Schema, types: Mapping[str, pa.DataType | str]) -> dict[str, list[str]]:
    """Names of the classes of columns that ``datasets`` wrote as numbers with names."""
    told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = told.get("info", {}).get("features") or {}
    return {
        name: about["names"]
        for name, about in features.items()
        if isinstance(about, dict)
        and about.get("_type") == "ClassLabel"
        and about.get("names")
        and types.get(name) == pa.int64()
    }
