"""Reads local files, compressed or not, into the cache: CSV, TSV, JSON, JSON lines, Parquet, Arrow, plain text."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

from course_lib.data import json_rows, parquet
from course_lib.data.arrow_types import way_out
from course_lib.data.cache import RECORD_BYTES, RECORD_ROWS
from course_lib.data.conversations import COLUMNS
from course_lib.data.delimited import Ambiguous, Delimited, Rows, same_header
from course_lib.data.folders import BINARY, kind_of, reading
from course_lib.data.plain_files import COMPRESSED, contents, read_lines, refuse_what_it_is
from course_lib.data.tables import Raw, Table, cached_table
from course_lib.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Form of local files of text, as the user gives it; None: as they show.

    Attributes:
        encoding: of text.
        separator: of CSV, a name in :data:`course_lib.data.delimited.SEPARATORS`.
        quoting: of CSV and TSV, a name in :data:`course_lib.data.delimited.QUOTINGS`.
        chats: columns of conversations become JSON text; else they are refused.
    """

    encoding: str | None = None
    separator: str | None = None
    quoting: str | None = None
    chats: bool = False


def read_split(files: Sequence[Path], options: Options = Options()) -> Raw:
    """The rows of files of one kind, memory-mapped from the cache; filed under the files' contents.

    Of CSV and TSV every column is text. A blank line separates the examples of plain text where it has any; else each
    line is one; both keep their line ends.

    Args:
        files: of one kind.
        options: how they are read.
    Raises:
        DataError: a file is empty, in another encoding, or cannot be read as its kind.
    """
    kind, shown = kind_of(files[0]), str(files[0])
    assert kind is not None
    if kind in BINARY:
        for file in files:
            with file.open("rb") as opened:
                refuse_what_it_is(file, opened.read(64), BINARY)
    if kind in BINARY and (packed := next((file for file in files if file.suffix.lower() in COMPRESSED), None)):
        raise DataError(f"{packed} is {kind} in another compression", "unpack it: such files are compressed within")
    if len(files) > 1:
        shown += f" (or one of {len(files) - 1} beside it)"
    with reading(shown, kind):
        parts = [kind, *map(contents, files)]
        if kind not in BINARY:
            parts += [str(options)]
        elif options.chats:
            parts += ["chats"]
        return cached_table(parts, lambda: READERS[kind](files, options))


def _of_parquet(files: Sequence[Path], options: Options) -> Table:
    return parquet.table_of(files, options.chats)


def _of_text(files: Sequence[Path], options: Options) -> Table:
    paragraphs = any(has_gap(read_lines(file, options.encoding)) for file in files)

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        rows = itertools.chain.from_iterable(texts(read_lines(file, options.encoding), paragraphs) for file in files)
        for some in _in_batches(rows, len):
            yield {"text": pa.array(some, pa.string())}

    return Table({"text": pa.string()}, batches)


def has_gap(lines: Iterator[str]) -> bool:
    """Whether a blank line is between two others."""
    begun = gap = False
    for line in lines:
        blank = not line.strip()
        if gap and not blank:
            return True
        gap = begun and blank
        begun |= not blank
    return False


def texts(lines: Iterator[str], paragraphs: bool) -> Iterator[str]:
    """Lines or paragraphs with the line ends and blank lines that follow them: all together they are the file."""
    text, gap = "", False
    for line in lines:
        blank = not line.strip()
        if text.strip() and not blank and (gap or not paragraphs):
            yield text
            text = ""
        text, gap = text + line, blank
    if text:
        yield text


def _of_json(files: Sequence[Path], options: Options) -> Table:
    columns = json_rows.Columns()
    for file in files:
        for row in json_rows.read_rows(file, options.encoding):
            columns.add(row)
    types = columns.types()
    chats = [name for name, kind in types.items() if options.chats and name.lower() in COLUMNS and kind == "lists"]
    types |= dict.fromkeys(chats, pa.string())
    kept = {name: kind for name, kind in types.items() if isinstance(kind, pa.DataType)}

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        for file in files:
            begun = 0
            for rows in _in_batches(json_rows.read_rows(file, options.encoding), lambda row: len(str(row))):
                try:
                    yield json_rows.arrays(rows, kept)
                except UnicodeEncodeError:
                    where = next(number for number, row in enumerate(rows) if _is_halved(row))
                    raise DataError(
                        f"{file} has half of a surrogate pair in row {begun + where} (from 0), which is no character",
                        "mend that row, or leave it out",
                    ) from None
                begun += len(rows)

    shapes = {"lists": pa.list_(pa.null()), "objects": pa.struct([])}
    return Table(
        types,
        batches,
        chats=chats,
        way_out={
            name: way_out(shapes[str(kind)], name) if str(kind) in shapes else "write all its values alike"
            for name, kind in types.items()
        },
    )


def _is_halved(row: json_rows.Row) -> bool:
    try:
        str({name: value for name, value in row.items() if isinstance(value, str)}).encode()
        "".join(value for value in row.values() if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return True
    return False


def _of_delimited(files: Sequence[Path], options: Options, separator: str | None = None) -> Table:
    delimited = [Delimited(file, options.encoding, separator or options.separator, options.quoting) for file in files]
    names = same_header(delimited)
    notes: list[str] = []

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        for file in delimited:
            rows = file.rows()
            try:
                for some in _in_batches(itertools.islice(rows, 1, None), lambda row: sum(map(len, row))):
                    yield {
                        name: pa.array(values, pa.string())
                        for name, values in zip(names, zip(*some, strict=True), strict=True)
                    }
            except Ambiguous as error:
                file.refuse(error)
            if rows.spanning:
                notes.append(_spanning(file.path, rows))

    return Table(dict.fromkeys(names, pa.string()), batches, notes=notes)


def _spanning(path: Path, rows: Rows) -> str:
    first, last = rows.first_spanning
    return f"{path.name}: {rows.spanning} of its rows span lines, within quotes (the first: lines {first} to {last})"


def _in_batches(rows: Iterator[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Rows some at a time, of about RECORD_BYTES."""
    batch: list[T] = []
    total = 0
    for row in rows:
        batch.append(row)
        total += size(row)
        if total >= RECORD_BYTES or len(batch) == RECORD_ROWS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


READERS: Mapping[str, Callable[[Sequence[Path], Options], Table]] = {
    "parquet": _of_parquet,
    "arrow": _of_parquet,
    "text": _of_text,
    "json": _of_json,
    "csv": _of_delimited,
    "tsv": lambda files, options: _of_delimited(files, options, "tab"),
}
"""What reads files, by their kind."""
