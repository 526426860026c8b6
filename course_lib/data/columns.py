"""Finds the text and label columns of any data set, and checks that every row has them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from course_lib.data.cache import FORMAT, batches, cached_map, column, column_digest, digest
from course_lib.data.class_names import Classes, all_hidden, visible
from course_lib.data.conversations import as_json, holds_conversations
from course_lib.data.ordering import PART
from course_lib.errors import DataError, nearest

TEXT_NAMES = ("text", "sentence", "content", "review", "tweet", "document", "comment", "message", "question")
LABEL_NAMES = ("label", "labels", "sentiment", "class", "target", "category", "emotion")
MOST_LISTED = 20
"""Columns that an error names."""
EXACT = 2.0**53
"""Whole numbers beyond it are no longer told apart in a float64."""


def choose_column(wanted: str | None, usual: Sequence[str], columns: Iterable[str], option: str, what: str) -> str:
    """The column to use: the wanted one, else the only one with a usual name (in any case).

    Args:
        wanted: what the user asked for.
        usual: names to look for.
        columns: those that there are.
        option: name of the option, for the error.
        what: the data set, for the error.
    Raises:
        DataError: it is not there, or no column or several have a usual name.
    """
    columns = list(columns)
    listed = ", ".join(columns[:MOST_LISTED]) + f" and {len(columns) - MOST_LISTED} more" * (len(columns) > MOST_LISTED)
    if wanted is not None:
        alike = [name for name in columns if visible(name) == visible(wanted)]
        if wanted not in columns and len(alike) != 1:
            raise DataError(f"{what} has no column `{wanted}`, only {listed}", nearest(wanted, columns))
        return wanted if wanted in columns else alike[0]
    candidates = [name for name in columns if visible(name).casefold() in usual]
    if len(candidates) != 1:
        which = f"{' and '.join(candidates)} could each be" if candidates else "none is known to be"
        raise DataError(
            f"{what} has the columns {listed}, and {which} the {option.partition('_')[0]}",
            f"name it with --{option}; where it is in several columns, join them first; where these are a row and no "
            "header, put one above it, such as text,label",
        )
    return candidates[0]


def check_text(features: datasets.Features, name: str, split: str) -> None:
    """Refuse a column that holds no text.

    Raises:
        DataError: it holds something else.
    """
    kind = features.arrow_schema.field(name).type
    if not (is_text(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"column `{name}` of the {split} split holds {shown(kind)}, not text",
            f"name another with --text_column, or make text of it first: numbers and dates by frame[{name!r}]"
            f".astype(str), bytes by .str.decode('utf-8'), lists of words by .map(' '.join), conversations by "
            "tokenizer.apply_chat_template",
        )


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def shown(kind: pa.DataType) -> str:
    """A type in words."""
    text = "lists, objects or values of several types" if isinstance(kind, pa.JsonType) else str(kind)
    return text if len(text) <= 60 else text[:59] + "…"


def only_text(rows: datasets.Dataset, name: str, split: str) -> datasets.Dataset:
    """The rows with one column, `text`: empty where there is none.

    Raises:
        DataError: the column holds something else.
    """
    check_text(rows.features, name, split)
    rows = rows.select_columns(name)
    if rows.features[name] == datasets.Value("string") and not column(rows, name).null_count:
        return rows.rename_column(name, "text") if name != "text" else rows
    return _as_text(rows, name, split, lambda values: values.cast(pa.string()))


def conversations(features: datasets.Features) -> list[str]:
    """The columns that hold conversations which can be trained on."""
    return [field.name for field in features.arrow_schema if holds_conversations(field.name, field.type)]


def only_conversations(rows: datasets.Dataset, name: str, split: str) -> datasets.Dataset:
    """The rows with one column, `text`, of conversations as JSON; empty where there is none."""
    return _as_text(rows.select_columns(name), name, split, as_json)


def _as_text(
    rows: datasets.Dataset, name: str, split: str, convert: Callable[[pa.Array], pa.Array]
) -> datasets.Dataset:
    return cached_map(
        rows,
        lambda batch: {"text": pc.fill_null(convert(batch[name].combine_chunks()), "")},
        key=digest(FORMAT, "text", str(rows.features[name]), column_digest(rows, name)),
        features=datasets.Features({"text": datasets.Value("string")}),
        describe=f"Reading {split}",
    )


def blank_rows(rows: datasets.Dataset) -> pa.ChunkedArray:
    """bool [rows]: whether a row's `text` is no more than white space; one bit per row is held."""
    return pa.chunked_array([pc.equal(pc.utf8_trim_whitespace(texts), "") for texts in batches(rows, "text")])


