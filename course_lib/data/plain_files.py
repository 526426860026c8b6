"""Files of text, compressed or not and in any encoding, as lines and as rows: CSV, TSV, JSON, plain text."""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from course_lib.errors import DataError, nearest

Row = dict[str, Any]

OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: pa.CompressedInputStream(str(path), "zstd"),
}
"""Openers of compressed files by last suffix; the one before says what is in them."""

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order marks that files begin with; UTF-32's first, as UTF-16's is the beginning of one of them."""

SEPARATORS = {",": ",", ";": ";", "|": "|", "tab": "\t"}
"""What separates the columns, by the name that ``--separator`` gives it."""

QUOTINGS: dict[str | None, dict[str, Any]] = {
    None: {},
    "minimal": {},
    "none": {"quoting": csv.QUOTE_NONE},
    "escaped": {"escapechar": "\\"},
}
"""Options of Python's csv reader, by the name that ``--quoting`` gives them."""

HEADERS = 100
"""Rows of a CSV file that have to agree on its columns."""

LOOKED_AT = 10_000
"""Lines of plain text, among which a blank one separates paragraphs."""

csv.field_size_limit(1 << 26)  # characters; beyond it a quote that opens a text is taken for a mistake


def contents(path: Path) -> str:
    """SHA-256 sum of a file: what a cache of something made of it is filed under."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_lines(path: Path, encoding: str | None = None) -> Iterator[str]:
    """The lines of a text file with their ends, which are ``\\n``, ``\\r\\n`` or ``\\r``; without a byte-order mark.

    Args:
        path: of the file, which may be compressed.
        encoding: as the user names it; default: what its byte-order mark says, else UTF-8.
    Raises:
        DataError: there is no such encoding, or the file is not in it.
    """
    opener = OPENERS.get(path.suffix.lower(), lambda path: path.open("rb"))
    with opener(path) as file:
        head = file.read(4)
    used = encoding or next((name for mark, name in MARKS.items() if head.startswith(mark)), "utf-8-sig")
    try:
        with opener(path) as file, io.TextIOWrapper(file, used, newline="") as text:
            yield from text
    except LookupError:
        known = ("utf-8", "utf-16", "cp1252", "latin-1", "cp1250", "cp1251")
        raise DataError(f"there is no encoding `{encoding}`", nearest(used, known)) from None
    except UnicodeError as error:
        if used != "utf-8-sig":
            raise DataError(f"{path} is not {used} ({error})", "name another with --encoding") from None
        raise DataError(f"{path} is not UTF-8", _how_to_read(error)) from None


def refuse_pointer(path: Path) -> None:
    """Refuse what a clone of a repository holds in place of a large file.

    Raises:
        DataError: it is that.
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{path} is a Git LFS pointer, not the data", "run `git lfs pull` where it was cloned")


def _how_to_read(error: UnicodeError) -> str:
    """Way out for text that is not UTF-8: encodings that it may be in, and what stands there in each.

    No program can tell Western from Central European text for sure; whoever knows the language sees it.
    """
    from charset_normalizer import from_bytes

    assert isinstance(error, UnicodeDecodeError)
    best = from_bytes(error.object).best()
    there = error.object[max(0, error.start - 10) : error.start + 10]
    names = dict.fromkeys(["cp1252", *([best.encoding] if best else [])])
    shown = " or ".join(f"{name} (it has `{' '.join(there.decode(name, 'replace').split())}`)" for name in names)
    return f"give --encoding {shown}"


def read_rows(
    path: Path, kind: str, encoding: str | None = None, separator: str | None = None, quoting: str | None = None
) -> Iterator[Row]:
    """The rows of a file, by column; one line, or a batch of them, is held at a time.

    Of CSV and TSV every value is text. A blank line separates the examples of plain text where the first lines have
    any; else each line is one; both keep their line ends. A JSON file that has not an object on each line is held
    whole.

    Args:
        path: of the file.
        kind: `csv`, `tsv`, `json` or `text`.
        encoding: see :func:`read_lines`.
        separator: of CSV, a name in :data:`SEPARATORS`; default: the one that is held.
        quoting: of CSV and TSV, a name in :data:`QUOTINGS`.
    Raises:
        DataError: a line or a row is something else; it is named.
    """
    if kind == "text":
        paragraphs = has_gap(itertools.islice(read_lines(path, encoding), LOOKED_AT))
        return ({"text": text} for text in texts(read_lines(path, encoding), paragraphs))
    if kind == "json":
        return _of_json(path, encoding)
    return _of_delimited(path, encoding, "tab" if kind == "tsv" else separator, quoting)


