"""Finds the text and label columns of any data set, and checks that every row has them."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from course_lib.data.cache import FORMAT, batches, cached_map, column, column_digest, digest
from course_lib.data.ordering import PART
from course_lib.errors import DataError, nearest

TEXT_NAMES = ("text", "sentence", "content", "review", "tweet", "document", "comment", "message", "question")
LABEL_NAMES = ("label", "labels", "sentiment", "class", "target", "category", "emotion")
MISSING_LABELS = ("", "-1")
"""What stands for no label, besides null: an empty field, and the Hub's number for a hidden one."""


def choose_column(wanted: str | None, usual: Sequence[str], columns: Sequence[str], option: str, what: str) -> str:
    """The column to use: the wanted one, else the only one with a usual name (in any case).

    Args:
        wanted: what the user asked for.
        usual: names to look for.
        columns: those of the data set.
        option: name of the option, for the error.
        what: the data set, for the error.
    Raises:
        DataError: it is not there, or no column or several have a usual name.
    """
    listed = ", ".join(columns)
    if wanted is not None:
        if wanted not in columns:
            raise DataError(f"{what} has no column `{wanted}`, only {listed}", nearest(wanted, columns))
        return wanted
    candidates = [name for name in columns if name.lower() in usual]
    if len(candidates) != 1:
        which = f"{' and '.join(candidates)} could each be" if candidates else "none is known to be"
        raise DataError(f"{what} has the columns {listed}, and {which} the {option.partition('_')[0]}",
                        f"name it with --{option}")
    return candidates[0]


def only_text(rows: datasets.Dataset, name: str, split: str) -> datasets.Dataset:
    """The rows with one column, `text`: empty where there is none.

    Raises:
        DataError: the column holds something else.
    """
    values = column(rows, name)
    kind = values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind)):
        raise DataError(f"column `{name}` of the {split} split holds {_shown(kind)}, not text",
                        "name another with --text_column")
    rows = rows.select_columns(name).rename_column(name, "text") if name != "text" else rows.select_columns(name)
    if pa.types.is_string(kind) and not values.null_count:
        return rows
    return cached_map(rows, lambda batch: {"text": pc.fill_null(batch["text"].cast(pa.string()), "")},
                      key=digest(FORMAT, "text", column_digest(rows, "text")),
                      features=datasets.Features({"text": datasets.Value("string")}), describe=f"Reading {split}")


def blank_rows(rows: datasets.Dataset) -> pa.ChunkedArray:
    """bool [rows]: whether a row's `text` is no more than white space; one bit per row is held."""
    bits, start = np.zeros(-(-len(rows) // 8), np.uint8), 0
    for texts in batches(rows, "text"):  # of BATCH_ROWS, so each begins a byte
        blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
        here = np.packbits(blank, bitorder="little")
        bits[start:start + len(here)] = here
        start += len(here)
    return pa.chunked_array([pa.Array.from_buffers(pa.bool_(), len(rows), [None, pa.py_buffer(bits)])])


def label_names(rows: datasets.Dataset, name: str, split: str) -> Iterator[pa.Array]:
    """The class of each row by its name, batch by batch; for numbers without names, the number's digits.

    Raises:
        DataError: a row has none, or the column holds no classes.
    """
    first, feature = 0, rows.features[name]
    for values in batches(rows, name):
        yield _named(values, feature, name, split, first)
        first += len(values)


def _named(values: pa.Array, feature: object, name: str, split: str, first: int) -> pa.Array:
    """A batch of classes by their names.

    Args:
        first: the row that the batch begins at, for the error.
    """
    if isinstance(feature, datasets.ClassLabel) and feature.names:
        hidden = pc.equal(values, -1)
        names = pa.array(feature.names, pa.string()).take(pc.if_else(hidden, None, values))
    else:
        names = _as_names(values, name, split, first)
    missing = pc.or_kleene(pc.is_null(names), pc.is_in(pc.utf8_trim_whitespace(names), pa.array(MISSING_LABELS)))
    if (row := pc.index(missing, True).as_py()) >= 0:
        elsewhere = "" if split == "train" else f", or name another split with --{split}_split"
        raise DataError(f"row {first + row} (from 0) of the {split} split has no label in column `{name}`",
                        f"give every row a class{elsewhere}")
    return names


def _as_names(values: pa.Array, name: str, split: str, first: int) -> pa.Array:
    kind = values.type
    if pa.types.is_floating(kind):  # what readers make of whole numbers where some are missing
        values = pc.if_else(pc.is_nan(values), None, values)
        fractional = pc.not_equal(pc.floor(values), values)
        if (row := pc.index(fractional, True).as_py()) >= 0:
            raise DataError(f"column `{name}` of the {split} split holds {values[row].as_py()} in row {first + row} "
                            "(from 0), which is no class", "use whole numbers or names; regression is not here")
        values = values.cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind)
              or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"column `{name}` of the {split} split holds {_shown(kind)}, not one class per row",
                        "name another with --label_column")
    return values.cast(pa.string())


