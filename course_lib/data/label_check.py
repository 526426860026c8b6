"""Check that a column holds classes: refuses numbers to predict, free text, and swapped columns."""

import re
from collections.abc import Sequence

import datasets
import pyarrow as pa

from course_lib.data.cache import column
from course_lib.errors import DataError

LOOKED_AT = 10_000
"""Rows of the other columns that are looked at."""

FEW = 20
"""Different values up to which a column may hold fractions or sentences and still be classes."""

LEAST_ROWS = 10
"""Rows below which nothing can be told by the number of values."""

FRACTION = re.compile(r"\s*[-+]?\d*[.,]\d*[1-9]\d*([eE][-+]?\d+)?\s*")
"""A number that is not whole."""


def check_classes(raw: datasets.Dataset, text: str, label: str, classes: Sequence[str], what: str) -> None:
    """Refuse a column of labels that holds no classes.

    It holds none where more than half of its values differ, or where more than :data:`FEW` do and most of them are
    fractions or have four words and more.

    Args:
        raw: the training split as it came.
        text: name of the column of texts.
        label: name of the column of labels.
        classes: its different values.
        what: the split, for the error.
    Raises:
        DataError: it holds none; says what it looks like, and which columns would do.
    """
    kind = _not_classes(classes, len(raw))
    if kind is None:
        return
    others = [name for name in raw.column_names if name not in (text, label) and _holds_classes(raw, name)]
    shown = ", ".join(f"`{value[:20]}`" for value in classes[:3])
    problem = f"column `{label}` of {what} has {len(classes)} different values in {len(raw)} rows ({shown}, …): {kind}"
    if _holds_classes(raw, text):
        raise DataError(
            f"{problem}, and column `{text}` looks like the classes",
            f"are the two swapped? Give --text_column {label} --label_column {text}",
        )
    would_do = f": {' or '.join(others)} would do" if others else "; no other column here would do"
    raise DataError(problem, f"name a column of classes with --label_column{would_do}")


def _not_classes(values: Sequence[str], rows: int) -> str | None:
    """What the different values of a column look like where they are no classes."""
    if rows < LEAST_ROWS or (len(values) <= FEW and len(values) <= rows / 2):
        return None
    if 2 * sum(FRACTION.fullmatch(value) is not None for value in values) > len(values):
        return "numbers to predict, and regression is not here (classification, causal_lm, masked_lm)"
    if 2 * sum(len(value.split()) >= 4 for value in values) > len(values):
        return "texts, not classes"
    return "nearly as many as rows, so no classes" if len(values) > rows / 2 else None


def _holds_classes(raw: datasets.Dataset, name: str) -> bool:
    """Whether a column could be the labels: at least two values, and none of what is refused."""
    rows = raw.select(range(min(LOOKED_AT, len(raw))))
    values = column(rows, name)
    kind = values.type
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        return False
    distinct = [str(value) for value in values.unique().to_pylist() if value is not None]
    return len(distinct) > 1 and _not_classes(distinct, len(rows)) is None
