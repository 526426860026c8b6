"""Opens files of text, compressed or not and in any encoding, as lines; says what a file is that is none."""

import bz2
import codecs
import gzip
import hashlib
import lzma
import re
import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from course_lib.errors import DataError, nearest

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte-order marks that files begin with; UTF-32's first, as UTF-16's is the beginning of one of them."""

ASIAN = ("shift_jis", "euc_jp", "gb18030", "big5", "cp949", "euc_kr", "johab")
"""Encodings of several bytes per character, which are taken for one another where there are few of them."""

ASCII_LETTER, BEYOND_ASCII = re.compile(rb"[A-Za-z]"), re.compile(rb"[\x80-\xff]")
"""Bytes of which Latin text has many and few."""

PIECE = 1 << 20
"""Bytes of a file that are read at a time."""

SAMPLE = 100_000
"""Bytes that are looked at to tell an encoding."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes of compressed files, after the one that says what is in them."""

NO_TEXT = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"SQLite format 3": "an SQLite database",
    b"%PDF": "PDF",
    b"version https://git-lfs": "a Git LFS pointer, not the data: run `git lfs pull` where it was cloned",
    **dict.fromkeys((b"<!DOCTYPE html", b"<!doctype html", b"<html"), "a web page, perhaps an error that was saved"),
    b"\x80\x04\x95": "a Python pickle",
    b"\x89HDF": "HDF5",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x93NUMPY": "a NumPy array",
    b"Obj\x01": "Avro",
}
"""What a file is that begins with some bytes, where that is no text."""

LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)")


def contents(path: Path) -> str:
    """SHA-256 sum of a file: what a cache of something made of it is filed under."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inner_name(path: Path) -> str:
    """A file's name without the suffix of its compression; for a zip archive that of the one file in it.

    Raises:
        DataError: a zip archive of none or of several files, or damaged.
    """
    if path.suffix.lower() != ".zip":
        return path.stem if path.suffix.lower() in COMPRESSED else path.name
    try:
        with zipfile.ZipFile(path) as archive:
            return Path(_member(archive, path).filename).name
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise DataError(f"{path} is no zip archive ({error})", "copy or download it again") from None


def _member(archive: zipfile.ZipFile, path: Path) -> zipfile.ZipInfo:
    members = [one for one in archive.infolist() if not one.is_dir() and not one.filename.startswith("__MACOSX/")]
    if len(members) != 1:
        raise DataError(f"{path} holds {len(members)} files", "unzip it into a folder, and give that, or a file of it")
    return members[0]


def open_plain(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed where its first ones say that it is compressed."""
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if head.startswith(b"\xfd7zXZ"):
        return cast(BinaryIO, lzma.open(path))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return cast(BinaryIO, pa.CompressedInputStream(str(path), "zstd"))
    if head.startswith(b"PK\x03\x04") and path.suffix.lower() == ".zip":
        archive = zipfile.ZipFile(path)
        return cast(BinaryIO, archive.open(_member(archive, path)))
    return path.open("rb")


def read_lines(path: Path, wanted: str | None = None) -> Iterator[str]:
    """The lines of a text file with their ends, which are ``\\n``, ``\\r\\n`` or ``\\r``; without a byte-order mark.

    Args:
        path: of the file, which may be compressed.
        wanted: its encoding, as the user names it; default: what its byte-order mark says, else UTF-8.
    Raises:
        DataError: it is empty or no text, there is no such encoding, or the file is not in it.
    """
    waiting: list[str] = []  # of a line that goes on
    for piece in _decoded(path, wanted):
        waiting.append(piece)
        if "\n" not in piece and "\r" not in piece and not waiting[0].endswith("\r"):
            continue
        rest, end = "".join(waiting), 0
        for line in LINE.finditer(rest):
            if line.end() == len(rest) and rest.endswith("\r"):
                break  # the other half of the line's end may be in the next piece
            yield line[0]
            end = line.end()
        waiting = [rest[end:]]
    if rest := "".join(waiting):
        yield rest


