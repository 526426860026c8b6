"""Data sets in local files: CSV, TSV, JSON, JSON lines, Parquet, Arrow, plain text, compressed or not, and folders."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow as pa
from datasets.utils import logging

from course_lib.data import json_rows, parquet
from course_lib.data.arrow_types import way_out
from course_lib.data.cache import RECORD_BYTES, RECORD_ROWS
from course_lib.data.delimited import Ambiguous, Delimited, Rows, same_header
from course_lib.data.plain_files import COMPRESSED, contents, inner_name, read_lines, refuse_what_it_is
from course_lib.data.tables import NO_ROWS, Raw, Table, cached_table
from course_lib.errors import DataError

KINDS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".json": "json", ".jsonl": "json", ".ndjson": "json",
         ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".txt": "text"}
"""How a file is read, by its suffix."""

T = TypeVar("T")

BINARY = ("parquet", "arrow")

CONVERTED = {
    (".xlsx", ".xls", ".xlsm", ".ods"): "pandas.read_excel({path!r}).to_csv({new!r}, index=False)",
    (".pkl", ".pickle"): "pandas.read_pickle({path!r}).to_parquet({new!r})",
    (".orc",): "pandas.read_orc({path!r}).to_parquet({new!r})",
    (".h5", ".hdf5"): "pandas.read_hdf({path!r}).to_parquet({new!r})",
    (".dta",): "pandas.read_stata({path!r}).to_parquet({new!r})",
    (".sav",): "pandas.read_spss({path!r}).to_parquet({new!r})",
    (".sas7bdat", ".xpt"): "pandas.read_sas({path!r}).to_parquet({new!r})",
    (".xml",): "pandas.read_xml({path!r}).to_parquet({new!r})",
    (".html", ".htm"): "pandas.read_html({path!r})[0].to_parquet({new!r})",
    (".db", ".sqlite", ".sqlite3"): "pandas.read_sql('SELECT …', sqlite3.connect({path!r})).to_parquet({new!r})",
    (".npz", ".npy"): "pandas.DataFrame({{name: numpy.load({path!r})[name] …}}).to_parquet({new!r})",
    (".tar", ".tgz", ".7z", ".rar"): "",
}
"""The line that makes a file of ours of one of another kind, by its suffix; none: it has to be unpacked."""

SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]{8,})?$")
"""Part of a split, as the Hub names it: with a sum of its contents, or without."""

SAVED = ("dataset_dict.json", "state.json")
"""Of one of these a folder has one that ``save_to_disk`` has written."""


@dataclass(frozen=True)
class Options:
    """How local files of text are read, as the user says; None: as they show.

    Attributes:
        encoding: of text.
        separator: of CSV, a name in :data:`course_lib.data.delimited.SEPARATORS`.
        quoting: of CSV and TSV, a name in :data:`course_lib.data.delimited.QUOTINGS`.
    """

    encoding: str | None = None
    separator: str | None = None
    quoting: str | None = None


def kind_of(path: Path) -> str | None:
    """How a file is read; None for files that are not."""
    if path.suffix.lower() == ".zip":
        return KINDS.get(Path(inner_name(path)).suffix.lower())
    return kind_of_name(path)


def kind_of_name(path: Path) -> str | None:
    """How a file of such a name would be read, which need not be there; a zip archive may hold any kind."""
    suffix = path.suffix.lower()
    return KINDS.get(Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix)


def looks_local(name: str) -> bool:
    """Whether a name that nothing has is that of a file or folder, and not of a data set on the Hub."""
    suffix = Path(name).suffix.lower()
    foreign = any(suffix in suffixes for suffixes in CONVERTED)
    return (kind_of_name(Path(name)) is not None or suffix in COMPRESSED or foreign or name.startswith((".", "/", "~"))
            or name.count("/") > 1)


def find_splits(path: Path, configuration: str | None = None) -> dict[str, list[Path]]:
    """Files of each split: one file is the split `train`; in a folder, each file is the split that it is named after.

    ``train-00000-of-00002.parquet`` is a part of the split `train`. A folder with data in folders of its own, or with a
    README that says where, is taken for a clone of a data set on the Hub, and read as that.

    Args:
        path: a file or a folder.
        configuration: of a clone that has several.
    Raises:
        DataError: there is no file of a known kind, or a split stands there in several kinds.
    """
    if path.is_file():
        if kind_of(path) is None:
            raise unknown_kind(path)
        return {"train": [path]}
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder", "give one of the two")
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    splits: dict[str, list[Path]] = {}
    for file in entries:
        if file.is_file() and not file.name.startswith(".") and kind_of_name(file):
            stem = file.name.partition(".")[0] if file.suffix.lower() in COMPRESSED else file.stem
            splits.setdefault(SHARD.sub("", stem), []).append(file)
    if configuration or _says_where(path / "README.md") or (not splits and any(entry.is_dir() for entry in entries)):
        splits = _of_clone(path, configuration) or splits
    if not splits:
        other = next((file for file in entries if any(file.suffix.lower() in suffixes for suffixes in CONVERTED)), None)
        if other is not None:
            raise unknown_kind(other)
        raise DataError(f"folder {path} holds no data",
                        f"it needs train, validation and test files ({', '.join(KINDS)})")
    for split, files in splits.items():
        if len({kind_of(file) for file in files}) > 1:
            raise DataError(f"folder {path} holds the split `{split}` more than once "
                            f"({', '.join(file.name for file in files)})", "keep one of them")
    return splits


def unknown_kind(path: Path) -> DataError:
    """What to do about a file of another kind."""
    line = next((line for suffixes, line in CONVERTED.items() if path.suffix.lower() in suffixes), None)
    if line == "":
        return DataError(f"{path} is an archive", "unpack it, and give the folder or a file of it")
    suffix = ".csv" if line and "to_csv" in line else ".parquet"
    return DataError(f"{path} is of a kind that is not read here" if line else f"{path} is of an unknown kind",
                     f"convert it: {line.format(path=str(path), new=str(path.with_suffix(suffix)))}" if line
                     else f"give {', '.join(KINDS)} or a folder of such files")


def _says_where(readme: Path) -> bool:
    """Whether a data set's card names its files."""
    if not readme.is_file():
        return False
    head = readme.read_text(encoding="utf-8", errors="replace")
    return head.startswith("---") and re.search(r"^configs:", head.partition("\n---")[0], re.MULTILINE) is not None


