"""Reads local files, compressed or not, as Arrow columns: CSV, TSV, JSON, JSON lines, Parquet, Arrow, plain text.

``datasets`` reads Parquet by Arrow's scanner, which runs ahead of who takes its rows, as far as the file is read faster
than the cache is written: up to a gigabyte of them waits in memory. Here a batch is read when it is asked for.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.arrow_writer import ArrowWriter
from huggingface_hub.utils import WeakFileLock

from course_lib.data.cache import FORMAT, RECORD_BYTES, RECORD_ROWS, digest, folder, unwritable
from course_lib.data.folders import BINARY, kind_of, reading
from course_lib.data.plain_files import Row, contents, read_rows, refuse_pointer
from course_lib.errors import DataError

TYPES = {str: "string", bool: "bool", int: "int64", float: "float64", type(None): "null"}
"""Types of columns of text files, by those of their values in Python."""

PLAIN = {pa.string_view(): pa.string(), pa.float16(): pa.float32()}
"""Types of Arrow that most of its functions do not take, as ones that they do."""

BITS = 63
"""Whole numbers of more than these are no int64."""

BATCH_BYTES = 1 << 22
"""At most, of a batch of Parquet; and RECORD_ROWS rows."""

BUFFER_BYTES = 1 << 20
"""Bytes of a column of Parquet that are read at a time."""


@dataclass(frozen=True)
class Options:
    """Form of local files of text, as the user gives it, see :func:`course_lib.data.plain_files.read_rows`."""

    encoding: str | None = None
    separator: str | None = None
    quoting: str | None = None


def read_split(files: Sequence[Path], options: Options = Options()) -> datasets.Dataset:
    """The rows of files of one kind, memory-mapped from the cache; filed under the files' contents.

    Columns of JSON that hold lists, objects or values of several types are ``datasets.Json``.

    Raises:
        DataError: a file is empty, in another encoding, or cannot be read as its kind; or the cache cannot be written.
    """
    kind = str(kind_of(files[0]))
    with reading(str(files[0]), kind):
        parts = [kind, *map(contents, files), *([] if kind in BINARY else asdict(options).values())]
    path = folder() / f"{digest(FORMAT, 'files', *parts)}.arrow"
    with unwritable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(f"{path}.lock"):
            if not path.exists():
                _write(files, options, path)
    return datasets.Dataset.from_file(str(path))


def _write(files: Sequence[Path], options: Options, path: Path) -> None:
    """Write rows beside their place, and put them there when they are whole."""
    features, beside = _common_features(files, options), path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with ArrowWriter(features=features, path=str(beside), writer_batch_size=RECORD_ROWS) as writer:
            for table in itertools.chain.from_iterable(_tables(file, features, options) for file in files):
                writer.write_table(table)
            if not writer.finalize()[0]:
                raise DataError(f"{files[0]} has no rows", "give a file with at least one row")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _tables(file: Path, features: datasets.Features, options: Options) -> Iterator[pa.Table]:
    """The rows of a file, some at a time."""
    kind = str(kind_of(file))
    with reading(str(file), kind):
        if kind in BINARY:
            yield from (pa.Table.from_batches([batch]) for batch in _batches(file))
        else:
            for rows in _in_batches(read_rows(file, kind, **asdict(options))):
                yield _table(rows, features)


def _in_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows some at a time, of about RECORD_BYTES."""
    batch, size = list[Row](), 0
    for row in rows:
        batch.append(row)
        size += len(str(row))
        if size >= RECORD_BYTES or len(batch) == RECORD_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _table(rows: Sequence[Row], features: datasets.Features) -> pa.Table:
    columns = {}
    for name, feature in features.items():
        values = [row.get(name) for row in rows]
        if isinstance(feature, datasets.Json):
            values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
        columns[name] = pa.array(values, pa.string() if isinstance(feature, datasets.Json) else feature.pa_type)
    return pa.table(columns)


def _common_features(files: Sequence[Path], options: Options) -> datasets.Features:
    """The columns of all files of a split.

    Raises:
        DataError: a file has others.
    """
    kind, per_file = str(kind_of(files[0])), list[datasets.Features]()
    for file in files:
        features = features_of(file, options, None if kind == "json" else 1)
        first = per_file[0] if per_file else features
        if kind != "json" and list(features) != list(first):
            raise DataError(
                f"{file} has the columns {', '.join(features)}, and {files[0].name} {', '.join(first)}",
                "give all files of a split the same columns",
            )
        if _class_names(features) != _class_names(first):
            raise DataError(
                f"{file} names its classes otherwise than {files[0].name}",
                "write all files of a split anew, as one data set",
            )
        per_file.append(features)
    with reading(f"{files[0]} (or one of {len(files) - 1} beside it)" if files[1:] else str(files[0]), kind):
        schema = pa.unify_schemas([features.arrow_schema for features in per_file], promote_options="permissive")
        return datasets.Features.from_arrow_schema(schema.with_metadata(per_file[0].arrow_schema.metadata))


