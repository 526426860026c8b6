"""In which encoding a text file is, and what separates the columns of a CSV file: found, or named by the user."""

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import datasets

from course_lib.data.cache import digest
from course_lib.errors import DataError, nearest
from course_lib.writing import written_beside

SEPARATORS = {",": ",", ";": ";", "|": "|", "tab": "\t"}
"""What separates the columns, by the name that ``--separator`` gives it."""

MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
         codecs.BOM_UTF16_BE: "utf-16"}
"""Byte-order marks that files begin with; UTF-32's first, as UTF-16's is the beginning of one of them."""

SAMPLE = 100_000
"""Bytes or characters of a file that are looked at: fewer than a field that Python's csv reader refuses."""

RECORDS = 100
"""Of a CSV file that have to agree on its columns."""


def as_utf8(path: Path, wanted: str | None = None) -> Path:
    """The file itself where it is UTF-8, else a copy in UTF-8 in the cache of data sets.

    Args:
        path: a text file.
        wanted: its encoding, as the user names it; default: what its byte-order mark says, else UTF-8.
    Raises:
        DataError: no such encoding, the file is not in it, or the copy cannot be written.
    """
    try:
        with path.open("rb") as file:
            encoding = wanted or by_mark(file.read(SAMPLE))
        if encoding is None or codecs.lookup(encoding).name == "utf-8":
            return path
        about = path.stat()
        key = digest(str(path.resolve()), about.st_mtime_ns, about.st_size, encoding)
        copy = Path(datasets.config.HF_DATASETS_CACHE) / "course" / "utf8" / key / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as file, written_beside(copy) as out:
                for piece in _decoded(file, encoding):
                    out.write(piece)
    except LookupError:
        raise DataError(f"there is no encoding `{wanted}`",
                        nearest(str(wanted), ("utf-8", "utf-16", "cp1252", "latin-1", "cp1250", "cp1251"))) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not {encoding} (byte {error.start})", "name another with --encoding") from None
    except OSError as error:
        raise DataError(f"cannot read {path} into the cache of data sets ({error.strerror})",
                        "set HF_DATASETS_CACHE to a folder that can be written and has room") from None
    return copy


def _decoded(file: BinaryIO, encoding: str) -> Iterator[str]:
    """The text of a file in pieces, for files that are larger than memory.

    Raises:
        UnicodeDecodeError: ``start`` counts from the beginning of the file.
    """
    decoder, begun = codecs.getincrementaldecoder(encoding)(), 0
    while True:
        kept, piece = len(decoder.getstate()[0]), file.read(SAMPLE)
        try:
            yield decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            error.start += begun - kept
            raise
        if not piece:
            return
        begun += len(piece)


def by_mark(head: bytes) -> str | None:
    """The encoding that the first bytes of a file declare, or show by their zeros; None for none."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    for start, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):  # letters of Latin text, two bytes each
        high = head[start:1000:2]
        if len(high) > 3 and high.count(0) > 0.9 * len(high):
            return encoding
    return None


def how_to_read(path: Path, offset: int) -> tuple[str, str]:
    """What a file that is not UTF-8 looks like, and what to do.

    Args:
        path: the file.
        offset: its first byte that is not UTF-8.
    """
    from charset_normalizer import from_bytes

    with path.open("rb") as file:
        file.seek(max(0, offset - SAMPLE // 2))
        best = from_bytes(file.read(SAMPLE)).best()
    if best is None:
        return "", "save it as UTF-8, or name its encoding with --encoding"
    alike = {best.encoding, *best.could_be_from_charset}  # that read the sample as the same text
    name = "cp1252" if "cp1252" in alike else codecs.lookup(best.encoding).name
    return f"; it looks like {name}", f"give --encoding {name}, and look at a few rows, or save it as UTF-8"


def separator_of(path: Path, wanted: str | None = None) -> str:
    """What separates the columns of a CSV file: the one by which all its first rows have as many as its header.

    `csv.Sniffer` counts characters, those within quoted texts too, and so takes letters of the texts for separators;
    here each candidate has to read the rows. Where none reads all of them, the one that gives the header most columns
    is taken, for the reader to say which row is wrong. A file of one column has a comma.

    Args:
        path: a UTF-8 file.
        wanted: a name in :data:`SEPARATORS`, which is then the answer.
    Raises:
        DataError: several would do.
    """
    if wanted:
        return SEPARATORS[wanted]
    with path.open(encoding="utf-8-sig", newline="") as file:
        text, rest = file.read(SAMPLE), file.read(1)
    widths: dict[str, list[int]] = {}
    for name, separator in SEPARATORS.items():
        records = [len(record) for record in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if record]
        widths[name] = (records[:-1] if rest and records[1:] else records)[:RECORDS]
    several = {name: columns for name, columns in widths.items() if columns and columns[0] > 1}
    fitting = [name for name, columns in several.items() if len(set(columns)) == 1]
    most = max((columns[0] for columns in several.values()), default=1)
    best = fitting or [name for name, columns in several.items() if columns[0] == most]
    if len(best) > 1:
        raise DataError(f"{path} could be separated by {_listed(best)}", "say by which with --separator")
    return SEPARATORS[best[0]] if best else ","


def _listed(names: Sequence[str]) -> str:
    return " or by ".join(f"`{name}`" for name in names)