def _of_clone(path: Path, configuration: str | None) -> dict[str, list[Path]]:
    """The files of each split of a folder that is laid out as data sets on the Hub are."""
    with quiet():
        try:
            builder = datasets.load_dataset_builder(str(path), configuration)
        except Exception as error:  # whatever a foreign folder makes of its reader is that folder's fault
            listed = re.search(r"\[.*\]", str(error))
            if "onfig" in str(error) and listed:
                raise DataError(f"{path} has the configurations {listed[0]}",
                                "choose one with --dataset_config") from error
            return {}
    files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
    return {str(split): [Path(file) for file in listed] for split, listed in files.items()}


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` has written a folder."""
    return any((path / name).is_file() for name in SAVED)


def load_saved(path: Path) -> Mapping[str, datasets.Dataset]:
    """The splits of a folder that ``save_to_disk`` has written; one data set alone is the split `train`.

    Raises:
        DataError: it cannot be read.
    """
    with reading(str(path), "a folder of save_to_disk"):
        loaded = datasets.load_from_disk(str(path))
        return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


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
        return cached_table(parts, lambda: READERS[kind](files, options))


def _of_parquet(files: Sequence[Path], options: Options) -> Table:
    return parquet.table_of(files)


def _of_text(files: Sequence[Path], options: Options) -> Table:
    paragraphs = any(has_gap(read_lines(file, options.encoding)) for file in files)

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        rows = itertools.chain.from_iterable(
            texts(read_lines(file, options.encoding), paragraphs) for file in files)
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
    kept = {name: kind for name, kind in types.items() if isinstance(kind, pa.DataType)}

    def batches() -> Iterator[Mapping[str, pa.Array]]:
        for file in files:
            begun = 0
            for rows in _in_batches(json_rows.read_rows(file, options.encoding), lambda row: len(str(row))):
                try:
                    yield json_rows.arrays(rows, kept)
                except UnicodeEncodeError:
                    where = next(number for number, row in enumerate(rows) if _is_halved(row))
                    raise DataError(f"{file} has half of a surrogate pair in row {begun + where} (from 0), which is no "
                                    "character", "mend that row, or leave it out") from None
                begun += len(rows)

    shapes = {"lists": pa.list_(pa.null()), "objects": pa.struct([])}
    return Table(types, batches, way_out={
        name: way_out(shapes[str(kind)], name) if str(kind) in shapes else "write all its values alike"
        for name, kind in types.items()})


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
                    yield {name: pa.array(values, pa.string())
                           for name, values in zip(names, zip(*some, strict=True), strict=True)}
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
    "parquet": _of_parquet, "arrow": _of_parquet, "text": _of_text, "json": _of_json, "csv": _of_delimited,
    "tsv": lambda files, options: _of_delimited(files, options, "tab"),
}
"""What reads files, by their kind."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that `datasets` logs, for the block."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # `datasets` logs what it then raises
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def reading(shown: str, kind: str) -> Iterator[None]:
    """Turn whatever a file makes of its reader into one clear line."""
    with quiet():
        try:
            yield
        except DataError as error:
            if error.what == NO_ROWS:
                raise DataError(f"{shown} has no rows", error.instead) from None
            if shown.partition(" (or")[0] in error.what:
                raise
            raise DataError(f"{shown}: {error.what}", error.instead) from None
        except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"cannot read {error.filename or shown}: {error.strerror}") from None
        except Exception as error:
            raise DataError(f"{shown} cannot be read as {kind} ({first_line(error)})",
                            "is it whole? Copy or download it again, or write it anew") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