def _decoded(path: Path, wanted: str | None) -> Iterator[str]:
    """The text of a file in pieces, for files that are larger than memory."""
    try:
        with open_plain(path) as file:
            piece = file.read(PIECE)
            refuse_what_it_is(path, piece)
            encoding = wanted or by_mark(piece) or "utf-8"
            "".encode(encoding)  # no text is written in base64 and the like
            decoder, begun = codecs.getincrementaldecoder(encoding)(), 0
            while True:
                kept = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(piece, final=not piece)
                except UnicodeDecodeError as error:
                    error.start += begun - kept
                    raise
                yield text.removeprefix("\ufeff") if not begun else text
                if not piece:
                    return
                begun += len(piece)
                piece = file.read(PIECE)
    except LookupError:
        raise DataError(
            f"there is no encoding `{wanted}`",
            nearest(str(wanted), ("utf-8", "utf-16", "cp1252", "latin-1", "cp1250", "cp1251")),
        ) from None
    except UnicodeDecodeError as error:
        if wanted or encoding != "utf-8":
            raise DataError(f"{path} is not {encoding} (byte {error.start})", "name another with --encoding") from None
        raise DataError(f"{path} is not UTF-8 (byte {error.start})", how_to_read(path, error.start)) from None
    except UnicodeError as error:  # UTF-16 without a mark says so
        raise DataError(f"{path} is not {encoding} ({error})", "name another with --encoding") from None


def refuse_what_it_is(path: Path, head: bytes, known: Sequence[str] = ()) -> None:
    """Say what a file is that is no text, by its first bytes.

    Args:
        path: for the error.
        head: of its bytes.
        known: kinds that are expected, in small letters.
    Raises:
        DataError: it is one, or it is empty.
    """
    if not head:
        raise DataError(f"{path} is empty", "give a file with at least one row")
    if head.startswith(b"PK\x03\x04"):
        what = "a spreadsheet or another zip archive"
    else:
        what = next((what for start, what in NO_TEXT.items() if head.startswith(start)), "")
    if what and what.lower() not in known:
        raise DataError(
            f"{path} is {what.partition(': ')[0]}",
            what.partition(": ")[2] or "name it by its own suffix, or save it as CSV, JSON or Parquet",
        )


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


def how_to_read(path: Path, offset: int) -> str:
    """Way out for a file that is not UTF-8: the encodings that it may be in, with a word of it as each has it.

    No program can tell Western from Central European text for sure; whoever knows the language sees it by one word.

    Args:
        path: the file.
        offset: its first byte that is not UTF-8.
    """
    from charset_normalizer import from_bytes

    with open_plain(path) as file:
        for _ in range(max(0, offset - SAMPLE // 2) // PIECE):
            file.read(PIECE)
        head = file.read(max(0, offset - SAMPLE // 2) % PIECE + SAMPLE)[-SAMPLE:]
    best = from_bytes(head).best()
    names = [codecs.lookup(best.encoding).name] if best else []
    is_sparse = len(ASCII_LETTER.findall(head)) > 2 * len(BEYOND_ASCII.findall(head))
    if best and best.encoding in ASIAN and not is_sparse:
        names += [name for name in ASIAN if _as(head, name) is not None]
    western = _as(head, "cp1252")
    if western is not None and (best is None or is_sparse or _is_latin(str(best))):
        # Symbols within words are letters of another page of codes.
        likely = not re.search(r"[a-zß-ÿ][¡-¿×÷][a-zß-ÿ]", western)
        names = ["cp1252", *names] if likely else [*names, "cp1252"]
    words = {name: _first_word(head, name) for name in dict.fromkeys(names)}
    readings = {word: name for name, word in reversed(words.items()) if word}  # alike: the first name
    if not readings:
        return "save it as UTF-8, or name its encoding with --encoding"
    ways = [(name, word) for word, name in reversed(readings.items())]
    shown = ", ".join(f"`{word}` as {name}" for name, word in ways)
    which = "that word is right" if len(ways) == 1 else "the word is right"
    return f"it has {shown}; if {which}, give --encoding {' or '.join(name for name, _ in ways)}"


def _as(head: bytes, encoding: str) -> str | None:
    """The beginning of a text; None where it is in another encoding. Its last character may be cut off."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _is_latin(text: str) -> bool:
    """Whether the letters beyond ASCII are mostly of the Latin alphabet, or there are none."""
    letters = [letter for letter in text if letter > "\x7f" and letter.isalpha()]
    latin = sum(unicodedata.name(letter, "").startswith(("LATIN", "FEMININE", "MASCULINE")) for letter in letters)
    return latin >= len(letters) / 2


def _first_word(head: bytes, encoding: str) -> str:
    """The first word that is not ASCII, as an encoding has it."""
    text = _as(head, encoding) or head.decode(encoding, "ignore")
    word = re.search(r"[^\W\d_]*[^\W\d_\x00-\x7f][^\W\d_]*", text) or re.search(r"\S*[^\s\x00-\x7f]\S*", text)
    return word[0][:30] if word else ""