def _shown(kind: pa.DataType) -> str:
    """A type in words; readers of JSON have one of their own for values of several types."""
    return "values of several types" if isinstance(kind, pa.BaseExtensionType) else str(kind)


def name_classes(names: pa.Array, feature: object) -> tuple[str, ...]:
    """All classes in order: as the data set numbers them, else whole numbers by size, else names sorted."""
    if isinstance(feature, datasets.ClassLabel) and feature.names:
        return tuple(feature.names)
    distinct = pc.unique(names).to_pylist()
    are_numbers = all(re.fullmatch(r"-?\d{1,18}", name) for name in distinct)
    return tuple(sorted(distinct, key=int if are_numbers else None))


def number_classes(texts: datasets.Dataset, labels: "Labels", classes: Sequence[str], known: pa.Array,
                   split: str) -> datasets.Dataset:
    """The texts with the number of each row's class in a column `label`, int64.

    Args:
        texts: as many rows as there are labels.
        labels: class of each row.
        classes: all of them by name, in order.
        known: those that the training split has.
        split: for the error.
    Raises:
        DataError: a class does not occur in the training split.
    """
    if pc.index(pc.is_in(labels.distinct, known), False).as_py() >= 0:
        first = 0
        for names in labels.by_name(split):
            if (row := pc.index(pc.is_in(names, known), False).as_py()) >= 0:
                raise DataError(f"label `{names[row].as_py()}` in row {first + row} (from 0) of the {split} split does "
                                "not occur in the training split",
                                "add training rows of that class, or leave such rows out")
            first += len(names)
    numbered = pa.array(classes, pa.string())

    def numbers(batch: pa.Table) -> dict[str, pa.Array]:
        names = _named(batch[labels.name].combine_chunks(), labels.feature, labels.name, split, 0)
        return {"label": pc.index_in(names, numbered)}

    coded = cached_map(labels.rows, numbers, key=digest(FORMAT, "label", list(classes), labels.digest),
                       features=datasets.Features({"label": datasets.Value("int64")}), describe=f"Labels of {split}")
    return datasets.concatenate_datasets([texts, coded], axis=1)


class Labels:
    """The column of classes of one split, checked; its values stay on disk.

    Args:
        rows: the split.
        name: of the column.
        split: for an error.
    Attributes:
        rows: that column alone.
        feature: how the data set describes it.
        distinct: the classes by name, in the order in which they first occur.
        digest: names every row's class.
    Raises:
        DataError: a row has none, or the column holds no classes.
    """

    def __init__(self, rows: datasets.Dataset, name: str, split: str):
        self.rows, self.name, self.feature = rows.select_columns(name), name, rows.features[name]
        seen, content = dict[str, None](), hashlib.sha256()
        for names in self.by_name(split):
            batch = names.to_pylist()
            seen.update(dict.fromkeys(batch))
            content.update(json.dumps(batch).encode())
        self.distinct, self.digest = pa.array(list(seen), pa.string()), content.hexdigest()

    def by_name(self, split: str) -> Iterator[pa.Array]:
        """The class of each row, batch by batch."""
        return label_names(self.rows, self.name, split)


def cut(size: int, fraction: float, seed: int, labels: pa.ChunkedArray | None = None,
        part: int = PART) -> pa.ChunkedArray:
    """Which rows to hold out, bool [size]; the share of each class is about the same in both parts.

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
            drawn = random.hypergeometric(seats[label], counts[label] - seats[label], len(rows)) if later \
                else seats[label]
            mask[random.permutation(rows)[:drawn]] = True
            counts[label], seats[label] = later, seats[label] - drawn
        masks.append(pa.array(mask))
    return pa.chunked_array(masks)