def has_gap(lines: Iterable[str]) -> bool:
    """Whether a blank line is between two others."""
    begun = gap = False
    for line in lines:
        blank = not line.strip()
        if gap and not blank:
            return True
        gap = begun and blank
        begun |= not blank
    return False


def texts(lines: Iterable[str], paragraphs: bool) -> Iterator[str]:
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


def _of_delimited(path: Path, encoding: str | None, separator: str | None, quoting: str | None) -> Iterator[Row]:
    """The rows of a CSV or TSV file, strictly: each has as many fields as the header.

    In tab-separated files quotes are mostly characters of the texts; one that opens a text of several lines may have
    swallowed rows, and has to be named.
    """
    mark = SEPARATORS[separator] if separator else _separator(path, encoding, quoting)
    reader = csv.reader(read_lines(path, encoding), delimiter=mark, strict=True, **QUOTINGS[quoting])
    try:
        rows = (row for row in reader if row)
        names = [name.strip() or f"column {number}" for number, name in enumerate(next(rows, []), start=1)]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise DataError(f"{path} has two columns `{repeated}`", "rename one of them")
        for row in rows:
            if mark == "\t" and quoting is None and any("\n" in field or "\r" in field for field in row):
                raise csv.Error("a text in quotes begins in an earlier line")
            if len(row) != len(names):
                raise DataError(
                    f"{path}, line {reader.line_num}: it has {len(row)} field{'s' * (len(row) != 1)}, "
                    f"and the header {len(names)}",
                    "mend that line: texts with separators, quotes or line breaks stand in quotes, and a quote within "
                    "is doubled; above the header stands nothing",
                )
            yield dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num}: its quotes cannot be read ({error})",
            "mend that line, or say what quotes mean: --quoting none, they are characters of the texts; minimal, they "
            'enclose a text; escaped, and \\" is a quote within it',
        ) from None


def _separator(path: Path, encoding: str | None, quoting: str | None) -> str:
    """What separates the columns: the one by which all the first rows have as many as the header.

    `csv.Sniffer` counts characters, those within quoted texts too, and so takes letters of the texts for separators;
    here each candidate has to read the rows. Where none reads all of them, the one that gives the header most columns
    is taken, for the reader to say which row is wrong. A file of one column has a comma.
    """
    widths = dict[str, list[int]]()
    for name, separator in SEPARATORS.items():
        reader = csv.reader(read_lines(path, encoding), delimiter=separator, **QUOTINGS[quoting])
        widths[name] = [len(row) for row in itertools.islice((row for row in reader if row), HEADERS)] or [1]
    several = {name: counts for name, counts in widths.items() if counts[0] > 1}
    fitting = [name for name, counts in several.items() if len(set(counts)) == 1]
    if len(fitting) > 1:
        could = " or by ".join(f"`{name}`" for name in fitting)
        raise DataError(f"{path} could be separated by {could}", "say by which with --separator")
    return SEPARATORS[fitting[0] if fitting else max(several, key=lambda name: several[name][0], default=",")]


def _of_json(path: Path, encoding: str | None) -> Iterator[Row]:
    """The rows of an object per line; or of one document, a list of objects, columns, or a table within an object."""
    lines = ((number, line) for number, line in enumerate(read_lines(path, encoding), start=1) if line.strip())
    first, second = next(lines, None), next(lines, None)
    if first is None:
        return
    if _is_object(first[1]) and (second is not None or {".jsonl", ".ndjson"} & {*path.suffixes}):
        for number, line in itertools.chain([first], [second] if second else [], lines):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: it is no JSON ({error})", "give one object per line, or mend that line"
                ) from None
            yield _checked(path, f"line {number}", value)
        return
    try:
        value = json.loads("".join(read_lines(path, encoding)))
    except ValueError as error:
        raise DataError(f"{path} is no JSON ({error})", "give one object per line, or a list of objects") from None
    for number, row in enumerate(_table(value) if isinstance(value, dict) else value):
        yield _checked(path, f"row {number} (from 0)", row)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _checked(path: Path, where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, {where}: it is a {type(value).__name__}, not an object",
            'give one object per row, such as {"text": "…", "label": "…"}',
        )
    return value


def _table(value: dict[str, Any]) -> list[Row]:
    """The rows of an object: those of the one list of objects in it, or of its columns, as pandas writes them."""
    import pandas as pd

    tables = [rows for rows in value.values() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    return tables[0] if len(tables) == 1 else pd.DataFrame(value).to_dict("records")
