"""Reads CSV and TSV files as RFC 4180 has them; refuses what that leaves open, with the line and what settles it."""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from course_lib.data import plain_files
from course_lib.errors import DataError

SEPARATORS = {",": ",", ";": ";", "|": "|", "tab": "\t"}
"""What separates the columns, by the name that ``--separator`` gives it."""

QUOTINGS = {
    "none": "quotes are characters of the texts",
    "minimal": 'they enclose a field, "" within it is a quote, and all others are characters',
    "escaped": 'they enclose a field, \\" within it is a quote, and all others are characters',
}
"""What quotes mean, by the name that ``--quoting`` gives it."""

SAMPLE = 100_000
"""Characters of a file that are looked at for a separator: fewer than a field that Python's csv reader refuses."""

LONGEST = 1 << 26
"""Characters of a quoted text, beyond which a quote that opens it is taken for a mistake."""

RECORDS = 100
"""Of a CSV file that have to agree on its columns."""

EXCELS_FIRST_LINE = re.compile(r'"?sep=(.)"?[\r\n]*')
COMMENT = ("#", "//", "%")


class Ambiguous(Exception):
    """A line that RFC 4180 does not allow, or that can be read in several ways."""

    def __init__(self, line: int, what: str):
        super().__init__(what)
        self.line, self.what = line, what


@dataclass
class Rows:
    """The rows of a file, checked while they are read; the first is the header.

    Args:
        lines: physical ones, with their ends.
        separator: a character.
        quoting: a name in :data:`QUOTINGS`; None for RFC 4180 and nothing else.
    Attributes:
        spanning: rows that span lines; the first of them is ``first_spanning``, by its physical lines from 1.
    """

    lines: Iterable[str]
    separator: str
    quoting: str | None = None
    skipped: int = 0
    spanning: int = 0
    first_spanning: tuple[int, int] = (0, 0)
    _width: int = 0
    _quoted_at: int = 0
    _bare_at: int = 0
    _header_is_quoted: bool = False
    _each_line_is_a_row: bool = True
    _field: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        separator, blanks = re.escape(self.separator), "[ ]*" if self.quoting else ""
        inside = r'(?:[^"\\]|\\.|"")*+' if self.quoting == "escaped" else r'(?:[^"]|"")*+'
        bare = rf'(?!{blanks}")[^{separator}\r\n]*+'
        self._field = re.compile(rf'(?:{blanks}"({inside})"{blanks}|({bare}))({separator}|\r\n?|\n|\Z)', re.DOTALL)
        self._open = re.compile(rf'{blanks}"{inside}\\?\Z', re.DOTALL)

    def __iter__(self) -> Iterator[list[str]]:
        """Each row's fields.

        Raises:
            Ambiguous: see the class.
        """
        lines, header = enumerate(self.lines, start=self.skipped + 1), list[str]()
        for number, line in lines:
            if not line.strip("\r\n"):
                continue
            if self.quoting == "none" or '"' not in line:
                fields = line.rstrip("\r\n").split(self.separator)
            else:
                fields, last = self._quoted(number, line, lines)
                if last > number:
                    self.first_spanning = self.first_spanning if self.spanning else (number, last)
                    self.spanning += 1
            self._width = self._width or len(fields)
            if len(fields) != self._width:
                raise Ambiguous(
                    number, f"has {len(fields)} field{'s' * (len(fields) != 1)}, and the header {self._width}"
                )
            if fields == header and self._width > 1:
                raise DataError(
                    f"line {number} is line {self.skipped + 1} again",
                    "where that is the header, files were joined: delete such lines; where it is a row, "
                    "put a header above it",
                )
            header = header or fields
            yield fields
        if self.spanning and self.quoting is None and self._width > 1 and self._each_line_is_a_row:
            first, last = self.first_spanning
            raise Ambiguous(
                first,
                f"begins a quoted text that ends in line {last}, and each of these lines could be a row of its own",
            )

    def _quoted(self, number: int, line: str, lines: Iterator[tuple[int, str]]) -> tuple[list[str], int]:
        """The fields of a row with quotes in it, and the number of its last line."""
        fields, place, begun, last = list[str](), 0, number, number
        self._count(line)
        while True:
            match = self._field.match(line, place)
            if match is None and self._open.match(line, place):
                last, rest = self._up_to_a_quote(begun, lines)
                line += rest
                if len(line) > LONGEST:
                    raise Ambiguous(begun, f"begins a quoted text of more than {LONGEST >> 20} million characters")
                continue
            if match is None:
                raise Ambiguous(last, "has something else than a separator after a closing quote")
            quoted, bare, end = match.groups()
            if self.quoting is None:
                self._check(number, quoted, bare)
            fields.append(self._unquoted(quoted) if bare is None else bare)
            if end != self.separator:
                return fields, last
            place = match.end()

    def _up_to_a_quote(self, begun: int, lines: Iterator[tuple[int, str]]) -> tuple[int, str]:
        """The lines that follow, up to one with a quote, and the number of that one."""
        if self.separator == "\t" and self.quoting is None and next(lines, None):
            raise Ambiguous(
                begun, "begins a quoted text that goes on in the next line, as tab-separated files seldom mean it"
            )
        parts, size = list[str](), 0
        for number, line in lines:
            self._count(line)
            parts.append(line)
            size += len(line)
            if '"' in line or size > LONGEST:
                return number, "".join(parts)
        raise Ambiguous(begun, "begins a quoted text that has no end")

    def _count(self, line: str) -> None:
        """Note whether a physical line alone would be a row if quotes meant nothing."""
        self._each_line_is_a_row &= not self._width or line.count(self.separator) == self._width - 1

    def _unquoted(self, text: str) -> str:
        text = (
            text.replace('""', '"')
            if self.quoting != "escaped"
            else re.sub(r'\\(["\\])|""', lambda match: match[1] or '"', text)
        )
        return text

    def _check(self, number: int, quoted: str | None, bare: str | None) -> None:
        """Refuse a field that other readers read otherwise."""
        if bare is not None:
            if '"' not in bare:
                return
            if bare.lstrip(" \t").startswith('"'):
                raise Ambiguous(number, "has a blank before an opening quote")
            self._bare_at = self._bare_at or number
        else:
            assert quoted is not None
            if '\\""' in quoted or quoted.endswith("\\"):
                raise Ambiguous(number, "has a backslash before a quote")
            self._quoted_at = self._quoted_at or number
            if not self._width:
                self._header_is_quoted = True
            elif self.separator == "\t" and not self._header_is_quoted and not re.search('["\t\r\n]', quoted):
                raise Ambiguous(number, "has quotes around a text that needs none, so they may be part of it")
        if self._bare_at and self._quoted_at:
            raise Ambiguous(
                self._bare_at,
                f"has a quote within a text that is in no quotes, and line {self._quoted_at} a text that is",
            )


