"""Every Arrow type as one of few plain ones (text, number, truth value, nothing), or refused by its name."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from course_lib.errors import DataError

EXACT = 2.0**53
"""Whole numbers beyond it are no longer told apart in a float64."""


@dataclass(frozen=True)
class Kind:
    """Arrow types that are read alike.

    Attributes:
        holds: whether a type is one of them.
        plain: the type that columns of them get; None: they are refused.
        way_out: for those that are refused, how to make a column of text or classes of them.
    """

    holds: Callable[[pa.DataType], bool]
    plain: pa.DataType | None
    way_out: str = ""


def _any(*holds: Callable[[pa.DataType], bool]) -> Callable[[pa.DataType], bool]:
    return lambda kind: any(one(kind) for one in holds)


CHATS = ("messages", "conversations", "conversation", "chosen", "rejected", "dialog", "turns")
"""Columns that hold conversations, a list of turns in each row."""

AS_TEXT = "turn it into text first, as frame[NAME].astype(str) does"
KINDS = (
    Kind(_any(types.is_string, types.is_large_string, types.is_string_view), pa.string()),
    Kind(_any(types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary), pa.binary()),
    Kind(_any(types.is_uint64), pa.uint64()),
    Kind(_any(types.is_integer), pa.int64()),
    Kind(_any(types.is_floating, types.is_decimal), pa.float64()),
    Kind(_any(types.is_boolean), pa.bool_()),
    Kind(_any(types.is_null), pa.null()),
    Kind(_any(types.is_temporal, types.is_interval), None, AS_TEXT),
    Kind(_any(types.is_map, types.is_struct), None, "take the field that you mean into a column of its own"),
    Kind(
        _any(
            types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view
        ),
        None,
        'give one value per row; lists of words: frame[NAME] = frame[NAME].map(" ".join)',
    ),
    Kind(_any(types.is_union), None, AS_TEXT),
)
"""All of them; a type that is in none is refused too."""


def unpacked(kind: pa.DataType) -> pa.DataType:
    """The type of the values behind a dictionary, runs, or the stored form of JSON and 8-bit truth values."""
    while True:
        if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            kind = kind.value_type
        elif isinstance(kind, pa.BaseExtensionType) and kind.extension_name in ("arrow.json", "arrow.bool8"):
            kind = kind.storage_type
        else:
            return kind


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """The plain type that values of an Arrow type get; None where they are refused."""
    kind = unpacked(kind)
    return next((one.plain for one in KINDS if one.holds(kind)), None)


def way_out(kind: pa.DataType, name: str) -> str:
    """Way out for a column of a type that is refused."""
    if name.lower() in CHATS and types.is_nested(kind):
        return (
            f"make a text of each conversation first: rows.map(lambda row: {{'text': "
            f"tokenizer.apply_chat_template(row[{name!r}], tokenize=False)}})"
        )
    kind = unpacked(kind)
    return next((one.way_out for one in KINDS if one.holds(kind)), AS_TEXT).replace("NAME", repr(name))


def plain(values: pa.Array) -> pa.Array:
    """Values of a type that is not refused, in their plain type; bytes stay bytes, see :func:`text_of`."""
    while unpacked(values.type) != values.type:
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        elif types.is_run_end_encoded(values.type):
            values = pc.run_end_decode(values)
        else:
            values = values.storage
    wanted = plain_type(values.type)
    assert wanted is not None, values.type
    return values if values.type == wanted else values.cast(wanted)


def text_of(values: pa.Array, name: str, split: str, first: int) -> pa.Array:
    """Strings, or bytes that are UTF-8, as strings.

    Args:
        values: plain ones, of strings, bytes or nothing.
        name: of the column, for the error.
        split: likewise.
        first: number of the row that the values begin at.
    Raises:
        DataError: bytes that are no UTF-8; the row is named.
    """
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        for row, value in enumerate(values.to_pylist()):
            try:
                value is None or value.decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"column `{name}` of the {split} split holds bytes that are no UTF-8 in row {first + row} (from 0)",
                    "name another column, or decode it first",
                ) from None
        raise


def shown(kind: pa.DataType) -> str:
    """A type in words; that of JSON values of several types has one of its own."""
    text = "values of several types" if isinstance(kind, pa.BaseExtensionType) else str(kind)
    return text if len(text) <= 60 else text[:59] + "…"
