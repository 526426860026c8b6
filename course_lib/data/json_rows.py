"""Reads JSON files as rows: an object per line, a list of objects, or columns of lists, as pandas writes them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from course_lib.data.conversations import COLUMNS
from course_lib.data.plain_files import read_lines
from course_lib.errors import DataError

Row = Mapping[str, Any]

WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}
"""What Python makes of each JSON value."""

BITS = 63
"""Whole numbers of more than these do not fit; they are kept by their digits."""


def read_rows(path: Path, encoding: str | None = None) -> Iterator[Row]:
    """The rows of a file, an object each.

    Args:
        path: the file. Of lines with an object each, one line is held at a time; a file of another form is held whole.
        encoding: as the user names it.
    Raises:
        DataError: a line or a row is something else; it is named.
    """
    lines = ((number, line) for number, line in enumerate(read_lines(path, encoding), start=1) if line.strip())
    first = next(lines, (0, ""))
    if not first[1]:
        raise DataError(f"{path} is empty", "give a file with at least one row")
    head: Any = None
    if first[1].lstrip().startswith("{"):
        try:
            head = json.loads(first[1])
        except ValueError:
            pass  # an object over several lines
        except RecursionError:
            raise _too_deep(path) from None
    second = next(lines, None)
    if isinstance(head, dict) and second is not None and second[1].lstrip()[:1] not in (",", "]"):
        yield _checked(path, f"line {first[0]}", head)
        yield from _by_lines(path, [second], lines)
    elif isinstance(head, dict) and second is None:
        yield from _of_document(path, head)
    elif second is not None and not first[1].lstrip().startswith(("{", "[")):
        yield from _by_lines(path, [first, second], lines)
    else:
        rest = [first[1], *([second[1]] if second else []), *(line for _, line in lines)]
        yield from _of_document(path, *_documents(path, "".join(rest)))


def _by_lines(path: Path, *parts: Any) -> Iterator[Row]:
    for part in parts:
        for number, line in part:
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: it is no JSON ({getattr(error, 'msg', error)})",
                    "give one object per line, or mend that line",
                ) from None
            except RecursionError:
                raise _too_deep(path) from None
            yield _checked(path, f"line {number}", value)


def _checked(path: Path, where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, {where}: it is {WORDS[type(value)]}, not an object",
            'give one object per row, such as {"text": "…", "label": "…"}',
        )
    return value


def _too_deep(path: Path) -> DataError:
    return DataError(
        f"{path}: lists or objects within each other are too many levels deep", "leave out the columns that hold them"
    )


def _documents(path: Path, text: str) -> list[Any]:
    """All values of a text, one after another."""
    decoder, values, place = json.JSONDecoder(), list[Any](), 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError as error:
            where, what = getattr(error, "pos", place), getattr(error, "msg", error)
            raise DataError(
                f"{path}, line {1 + text.count(chr(10), 0, where)}: it is no JSON ({what})", "mend the file"
            ) from None
        except RecursionError:
            raise _too_deep(path) from None
        values.append(value)
        place += len(text[place : place + 1000]) - len(text[place : place + 1000].lstrip())
    return values


def _of_document(path: Path, *values: Any) -> Iterator[Row]:
    """The rows of a whole file: of a list, of columns, or of the one list of objects in an object."""
    value = values[0] if len(values) == 1 else list(values)
    if isinstance(value, dict):
        value = _of_object(path, value)
    if not isinstance(value, list):
        raise DataError(f"{path} is {WORDS[type(value)]}, not rows", "give one object per line, or a list of objects")
    if value and all(isinstance(row, str) for row in value):
        value = [{"text": row} for row in value]
    for number, row in enumerate(value):
        yield _checked(path, f"row {number} (from 0)", row)


def _of_object(path: Path, value: dict[str, Any]) -> list[Any]:
    columns = list(value.values())
    if (
        columns
        and all(isinstance(column, list) for column in columns)
        and (len(columns) > 1 or not _are_objects(columns[0]))
    ):
        lengths = {len(column) for column in columns}
        if len(lengths) == 1 and not any(map(_are_objects, columns)):
            return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
    tables = [name for name, column in value.items() if _are_objects(column) and not _is_conversation(name, column)]
    if set(value) >= {"columns", "data"} and isinstance(value["columns"], list):  # pandas, orient="split" or "table"
        return [
            dict(zip(map(str, value["columns"]), row, strict=False)) for row in value["data"] if isinstance(row, list)
        ]
    if len(tables) == 1 and not any(
        isinstance(column, str) and name in ("text", "content") for name, column in value.items()
    ):
        return value[tables[0]]
    if len(tables) > 1:
        raise DataError(
            f"{path} holds several tables ({', '.join(tables)})",
            "give each split a file of its own, named train, validation or test",
        )
    if columns and all(isinstance(column, dict) for column in columns):
        inner = list(columns[0])
        if all(list(column) == inner for column in columns) and all(key.isdigit() for key in inner):
            return [dict(zip(value, row, strict=True)) for row in zip(*(c.values() for c in columns), strict=True)]
        if all(key.isdigit() for key in value):
            return columns  # pandas, orient="index"
        raise DataError(f"{path} is an object of objects, not rows", "give one object per line, or a list of objects")
    return [value]


def _is_conversation(name: str, value: list[dict[str, Any]]) -> bool:
    """Whether objects are the turns of one conversation, in a file of a single row, and no rows themselves."""
    return name.lower() in COLUMNS and all({"role", "from"} & set(turn) for turn in value)


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


class Columns:
    """The columns of JSON rows and what they hold, learnt from all rows before the first is written."""

    def __init__(self) -> None:
        self.kinds: dict[str, set[type]] = {}

    def add(self, row: Row) -> None:
        """Take a row into account."""
        for name, value in row.items():
            kind: type = type(value)
            if kind is int and value.bit_length() > BITS:
                kind = bytes  # no JSON value is; stands for a number that is too long
            self.kinds.setdefault(name, set()).add(kind)

    def types(self) -> dict[str, pa.DataType | str]:
        """The Arrow type of each column, or what it holds in words where that is none."""
        return {name: _type(kinds - {type(None)}) for name, kinds in self.kinds.items()}


def _type(kinds: set[type]) -> pa.DataType | str:
    if not kinds:
        return pa.null()
    for held, kind in (
        ({str}, pa.string()),
        ({bool}, pa.bool_()),
        ({int}, pa.int64()),
        ({int, float}, pa.float64()),
        ({int, bytes}, pa.string()),
    ):
        if kinds <= held:
            return kind
    return "lists" if kinds == {list} else "objects" if kinds == {dict} else "values of several types"


def arrays(rows: Sequence[Row], types: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
    """A batch of rows as Arrow columns.

    Raises:
        UnicodeEncodeError: a text has half of a surrogate pair.
    """
    made = {}
    for name, kind in types.items():
        values = [row.get(name) for row in rows]
        if kind == pa.string():
            values = [
                value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                for value in values
            ]
        made[name] = pa.array(values, kind)
    return made
