"""The files of a split as a stream of texts: each is read row by row, from any row on, and nothing is written."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.config import DataConfig
from course_lib.data import columns
from course_lib.data.cleaning import clean
from course_lib.data.localfiles import Options, features_of, values_of
from course_lib.data.sources import Source
from course_lib.errors import DataError

SAMPLE = 1000
"""Rows of the first file that are looked at to find the column of texts."""


@dataclass(frozen=True)
class Shards:
    """Files of one split that are read as they are needed.

    Attributes:
        files: in the split's own order.
        column: of the texts.
        options: of files of text.
        conversations: whether it holds conversations, which are read as JSON.
        tidy, lowercase: whether each text is cleaned so, see :func:`course_lib.data.cleaning.clean`.
    """

    files: tuple[Path, ...]
    column: str
    options: Options = Options()
    conversations: bool = False
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
        for row, text in enumerate(values_of(path, self.column, self.options, start), start):
            if self.conversations and text is not None:
                text = json.dumps(text, ensure_ascii=False)
            if not isinstance(text, str):
                raise DataError(
                    f"{path}, row {row} (from 0) has no text in column `{self.column}`",
                    "mend that row, or leave it out",
                )
            if self.tidy or self.lowercase:
                text = clean(text, self.lowercase) if self.tidy else text.lower()
            yield text


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
        DataError: it is no local data set, or has no column of texts.
    """
    what = f"the train split of {source.name}"
    files = tuple(source.files.get(split, ()))
    if not files:
        raise DataError(
            f"streaming reads local files, and {source.name} is none",
            "download it and give the folder: hf download --repo-type dataset NAME --local-dir FOLDER",
        )
    options = Options(config.encoding, config.separator, config.quoting)
    features = features_of(files[0], options, SAMPLE)
    chat = choose_chat(columns.conversations(features), what)
    column = chat or columns.choose_column(config.text_column, columns.TEXT_NAMES, features, "text_column", what)
    if not chat:
        columns.check_text(features, column, "train")
    return Shards(files, column, options, chat is not None, bool(config.clean_text), config.lowercase)