@dataclass(frozen=True)
class Form:
    """Form of a file's rows.

    Attributes:
        separator: a character.
        skipped: lines before the header: one, where the first names the separator, as Excel's ``sep=;`` does.
    """

    separator: str
    skipped: int = 0


def form_of(path: Path, lines: Iterable[str], separator: str | None, quoting: str | None) -> Form:
    """Form of a file's rows.

    Args:
        path: of the file, for the error.
        lines: the first of its lines; as many as are looked at.
        separator: a name in :data:`SEPARATORS`, which is then the answer.
        quoting: what quotes mean, a name in :data:`QUOTINGS`.
    Raises:
        DataError: several separators would do.
    """
    first, text = "", io.StringIO()
    for line in lines:
        first = first or line
        text.write(line[:SAMPLE])
        if text.tell() > SAMPLE:
            break
    if named := EXCELS_FIRST_LINE.fullmatch(first):
        return Form(SEPARATORS[separator] if separator else named[1], 1)
    return Form(SEPARATORS[separator] if separator else _separator(path, text.getvalue(), quoting))


def _separator(path: Path, text: str, quoting: str | None) -> str:
    """What separates the columns: the one by which all the first rows have as many as the header.

    `csv.Sniffer` counts characters, those within quoted texts too, and so takes letters of the texts for separators;
    here each candidate has to read the rows. Where none reads all of them, the one that gives the header most columns
    is taken, for the reader to say which row is wrong. A file of one column has a comma.
    """
    cut, widths = len(text) > SAMPLE, dict[str, list[int]]()
    for name, separator in SEPARATORS.items():
        reader = csv.reader(
            io.StringIO(text, newline=""),
            delimiter=separator,
            quoting=csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL,
        )
        records = [len(record) for record in reader if record]
        widths[name] = (records[:-1] if cut and records[1:] else records)[:RECORDS]
    several = {name: columns for name, columns in widths.items() if columns and columns[0] > 1}
    if not several:  # a title above the header, which the reader will name
        several = {name: columns[1:] for name, columns in widths.items() if columns[1:] and columns[1] > 1}
    fitting = [name for name, columns in several.items() if len(set(columns)) == 1]
    most = max((columns[0] for columns in several.values()), default=1)
    best = fitting or [name for name, columns in several.items() if columns[0] == most]
    if len(best) > 1:
        raise DataError(
            f"{path} could be separated by {' or by '.join(f'`{name}`' for name in best)}",
            "say by which with --separator",
        )
    return SEPARATORS[best[0]] if best else ","


