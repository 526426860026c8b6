"""Rows of files on their way into the cache: a column is of a plain type there, or refused by name where it is used."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.arrow_writer import ArrowWriter
from huggingface_hub.utils import WeakFileLock

from course_lib.data import arrow_types
from course_lib.data.cache import FORMAT, RECORD_ROWS, digest, folder, unwritable
from course_lib.errors import DataError

NO_ROWS = "there are no rows"


@dataclass(frozen=True)
class Table:
    """Rows of files, not read yet.

    Attributes:
        types: the columns and the plain Arrow type of each, see :mod:`course_lib.data.arrow_types`; a text says what a
            column holds that is refused.
        batches: reads the rows, some at a time; columns that are refused may be among them.
        class_names: of columns whose numbers are classes with names.
        way_out: what to do about a column that is refused, by name; default: name another.
        notes: what was noticed while the rows were read.
        chats: columns of conversations, which are given as JSON text.
    """

    types: Mapping[str, pa.DataType | str]
    batches: Callable[[], Iterator[Mapping[str, pa.Array]]]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    way_out: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    chats: Sequence[str] = ()

    @property
    def features(self) -> datasets.Features:
        """The columns that are kept."""
        kept = {name: kind for name, kind in self.types.items() if isinstance(kind, pa.DataType)}
        return datasets.Features(
            {
                name: datasets.ClassLabel(names=list(self.class_names[name]))
                if name in self.class_names
                else datasets.Value(_VALUES[str(kind)])
                for name, kind in kept.items()
            }
        )


_VALUES = {
    "string": "string",
    "binary": "binary",
    "int64": "int64",
    "uint64": "uint64",
    "double": "float64",
    "bool": "bool",
    "null": "null",
}


@dataclass(frozen=True)
class Raw:
    """One split as it came.

    Attributes:
        rows: its columns except for those that are refused.
        refused: what each of these holds, and what to do about it.
        notes: what was noticed while it was read.
        chats: columns of conversations that are JSON text here; others are lists still.
    """

    rows: datasets.Dataset
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    chats: Sequence[str] = ()

    @property
    def column_names(self) -> list[str]:
        """All columns, those that are refused at the end."""
        return [*self.rows.column_names, *self.refused]

    def type_of(self, name: str) -> pa.DataType:
        """The Arrow type of a column that is not refused."""
        return self.rows.features.arrow_schema.field(name).type

    def problem(self, name: str) -> tuple[str, str] | None:
        """Problem of a column that is neither text nor classes, and the way out; None where it may be either."""
        if name in self.refused:
            return self.refused[name]
        kind = self.type_of(name)
        return (
            None
            if arrow_types.plain_type(kind) is not None
            else (arrow_types.shown(kind), arrow_types.way_out(kind, name))
        )


def cached_table(parts: Sequence[Any], make: Callable[[], Table]) -> Raw:
    """The rows of files, memory-mapped from the cache of `datasets`; read again only where they are not there.

    Args:
        parts: name all that the result depends on: the files' contents, and how they are read.
        make: the rows.
    Raises:
        DataError: there are no rows, or the cache cannot be written.
    """
    path = folder() / f"{digest(FORMAT, 'table', *parts)}.arrow"
    about = path.with_suffix(".json")
    with contextlib.ExitStack() as held:
        with unwritable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(WeakFileLock(f"{path}.lock"))
        if not (path.exists() and about.exists()):
            _write(make(), path, about)
    told = json.loads(about.read_text(encoding="utf-8"))
    return Raw(
        datasets.Dataset.from_file(str(path)),
        {name: tuple(pair) for name, pair in told["refused"].items()},
        told["notes"],
        told.get("chats", ()),
    )


def _write(table: Table, path: Path, about: Path) -> None:
    """Write rows beside their place, and put them there when they are whole."""
    refused = {name: (kind, table.way_out.get(name, "")) for name, kind in table.types.items() if isinstance(kind, str)}
    kept = table.features
    if not kept:
        held = ", ".join(f"`{name}` ({kind})" for name, (kind, _) in refused.items())
        raise DataError(
            f"no column is text or numbers{': ' if held else ''}{held}",
            next((way for _, way in refused.values() if way), "give columns of text and of classes"),
        )
    beside, written = path.with_name(f".{path.name}.{os.getpid()}"), 0
    with unwritable(path):
        writer = ArrowWriter(features=kept, path=str(beside), writer_batch_size=RECORD_ROWS)
    try:
        for batch in table.batches():
            columns = {name: arrow_types.plain(batch[name]) for name in kept}
            rows = pa.table(
                {name: values.cast(kept.arrow_schema.field(name).type) for name, values in columns.items()},
                schema=kept.arrow_schema,
            )
            if len(rows):
                with unwritable(path):
                    writer.write_table(rows)
            written += len(rows)
        if not written:
            raise DataError(NO_ROWS, "give a file with at least one row")
        with unwritable(path):
            writer.finalize()
            told = {"refused": refused, "notes": table.notes, "chats": table.chats}
            about.write_text(json.dumps(told), encoding="utf-8")
            os.replace(beside, path)
    finally:
        writer.close()
        beside.unlink(missing_ok=True)
