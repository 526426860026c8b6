"""Finds the text and label columns of any data set, and checks that every row has them."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from course_lib.data import arrow_types
from course_lib.data.cache import FORMAT, batches, cached_map, column, column_digest, digest
from course_lib.data.class_names import Classes, all_hidden, visible
from course_lib.data.conversations import as_json, holds_conversations
from course_lib.data.ordering import PART
from course_lib.data.tables import Raw
from course_lib.errors import DataError, nearest

TEXT_NAMES = ("text", "sentence", "content", "review", "tweet", "document", "comment", "message", "question")
LABEL_NAMES = ("label", "labels", "sentiment", "class", "target", "category", "emotion")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence_A", "sentence_B"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question1", "question2"),
    ("question", "context"),
    ("question", "passage"),
    ("question", "sentence"),
    ("query", "passage"),
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("input", "output"),
    ("title", "body"),
)
"""Columns that hold two texts to be read together."""
MOST_LISTED = 20
"""Columns that an error names."""
LOOKED_AT = 1000
"""Rows that are looked at to tell a header from a row."""


def choose_column(wanted: str | None, usual: Sequence[str], raw: Raw, option: str, what: str) -> str:
    """The column to use: the wanted one, else the only one with a usual name (in any case).

    Args:
        wanted: what the user asked for.
        usual: names to look for.
        raw: the rows.
        option: name of the option, for the error.
        what: the data set, for the error.
    Raises:
        DataError: it is not there, or no column or several have a usual name.
    """
    columns = raw.column_names
    listed = ", ".join(columns[:MOST_LISTED]) + f" and {len(columns) - MOST_LISTED} more" * (len(columns) > MOST_LISTED)
    if wanted is not None:
        alike = [name for name in columns if visible(name) == visible(wanted)]
        if wanted not in columns and len(alike) != 1:
            raise DataError(f"{what} has no column `{wanted}`, only {listed}", nearest(wanted, columns))
        return wanted if wanted in columns else alike[0]
    candidates = [name for name in columns if visible(name).casefold() in usual]
    if len(candidates) != 1:
        which = f"{' and '.join(candidates)} could each be" if candidates else "none is known to be"
        other = "" if candidates else _other_form(raw, option)
        raise DataError(
            f"{what} has the columns {listed}, and {which} the {option.partition('_')[0]}",
            other or f"name it with --{option}",
        )
    return candidates[0]


def _other_form(raw: Raw, option: str) -> str:
    """What to do about columns that are no text and no class but something known, or no header; nothing else."""
    columns = raw.column_names
    if any(len(name.split()) >= 4 or re.fullmatch(r"[-+.,\d]+", name) or _occurs_below(raw, name) for name in columns):
        return (
            f"is the first line a row, and no header? Then put one above it, such as text,label; else name the "
            f"column with --{option}"
        )
    if option != "text_column":
        return ""
    chat = next((name for name in raw.refused if name.lower() in arrow_types.CHATS), None)
    if chat:
        return f"`{chat}` holds conversations: {raw.refused[chat][1]}"
    pair = next((pair for pair in PAIRS if set(pair) <= set(columns)), None)
    if pair:
        return (
            f'{pair[0]} and {pair[1]} are two texts per row: join them first, rows.map(lambda row: {{"text": '
            f'row["{pair[0]}"] + "\\n" + row["{pair[1]}"]}}), or name one of them with --{option}'
        )
    return ""


def _occurs_below(raw: Raw, name: str) -> bool:
    """Whether the name of a column is one of the values in it, as a class in the first line is."""
    if name not in raw.rows.column_names or not pa.types.is_string(raw.type_of(name)):
        return False
    return pc.index(column(raw.rows.select(range(min(LOOKED_AT, len(raw.rows)))), name), name).as_py() >= 0


def check_text(raw: Raw, name: str, split: str) -> None:
    """Refuse a column that holds no text.

    Raises:
        DataError: it holds something else.
    """
    held, way = raw.problem(name) or (None, "")
    plain = None if held else arrow_types.plain_type(raw.type_of(name))
    if plain not in (pa.string(), pa.binary(), pa.null()):
        held = held or arrow_types.shown(raw.type_of(name))
        way = way or arrow_types.AS_TEXT.replace("NAME", repr(name))
        raise DataError(
            f"column `{name}` of the {split} split holds {held}, not text", f"name another with --text_column, or {way}"
        )


def only_text(raw: Raw, name: str, split: str) -> datasets.Dataset:
    """The rows with one column, `text`: empty where there is none.

    Raises:
        DataError: the column holds something else.
    """
    check_text(raw, name, split)
    rows = raw.rows.select_columns(name)
    if rows.features[name] == datasets.Value("string") and not column(rows, name).null_count:
        return rows.rename_column(name, "text") if name != "text" else rows
    first = 0

    def texts(batch: pa.Table) -> dict[str, pa.Array]:
        nonlocal first
        first += len(batch)
        values = arrow_types.plain(batch[name].combine_chunks())
        return {"text": pc.fill_null(arrow_types.text_of(values, name, split, first - len(batch)), "")}

    return cached_map(
        rows,
        texts,
        key=digest(FORMAT, "text", column_digest(rows, name)),
        features=datasets.Features({"text": datasets.Value("string")}),
        describe=f"Reading {split}",
    )


def conversations(raw: Raw) -> Sequence[str]:
    """The columns that hold conversations which can be trained on."""
    schema = raw.rows.features.arrow_schema
    return [*raw.chats, *(name for name in raw.rows.column_names if holds_conversations(name, schema.field(name).type))]


def only_conversations(raw: Raw, name: str, split: str) -> datasets.Dataset:
    """The rows with one column, `text`, of conversations as JSON; empty where there is none."""
    if name in raw.chats:
        return only_text(raw, name, split)
    return cached_map(
        raw.rows.select_columns(name),
        lambda batch: {"text": pc.fill_null(as_json(batch[name].combine_chunks()), "")},
        key=digest(FORMAT, "chats", column_digest(raw.rows, name)),
        features=datasets.Features({"text": datasets.Value("string")}),
        describe=f"Reading {split}",
    )


def blank_rows(rows: datasets.Dataset) -> pa.ChunkedArray:
    """bool [rows]: whether a row's `text` is no more than white space; one bit per row is held."""
    bits, start = np.zeros(-(-len(rows) // 8), np.uint8), 0
    for texts in batches(rows, "text"):  # of BATCH_ROWS, so each begins a byte
        blank = pc.equal(pc.utf8_trim_whitespace(texts), "").to_numpy(zero_copy_only=False)
        here = np.packbits(blank, bitorder="little")
        bits[start : start + len(here)] = here
        start += len(here)
    return pa.chunked_array([pa.Array.from_buffers(pa.bool_(), len(rows), [None, pa.py_buffer(bits)])])


class Labels:
    """The column of classes of one split, checked; its values stay on disk.

    Args:
        raw: the split.
        name: of the column.
        split: for an error.
    Attributes:
        feature: how the data set describes it.
        counts: rows by label, as it is written, in the order in which they first occur.
        digest: names every row's label.
    Raises:
        DataError: a row has none, or the column holds no classes.
    """

    def __init__(self, raw: Raw, name: str, split: str):
        held, way = raw.problem(name) or (None, "")
        if held:
            raise DataError(
                f"column `{name}` of the {split} split holds {held}, not one class per row",
                f"name another with --label_column, or {way}",
            )
        self.rows, self.name, self.split = raw.rows.select_columns(name), name, split
        self.feature = raw.rows.features[name]
        counts, content = Counter[str](), hashlib.sha256()
        for names in self.by_name():
            batch = names.to_pylist()
            counts.update(batch)
            content.update(json.dumps(batch).encode())
        self.counts, self.digest = dict(counts), content.hexdigest()

    @property
    def names(self) -> Sequence[str] | None:
        """All classes in the data set's own order, where it has one."""
        return self.feature.names if isinstance(self.feature, datasets.ClassLabel) and self.feature.names else None

    def by_name(self) -> Iterator[pa.Array]:
        """The label of each row by its name, batch by batch; for numbers without names, the number's digits.

        Raises:
            DataError: a row has none, or one that is no class.
        """
        first = 0
        for values in batches(self.rows, self.name):
            yield self._named(values, first)
            first += len(values)

    def _named(self, values: pa.Array, first: int) -> pa.Array:
        """A batch of labels by their names.

        Args:
            values: as they are stored.
            first: the row that the batch begins at, for the error.
        """
        if self.names is not None:
            known = pc.and_kleene(pc.greater_equal(values, 0), pc.less(values, len(self.names)))
            names = pa.array(self.names, pa.string()).take(pc.if_else(known, values, None))
        else:
            names = self._as_names(arrow_types.plain(values), first)
        blank = pc.is_in(
            names, pa.array([name for name in pc.unique(names).to_pylist() if not visible(name or "")], pa.string())
        )
        if (row := pc.index(pc.or_kleene(pc.is_null(names), blank), True).as_py()) >= 0:
            elsewhere = "" if self.split == "train" else f", or name another split with --{self.split}_split"
            raise DataError(
                f"row {first + row} (from 0) of the {self.split} split has no label in column `{self.name}`",
                f"give every row a class{elsewhere}",
            )
        return names

    def _as_names(self, values: pa.Array, first: int) -> pa.Array:
        if not pa.types.is_floating(values.type):
            return (
                values.cast(pa.string())
                if not pa.types.is_binary(values.type)
                else arrow_types.text_of(values, self.name, self.split, first)
            )
        # What readers make of whole numbers where some are missing.
        values = pc.if_else(pc.is_nan(values), None, values)
        unfit = pc.or_(pc.not_equal(pc.floor(values), values), pc.greater(pc.abs(values), arrow_types.EXACT))
        if (row := pc.index(unfit, True).as_py()) >= 0:
            raise DataError(
                f"column `{self.name}` of the {self.split} split holds {values[row].as_py()} in row "
                f"{first + row} (from 0), which is no class",
                "use whole numbers or names; regression is not here",
            )
        return values.cast(pa.int64()).cast(pa.string())

    def numbered(self, texts: datasets.Dataset, classes: Classes) -> datasets.Dataset:
        """The texts with the number of each row's class in a column `label`, int64.

        Args:
            texts: as many rows as there are labels.
            classes: of the training split.
        Raises:
            DataError: a class does not occur in the training split.
        """
        numbers = {name: classes.number_of(name) for name in self.counts}
        unknown = [name for name, number in numbers.items() if number is None]
        if unknown and all_hidden(self.counts):
            raise DataError(
                f"the {self.split} split has no labels: every row has `{unknown[0]}`",
                f"name another split with --{self.split}_split, or leave it out",
            )
        if unknown:
            first = 0
            for names in self.by_name():
                if (row := pc.index(pc.is_in(names, pa.array(unknown)), True).as_py()) >= 0:
                    name = names[row].as_py()
                    raise DataError(
                        f"label `{name}` in row {first + row} (from 0) of the {self.split} split does "
                        "not occur in the training split",
                        classes.unseen(name),
                    )
                first += len(names)
        spelt, meant = pa.array(list(numbers), pa.string()), pa.array(list(numbers.values()), pa.int64())
        coded = cached_map(
            self.rows,
            lambda batch: {"label": meant.take(pc.index_in(self._named(batch[self.name].combine_chunks(), 0), spelt))},
            key=digest(FORMAT, "label", numbers, self.digest),
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