def _class_names(features: datasets.Features) -> dict[str, list[str]]:
    """Names of the classes of columns that ``datasets`` wrote as numbers with names."""
    return {name: feature.names for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)}


def features_of(file: Path, options: Options, count: int | None = None) -> datasets.Features:
    """The columns of a file; of one of text, as wide as the values of its first rows, or of all.

    Raises:
        DataError: it has none, one twice, or one of a type that `datasets` cannot hold.
    """
    kind, held = str(kind_of(file)), dict[str, set[type]]()
    with reading(str(file), kind):
        refuse_pointer(file)
        if kind in BINARY:
            with _opened(file) as (schema, _):
                if repeated := next((name for name in schema.names if schema.names.count(name) > 1), None):
                    raise DataError(f"{file} has two columns `{repeated}`", "rename one of them")
                plain = [field.with_type(PLAIN.get(field.type, field.type)) for field in schema]
                for field in plain:
                    _check_type(file, field)
                return datasets.Features.from_arrow_schema(pa.schema(plain, schema.metadata))
        for row in itertools.islice(read_rows(file, kind, **asdict(options)), count):
            for name, value in row.items():
                is_too_long = type(value) is int and value.bit_length() > BITS
                held.setdefault(name, set()).add(object if is_too_long else type(value))
    if not held:
        raise DataError(f"{file} has no rows", "give a file with at least one row")
    return datasets.Features({name: _feature(types) for name, types in held.items()})


def _check_type(file: Path, field: pa.Field) -> None:
    """Refuse a column of a type that `datasets` cannot hold, such as a map."""
    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except ValueError:
        raise DataError(
            f"column `{field.name}` of {file} holds {field.type}, which `datasets` has no type for",
            "write the file anew without that column, or with texts or lists in it",
        ) from None


def _feature(types: set[type]) -> datasets.Value | datasets.Json:
    types = types - {type(None)} or types
    kind = float if types == {int, float} else next(iter(types)) if len(types) == 1 else object
    return datasets.Value(TYPES[kind]) if kind in TYPES else datasets.Json()


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[pa.Schema, Any]]:
    """A Parquet file, or an Arrow file in either of its two forms: its columns and its reader."""
    if kind_of(file) == "parquet":
        with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as reader:
            yield reader.schema_arrow, reader
        return
    with pa.memory_map(str(file)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            yield (
                reader.schema,
                (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader,
            )


def _batches(file: Path, columns: Sequence[str] | None = None, start: int = 0) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet or Arrow file from one on, some columns alone; groups of rows before it are not read."""
    with _opened(file) as (schema, reader):
        batches: Iterable[pa.RecordBatch]
        if isinstance(reader, pq.ParquetFile):
            groups = [reader.metadata.row_group(number) for number in range(reader.num_row_groups)]
            first = 0
            while first < len(groups) and groups[first].num_rows <= start:
                start -= groups[first].num_rows
                first += 1
            bytes_of_a_row = sum(group.total_byte_size for group in groups) / max(1, reader.metadata.num_rows)
            rows = max(1, min(RECORD_ROWS, int(BATCH_BYTES / max(bytes_of_a_row, 1))))
            batches = reader.iter_batches(rows, row_groups=list(range(first, len(groups))), columns=columns)
        else:
            pieces = (batch.slice(at, RECORD_ROWS) for batch in reader for at in range(0, len(batch), RECORD_ROWS))
            batches = (piece.select(columns or schema.names) for piece in pieces)
        for batch in batches:
            if len(batch) > start:
                batch.validate(full=True)  # a damaged file may hold indices and offsets that end the process
                yield batch.slice(start)
            start = max(0, start - len(batch))


def values_of(file: Path, column: str, options: Options, start: int = 0) -> Iterator[Any]:
    """One column of a file from a row on, read as it is asked for.

    Raises:
        DataError: the file cannot be read.
    """
    kind = str(kind_of(file))
    with reading(str(file), kind):
        if kind in BINARY:
            for batch in _batches(file, [column], start):
                yield from batch.column(0).to_pylist()
        else:
            for row in itertools.islice(read_rows(file, kind, **asdict(options)), start, None):
                yield row.get(column)
