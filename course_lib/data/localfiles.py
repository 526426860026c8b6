"""Data sets in local files: CSV, TSV, JSON, JSON lines, Parquet, plain text, and folders of them."""

import codecs
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import datasets
import pandas as pd
from datasets.utils import logging

from course_lib.data.cache import RECORD_BYTES, RECORD_ROWS, progress_bars
from course_lib.data.delimited import as_utf8, how_to_read, separator_of
from course_lib.data.parquet import read_parquet
from course_lib.errors import DataError

KINDS = {".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet",
         ".txt": "text"}
"""How a file is read, by its suffix."""

BAR_BYTES = 10_000_000
"""Size above which reading is long enough for a progress bar."""

NULL_IN_A_LIST = re.compile(rb"[\[,]\s*null\s*[,\]]")

SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def find_splits(path: Path) -> dict[str, list[Path]]:
    """Files of each split: one file is the split `train`; in a folder, each file is the split that it is named after.

    ``train-00000-of-00002.parquet`` is a part of the split `train`.

    Raises:
        DataError: there is no file of a known kind, or a split stands there in several kinds.
    """
    if path.is_file():
        if path.suffix.lower() not in KINDS:
            raise DataError(f"{path} is of an unknown kind", f"give {', '.join(KINDS)} or a folder of such files")
        return {"train": [path]}
    splits: dict[str, list[Path]] = {}
    for file in sorted(path.iterdir()):
        if file.is_file() and file.suffix.lower() in KINDS and not file.name.startswith("."):
            splits.setdefault(SHARD.sub("", file.stem), []).append(file)
    if not splits:
        raise DataError(f"folder {path} holds no data",
                        f"it needs train, validation and test files ({', '.join(KINDS)})")
    for split, files in splits.items():
        if len({file.suffix.lower() for file in files}) > 1:
            raise DataError(f"folder {path} holds the split `{split}` more than once "
                            f"({', '.join(file.name for file in files)})", "keep one of them")
    return splits


def read_split(files: Sequence[Path], encoding: str | None = None, separator: str | None = None) -> datasets.Dataset:
    """The rows of files of one kind, memory-mapped from the cache of `datasets`.

    Of CSV and TSV every column is read as text. A blank line separates the examples of plain text where it has any;
    else each line is one.

    Args:
        files: of one kind.
        encoding: of text; default: what a byte-order mark says, else UTF-8.
        separator: of CSV, a name in :data:`course_lib.data.delimited.SEPARATORS`; default: the one that is found.
    Raises:
        DataError: a file is empty, in another encoding, or cannot be read as its kind.
    """
    kind, shown = KINDS[files[0].suffix.lower()], str(files[0])
    if len(files) > 1:
        shown += f" (or one of {len(files) - 1} beside it)"
    large = sum(file.stat().st_size for file in files) > BAR_BYTES
    with _reading(shown, kind), progress_bars(large):
        if kind == "parquet":
            return read_parquet(files)
        files = [as_utf8(file, encoding) for file in files]
        has_blank_line = [check_text(file) for file in files]
        paths = list(map(str, files))
        if kind == "json":
            for file in files:
                check_rows(file)
            return datasets.Dataset.from_json(paths, writer_batch_size=RECORD_ROWS)
        if kind == "text":
            return datasets.Dataset.from_text(paths, encoding="utf-8-sig", chunksize=RECORD_BYTES,
                                              writer_batch_size=RECORD_ROWS,
                                              sample_by="paragraph" if any(has_blank_line) else "line")
        between = separator_of(files[0], "tab" if kind == "tsv" else separator)
        columns = _header(files[0], between)
        features = datasets.Features({column: datasets.Value("string") for column in columns})
        return datasets.Dataset.from_csv(paths, features=features, sep=between, keep_default_na=False, na_values=[""],
                                         writer_batch_size=RECORD_ROWS)


@contextlib.contextmanager
def _reading(shown: str, kind: str) -> Iterator[None]:
    """Turn whatever a file makes of its reader into one clear line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # `datasets` logs what it then raises
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno:
            raise DataError(f"cannot read {shown} into the cache of data sets ({cause})",
                            "set HF_DATASETS_CACHE to a folder that can be written and has room") from error
        if "corresponds to no data" in str(cause):
            raise DataError(f"{shown} has no rows", "give a file with at least one row") from error
        raise DataError(f"{shown} cannot be read as {kind} ({first_line(cause)})",
                        "mend the file, or give another kind") from error
    finally:
        logging.set_verbosity(verbosity)


def check_text(path: Path) -> bool:
    """Check that a file is UTF-8 and not empty; return whether there is a blank line between two others.

    Raises:
        DataError: it is not, or it cannot be opened.
    """
    offset, begun, gap, between = 0, False, False, False
    try:
        with path.open("rb") as file:
            # A line at a time: a newline is never a part of a longer character.
            for line in file:
                line.decode("utf-8")
                offset += len(line)
                blank = not line.strip(b"\r\n")
                between |= gap and not blank
                begun |= not blank
                gap = begun and blank
    except UnicodeDecodeError as error:
        looks, instead = how_to_read(path, offset + error.start)
        raise DataError(f"{path} is not UTF-8 (byte {offset + error.start}){looks}", instead) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not offset:
        raise DataError(f"{path} is empty", "give a file with at least one row")
    return between


def check_rows(path: Path) -> None:
    """Refuse a row that is ``null``, on which pyarrow's reader of JSON may end the process with a segmentation fault.

    Raises:
        DataError: there is one; the first is named.
    """
    with path.open("rb") as file:
        lines = ((number, line.removeprefix(codecs.BOM_UTF8).strip()) for number, line in enumerate(file))
        first = next((line for _, line in lines if line), b"")
        if first.startswith(b"["):
            file.seek(0)
            content = file.read().removeprefix(codecs.BOM_UTF8)
            rows = json.loads(content) if NULL_IN_A_LIST.search(content) else []
            where = next((f"row {number}" for number, row in enumerate(rows) if row is None), "")
        elif first.startswith(b"null"):
            where = "row 0"
        elif first.endswith(b"}"):  # else an object over several lines, where `null` may stand in a list
            where = next((f"line {number}" for number, line in lines if line.startswith(b"null")), "")
        else:
            where = ""
    if where:
        raise DataError(f"{where} (from 0) of {path} is null, not an object", "leave such rows out")


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _header(path: Path, separator: str) -> list[str]:
    """Column names of a CSV file whose first rows have no more fields than its header."""
    first = pd.read_csv(path, sep=separator, dtype=str, nrows=100)
    if not isinstance(first.index, pd.RangeIndex):  # pandas takes the first of too many fields for row names
        raise DataError(f"{path}: rows have more fields than the header names", "put texts with separators in quotes")
    return list(first.columns)