class Labels:
    """The column of classes of one split, checked; its values stay on disk.

    Args:
        rows: the split.
        name: of the column.
        split: for an error.
    Attributes:
        names: all classes in the data set's own order, where it has one.
        counts: rows by label, as it is written, in the order in which they first occur; for numbers without names, by
            the number's digits.
    Raises:
        DataError: a row has none, or the column holds no classes.
    """

    def __init__(self, rows: datasets.Dataset, name: str, split: str):
        feature, kind = rows.features[name], rows.features.arrow_schema.field(name).type
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if not (is_number or is_text(kind) or pa.types.is_null(kind)):
            raise DataError(
                f"column `{name}` of the {split} split holds {shown(kind)}, not one class per row",
                "name another with --label_column, or make texts or whole numbers of it first",
            )
        self.rows, self.name, self.split = rows.select_columns(name), name, split
        self.names: Sequence[str] | None = (feature.names or None) if isinstance(feature, datasets.ClassLabel) else None
        self.values, self.name_of, self.counts = column(rows, name), dict[Any, str](), dict[str, int]()
        missing = pc.is_null(self.values, nan_is_null=pa.types.is_floating(kind))
        if (row := pc.index(missing, True).as_py()) >= 0:
            raise self._no_label(row)
        for pair in self.values.value_counts().to_pylist():
            self.name_of[pair["values"]] = self._named(pair["values"])
            self.counts[self.name_of[pair["values"]]] = pair["counts"]

    def row_of(self, value: Any) -> int:
        """The first row with a label."""
        return pc.index(self.values, pa.scalar(value, self.values.type)).as_py()

    def _no_label(self, row: int) -> DataError:
        elsewhere = "" if self.split == "train" else f", or name another split with --{self.split}_split"
        return DataError(
            f"row {row} (from 0) of the {self.split} split has no label in column `{self.name}`",
            f"give every row a class{elsewhere}",
        )

    def _named(self, value: Any) -> str:
        """A label by its name."""
        if self.names is not None:
            name = self.names[value] if 0 <= value < len(self.names) else ""
        elif isinstance(value, float):  # what readers make of whole numbers where some are missing
            if not value.is_integer() or abs(value) > EXACT:
                raise DataError(
                    f"column `{self.name}` of the {self.split} split holds {value} in row {self.row_of(value)} "
                    "(from 0), which is no class",
                    "use whole numbers or names; regression is not here",
                )
            name = str(int(value))
        else:
            name = str(value).lower() if isinstance(value, bool) else str(value)
        if not visible(name):
            raise self._no_label(self.row_of(value))
        return name

    def numbered(self, texts: datasets.Dataset, classes: Classes) -> datasets.Dataset:
        """The texts with the number of each row's class in a column `label`, int64.

        Args:
            texts: as many rows as there are labels.
            classes: of the training split.
        Raises:
            DataError: a class does not occur in the training split.
        """
        numbers = {value: classes.number_of(name) for value, name in self.name_of.items()}
        unknown = next((value for value, number in numbers.items() if number is None), None)
        if unknown is not None and all_hidden(self.counts):
            raise DataError(
                f"the {self.split} split has no labels: every row has `{self.name_of[unknown]}`",
                f"name another split with --{self.split}_split, or leave it out",
            )
        if unknown is not None:
            raise DataError(
                f"label `{self.name_of[unknown]}` in row {self.row_of(unknown)} (from 0) of the {self.split} split "
                "does not occur in the training split",
                classes.unseen(self.name_of[unknown]),
            )
        values, meant = pa.array(list(numbers), self.values.type), pa.array(list(numbers.values()), pa.int64())
        names = list(self.name_of.values())
        coded = cached_map(
            self.rows,
            lambda batch: {"label": meant.take(pc.index_in(batch[self.name].combine_chunks(), values))},
            key=digest(FORMAT, "label", names, meant.to_pylist(), column_digest(self.rows, self.name)),
            features=datasets.Features({"label": datasets.Value("int64")}),
            describe=f"Labels of {self.split}",
        )
        return datasets.concatenate_datasets([texts, coded], axis=1)


def cut(
    size: int, fraction: float, seed: int, labels: pa.ChunkedArray | None = None, part: int = PART
) -> pa.ChunkedArray:
    """Mask of the rows to hold out, bool [size]; the share of each class is about the same in both parts.

    The seats of the held-out part go to the classes by largest remainder; a class keeps at least one row. More rows
    than ``part`` are drawn from a part at a time; how many from each is drawn too, so that any choice is as likely as
    any other.

    Args:
        size: number of rows.
        fraction: share to hold out; at least one row is, where a class has two.
        seed: decides which rows.
        labels: int64 [size], the classes; None for no classes. An Arrow column stays on disk.
        part: rows that are drawn from together.
    """

    def classes(start: int) -> np.ndarray:
        length = min(part, size - start)
        return np.zeros(length, np.int64) if labels is None else labels.slice(start, length).to_numpy()

    number = 1 if labels is None else pc.max(labels).as_py() + 1
    counts = np.sum([np.bincount(classes(start), minlength=number) for start in range(0, size, part)], axis=0)
    shares = fraction * counts
    seats = np.minimum(np.floor(shares).astype(np.int64), np.maximum(counts - 1, 0))
    for label in np.argsort(seats - shares, kind="stable"):
        if seats.sum() < max(1, round(fraction * size)) and seats[label] < counts[label] - 1:
            seats[label] += 1
    random, masks = np.random.default_rng(seed), []
    for start in range(0, size, part):
        here = classes(start)
        mask = np.zeros(len(here), bool)
        for label in range(number):
            rows = np.flatnonzero(here == label)
            later = counts[label] - len(rows)
            drawn = (
                random.hypergeometric(seats[label], counts[label] - seats[label], len(rows)) if later else seats[label]
            )
            mask[random.permutation(rows)[:drawn]] = True
            counts[label], seats[label] = later, seats[label] - drawn
        masks.append(pa.array(mask))
    return pa.chunked_array(masks)