@dataclass(frozen=True)
class Delimited:
    """A CSV or TSV file.

    Args:
        path: of the file.
        encoding: as the user names it.
        separator: a name in :data:`SEPARATORS`; None: the one that is found.
        quoting: a name in :data:`QUOTINGS`; None: RFC 4180.
    """

    path: Path
    encoding: str | None = None
    separator: str | None = None
    quoting: str | None = None

    def rows(self) -> Rows:
        """The rows, as they are to be read."""
        form = form_of(self.path, self._lines(), self.separator, self.quoting)
        return Rows(itertools.islice(self._lines(), form.skipped, None), form.separator, self.quoting, form.skipped)

    def _lines(self) -> Iterator[str]:
        return plain_files.read_lines(self.path, self.encoding)

    def header(self) -> list[str]:
        """The names of the columns, without blanks around them.

        Raises:
            DataError: there is none, or a name stands there twice.
        """
        rows = iter(self.rows())
        try:
            names = [name.strip() or f"column {number}" for number, name in enumerate(next(rows, []), start=1)]
        except Ambiguous as error:
            self.refuse(error)
        for number, name in enumerate(names):
            if name in names[:number]:
                raise DataError(f"{self.path} has two columns `{name}`", "rename one of them")
        if not names:
            raise DataError(f"{self.path} is empty", "give a file with at least one row")
        return names

    def refuse(self, error: Ambiguous) -> NoReturn:
        """Name the line, and of the options those by which the whole file can be read."""
        where = f"{self.path}, line {error.line}: it {error.what}"
        first = next(iter(self._lines()), "")
        if error.what.endswith("and the header 1"):
            said = "a comment" if first.startswith(COMMENT) else "a title"
            raise DataError(
                where,
                f"is line 1 (`{first.strip()[:40]}`) {said}, and no header? Then delete all that "
                "stands above the header",
            )
        ways = [] if self.quoting else [name for name in QUOTINGS if self._reads(name)]
        if ways:
            meant = "; ".join(f"--quoting {name}: {QUOTINGS[name]}" for name in ways)
            raise DataError(where, f"say what quotes mean ({meant})")
        raise DataError(
            where,
            "mend that line: texts with separators, quotes or line breaks stand in quotes, and a "
            "quote within is doubled",
        )

    def _reads(self, quoting: str) -> bool:
        """Whether the file can be read so, and has several columns."""
        form = form_of(self.path, self._lines(), self.separator, quoting)
        rows = Rows(itertools.islice(self._lines(), form.skipped, None), form.separator, quoting, form.skipped)
        try:
            width = max((len(row) for row in rows), default=0)
        except Ambiguous:
            return False
        return width > 1


def same_header(files: Sequence[Delimited]) -> list[str]:
    """The names of the columns that all files of a split have.

    Raises:
        DataError: a file has others.
    """
    first = files[0].header()
    for file in files[1:]:
        if (names := file.header()) != first:
            raise DataError(
                f"{file.path} has the columns {', '.join(names)}, and {files[0].path.name} {', '.join(first)}",
                "give all files of a split the same header",
            )
    return first
