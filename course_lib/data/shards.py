"""The files of a split as a stream of texts: each is read row by row, from any row on, and nothing is written."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from course_lib.config import DataConfig
from course_lib.data import arrow_types, columns, json_rows, parquet
from course_lib.data.cleaning import clean
from course_lib.data.conversations import COLUMNS, as_json
from course_lib.data.folders import BINARY, kind_of, reading
from course_lib.data.localfiles import has_gap, texts
from course_lib.data.plain_files import read_lines
from course_lib.data.sources import Source
from course_lib.data.tables import Raw
from course_lib.errors import DataError

SAMPLE = 1000
"""Rows, or lines, of the first file that are looked at to find the column of texts."""


@dataclass(frozen=True)
class Shards:
    """Files of one split that are read as they are needed.

    Attributes:
        files: in the split's own order.
        column: of the texts; None for plain text.
        conversations: whether it holds conversations, which are read as JSON.
        paragraphs: whether the examples of plain text are paragraphs; else each line is one.
        encoding: of text, as the user names it.
        tidy, lowercase: whether each text is cleaned so, see :func:`course_lib.data.cleaning.clean`.
    """

    files: tuple[Path, ...]
    column: str | None = None
    conversations: bool = False
    paragraphs: bool = False
    encoding: str | None = None
    tidy: bool = False
    lowercase: bool = False

    def __len__(self) -> int:
        return len(self.files)

    def name(self, shard: int) -> str:
        """The file's."""
        return str(self.files[shard])

    def read(self, shard: int, start: int = 0) -> Iterator[str]:
        """The texts of one file from a row on; of Parquet no group of rows before it is read.

        Raises:
            DataError: the file cannot be read, or a row has no text.
        """
        path = self.files[shard]
        with reading(str(path), kind_of(path) or "text"):
            for row, text in enumerate(self._values(path, start), start):
                if not isinstance(text, str):
                    raise DataError(
                        f"{path}, row {row} (from 0) has no text in column `{self.column}`",
                        "mend that row, or leave it out",
                    )
                if self.tidy or self.lowercase:
                    text = clean(text, self.lowercase) if self.tidy else text.lower()
                yield text

    def _values(self, path: Path, start: int) -> Iterator[Any]:
        if self.column is None:
            yield from itertools.islice(texts(read_lines(path, self.encoding), self.paragraphs), start, None)
        elif kind_of(path) not in BINARY:
            for row in itertools.islice(json_rows.read_rows(path, self.encoding), start, None):
                value = row.get(self.column)
                yield json.dumps(value, ensure_ascii=False) if self.conversations and value is not None else value
        else:
            for values in parquet.column_from(path, self.column, start):
                if not self.conversations:
                    values = arrow_types.text_of(arrow_types.plain(values), self.column, "train", start)
                yield from (as_json(values) if self.conversations else values).to_pylist()


def open_shards(
    source: Source, split: str, config: DataConfig, choose_chat: Callable[[Sequence[str], str], str | None]
) -> Shards:
    """The files of a split, of which a part of the first is read to find the column of texts.

    Args:
        source: a local file or folder.
        split: by its own name.
        config: column, encoding, cleaning.
        choose_chat: of the columns of conversations that there are, the one to train on.
    Raises:
        DataError: it is no local data set, of a kind that is not streamed, or has no column of texts.
    """
    what = f"the train split of {source.name}"
    files = tuple(source.files.get(split, ()))
    if not files:
        raise DataError(
            f"streaming reads local files, and {source.name} is none",
            "download it and give the folder: hf download --repo-type dataset NAME --local-dir FOLDER",
        )
    kind = kind_of(files[0])
    if kind in ("csv", "tsv"):
        raise DataError(
            f"streaming reads JSON lines, Parquet, Arrow and plain text, and {files[0]} is {kind}",
            "convert it: datasets.Dataset.from_csv(FILE).to_parquet(NEW), or leave out --streaming",
        )
    tidy = bool(config.clean_text)
    if kind == "text":
        paragraphs = has_gap(itertools.islice(read_lines(files[0], config.encoding), SAMPLE))
        choose_chat((), what)
        return Shards(files, None, False, paragraphs, config.encoding, tidy, config.lowercase)
    with reading(str(files[0]), str(kind)):
        raw = _sample(files[0], config)
    chat = choose_chat(columns.conversations(raw), what)
    column = chat or columns.choose_column(config.text_column, columns.TEXT_NAMES, raw, "text_column", what)
    if not chat:
        columns.check_text(raw, column, "train")
    return Shards(files, column, chat is not None, False, config.encoding, tidy, config.lowercase)


def _sample(path: Path, config: DataConfig) -> Raw:
    """The first rows of a file, as they would come from the cache."""
    if kind_of(path) in BINARY:
        table = parquet.table_of([path], chats=True)
        first = next(table.batches(), None)
        if first is None:
            raise DataError(f"{path} has no rows", "give files with rows")
        refused = {
            name: (held, table.way_out.get(name, "")) for name, held in table.types.items() if isinstance(held, str)
        }
        return Raw(datasets.Dataset(pa.table(dict(first))), refused, chats=table.chats)
    rows, kinds = list(itertools.islice(json_rows.read_rows(path, config.encoding), SAMPLE)), json_rows.Columns()
    for row in rows:
        kinds.add(row)
    types = kinds.types()
    chats = [name for name, held in types.items() if name.lower() in COLUMNS and held == "lists"]
    types |= dict.fromkeys(chats, pa.string())
    kept = {name: held for name, held in types.items() if isinstance(held, pa.DataType)}
    refused = {name: (held, "") for name, held in types.items() if isinstance(held, str)}
    return Raw(datasets.Dataset(pa.table(json_rows.arrays(rows, kept))), refused, chats=chats)
