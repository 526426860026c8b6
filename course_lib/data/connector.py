"""DataConnector: from a data set's name to clean text and numbered classes, in train, validation and test splits."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from course_lib.config import DataConfig
from course_lib.data import columns, label_check, sources
from course_lib.data.cache import BATCH_ROWS, FORMAT, cached_filter, cached_map, column, column_digest, digest
from course_lib.data.class_names import Classes
from course_lib.data.cleaning import clean
from course_lib.data.conversations import COLUMNS, contents
from course_lib.data.shards import Shards, open_shards
from course_lib.errors import DataError, nearest

SYNONYMS = {"validation": ("valid", "val", "dev"), "test": ("testing",)}
"""Names that a split also goes by, taken where the user named none."""


@dataclass(frozen=True)
class TextData:
    """A data set ready to be tokenized."""

    splits: datasets.DatasetDict
    """`train`, unless it is streamed, `validation` and, where there is one, `test`; columns `text` and, for
    classification, `label` (int64)."""
    label_names: tuple[str, ...] | None
    """Name of each class by its number; None for language modelling."""
    name: str
    source: str
    """One line: where it is from, its licence or citation."""
    fingerprint: str
    """Names the texts, the labels and their order; the same in every process."""
    notes: tuple[str, ...] = ()
    """What was done that nobody asked for: splits that were cut or stand in, rows that were left out."""
    conversations: bool = False
    """Whether `text` holds conversations, as JSON; see :mod:`course_lib.data.conversations`."""
    shards: Shards | None = None
    """The training text where it is streamed."""

    @property
    def training_texts(self) -> Iterable[str]:
        """Texts that a tokenizer is trained on: of conversations what is said in them, of a stream its first texts."""
        texts: Iterable[str] = (
            self.splits["train"]["text"] if self.shards is None else itertools.islice(self.shards.read(0), BATCH_ROWS)
        )
        return map(contents, texts) if self.conversations else texts


@dataclass(frozen=True)
class _Rows:
    """One split on its way: clean texts, and the classes by name."""

    texts: datasets.Dataset
    labels: columns.Labels | None = None
    """None for language modelling."""
    conversations: bool = False


class DataConnector:
    """Loads the data set that a config names; every rank may do so at the same time.

    Data sets: `tweets` (bundled), `pydocs` (the documentation of this machine's Python), a local file (CSV, TSV, JSON,
    JSON lines, Parquet, plain text) or a folder of them, one per split, and any text data set on the Hub by its name,
    with a revision as in ``dair-ai/emotion@main``.

    Args:
        config: which data set, columns and splits.
        seed: decides which rows a missing validation split is cut from.
    """

    def __init__(self, config: DataConfig, seed: int = 42):
        self.config, self.seed = config, seed

    def load(self) -> TextData:
        """The data set with its splits under their canonical names.

        A missing validation or test split is cut from the training split, stratified by class, so that no score is of
        rows that chose the model. Each class keeps a training row; where that leaves no row for a test split, there is
        none, and the validation split has to do. The notes say so.

        Raises:
            DataError: the data set, a split, a column, or a row's text or label is missing or unfit.
        """
        source, notes = sources.find(self.config), list[str]()
        chosen = self._choose_splits(source, notes)
        shards = self._stream(source, chosen, notes) if self.config.streaming else None
        rows = {split: self._read(source, own_name, split, notes) for split, own_name in chosen.items()}
        kinds = {split: one.conversations for split, one in rows.items()} | (
            {"train": shards.conversations} if shards else {}
        )
        if len({*kinds.values()}) > 1:
            held = [f"{split} {'conversations' if talks else 'texts'}" for split, talks in kinds.items()]
            raise DataError(
                f"the splits of {source.name} hold both ({', '.join(held)})",
                "give all splits the same columns, or name one of them with --text_column",
            )
        splits, label_names = self._number(rows, notes)
        splits = splits if shards else self._cut_missing(splits, notes)
        splits = self._shorten(splits, label_names, notes)
        return TextData(
            splits,
            label_names,
            source.name,
            source.described,
            fingerprint(splits, label_names),
            tuple(notes),
            any(kinds.values()),
            shards,
        )

    def open_training_shards(self) -> Shards:
        """The training files alone, to be read as they are needed, whatever else the data set has.

        Raises:
            DataError: the data set, the split or its column of texts is missing or unfit.
        """
        source = sources.find(self.config)
        return open_shards(source, self._choose_splits(source, [])["train"], self.config, self._chat)

    @property
    def _classifies(self) -> bool:
        return self.config.task == "classification"

    def _choose_splits(self, source: sources.Source, notes: list[str]) -> dict[str, str]:
        """The data set's own name of each split that there is."""
        there, chosen = source.splits, dict[str, str]()
        for split in ("train", "validation", "test"):
            wanted = getattr(self.config, f"{split}_split")
            synonyms = [name for name in SYNONYMS.get(split, ()) if name in there]
            if wanted in there:
                chosen[split] = wanted
            elif wanted != split or split == "train":
                raise DataError(f"{source.name} has no split `{wanted}`", nearest(wanted, there))
            elif synonyms:
                chosen[split] = synonyms[0]
                notes.append(f"the split `{synonyms[0]}` is the {split} split")
        for first, second in itertools.combinations(chosen, 2):
            if chosen[first] == chosen[second]:
                notes.append(f"{first} and {second} are the same split, `{chosen[first]}`")
        return chosen

    def _read(self, source: sources.Source, own_name: str, split: str, notes: list[str]) -> _Rows:
        """The rows of one split, checked."""
        raw, what = source.read(own_name), f"the {split} split of {source.name}"
        if not len(raw):
            raise DataError(f"{what} is empty", "give a split with at least one row")
        chats = () if self._classifies else columns.conversations(raw.features)
        if self.config.task == "causal_lm" and (chat := self._chat(chats, what)):
            return _Rows(columns.only_conversations(raw, chat, split), conversations=True)
        text = columns.choose_column(self.config.text_column, columns.TEXT_NAMES, raw.features, "text_column", what)
        texts = self._clean(columns.only_text(raw, text, split), split, source.is_prose)
        blank = columns.blank_rows(texts)
        count = pc.sum(blank).as_py()
        if not self._classifies:
            if count == len(texts):
                raise DataError(f"{what} has no text in column `{text}`", "name another with --text_column")
            if count:
                notes.append(f"{count} rows of the {split} split without text are left out")
                texts = cached_filter(texts, pc.invert(blank), f"Leaving out blank rows of {split}")
            return _Rows(texts)
        if count:
            row = pc.index(blank, True).as_py()
            raise DataError(
                f"row {row} (from 0) of the {split} split has no text in column `{text}`",
                "give every row a text, or leave such rows out",
            )
        if set(raw.column_names) == {text}:
            raise DataError(
                f"{what} has no column but `{text}`, so no classes",
                "use --task causal_lm or masked_lm, or data with labels",
            )
        label = columns.choose_column(self.config.label_column, columns.LABEL_NAMES, raw.features, "label_column", what)
        labels = columns.Labels(raw, label, split)
        if split == "train" and labels.names is None:
            label_check.check_classes(raw, text, label, list(labels.counts), what)
        return _Rows(texts, labels)

    def _stream(self, source: sources.Source, chosen: dict[str, str], notes: list[str]) -> Shards:
        """The training files, to be read as they are needed; takes the split out of those that are chosen."""
        if "validation" not in chosen:
            raise DataError(
                f"{source.name} has no validation split, and none can be cut from a stream",
                "put a file validation.jsonl, .parquet or .txt beside the training files",
            )
        shards = open_shards(source, chosen.pop("train"), self.config, self._chat)
        notes.append(
            f"train is streamed from {len(shards)} file{'s' * (len(shards) != 1)}, shuffled in windows of "
            f"{self.config.stream_window:,} rows"
        )
        return shards

    def _chat(self, chats: Sequence[str], what: str) -> str | None:
        """The column of conversations to train on, where there is one and the config names no other."""
        wanted = self.config.text_column
        chat = next((name for name in chats if wanted in (None, name)), None)
        if chat and (self.config.lowercase or self.config.clean_text):
            raise DataError(
                f"{what} holds conversations in `{chat}`, which clean_text and lowercase would change",
                "leave the two out",
            )
        if not chat and self.config.chat_template:
            raise DataError(
                f"{what} holds no conversations, which chat_template {self.config.chat_template} is for",
                f"leave it out, or give a column {' or '.join(COLUMNS)}",
            )
        return chat

    def _clean(self, rows: datasets.Dataset, split: str, is_prose: bool) -> datasets.Dataset:
        """The texts cleaned as the config says; where it says nothing, for classification, and prose for all tasks."""
        tidy, lowercase = self.config.clean_text, self.config.lowercase
        tidy = self._classifies or is_prose if tidy is None else tidy
        if not (tidy or lowercase):
            return rows

        def normalise(batch: pa.Table) -> dict[str, list[str]]:
            texts = batch["text"].to_pylist()
            return {"text": [clean(text, lowercase) if tidy else text.lower() for text in texts]}

        key = digest(FORMAT, "clean", tidy, lowercase, column_digest(rows, "text"))
        return cached_map(rows, normalise, key=key, features=rows.features, describe=f"Cleaning {split}")

    def _number(
        self, rows: dict[str, _Rows], notes: list[str]
    ) -> tuple[dict[str, datasets.Dataset], tuple[str, ...] | None]:
        """Each split with its classes as numbers, and the names of the classes."""
        labels = {split: split_rows.labels for split, split_rows in rows.items() if split_rows.labels}
        if not labels:
            return {split: split_rows.texts for split, split_rows in rows.items()}, None
        counts = labels["train"].counts
        classes = Classes(counts, labels["train"].names)
        if len(classes.names) < 2:
            raise DataError(
                f"every row of the training split has the label `{classes.names[0]}`",
                "a classifier needs two classes: check --label_column",
            )
        notes += classes.notes(counts)
        numbered = {split: own.numbered(rows[split].texts, classes) for split, own in labels.items()}
        return numbered, classes.names

    def _cut_missing(self, splits: dict[str, datasets.Dataset], notes: list[str]) -> dict[str, datasets.Dataset]:
        """The splits with those that are missing cut from the training split, each of the same share of its rows."""
        size, share, left = len(splits["train"]), self.config.validation_fraction, 1.0
        missing = [name for name in ("validation", "test") if name not in splits]
        if share * len(missing) >= 1:
            raise DataError(
                f"validation_fraction {share} is cut off twice, for validation and for test, and leaves "
                "nothing to train on",
                "give less than 0.5",
            )
        for split in missing:
            train = splits["train"]
            labels = column(train, "label") if self._classifies else None
            held_out = columns.cut(len(train), share / left, self.seed, labels)
            count = pc.sum(held_out).as_py()
            if split == "test" and count in (0, len(train)):
                notes.append(
                    f"no test split, and {size} rows are too few to cut one: the validation split, by which "
                    "the best model is chosen, stands in for it"
                )
                break
            if not count:
                raise DataError(
                    f"the training split has {size} rows, too few to cut a validation split from",
                    "give a validation split, or more rows",
                )
            how = "in each class" if self._classifies else "of the rows"
            notes.append(
                f"no {split} split: {count} rows ({share:.0%} {how}, seed {self.seed}) are cut from the training split"
            )
            splits = splits | {
                "train": cached_filter(train, pc.invert(held_out), "Training rows"),
                split: cached_filter(train, held_out, f"{split.capitalize()} rows"),
            }
            left -= share
        return splits

    def _shorten(
        self, splits: dict[str, datasets.Dataset], label_names: tuple[str, ...] | None, notes: list[str]
    ) -> datasets.DatasetDict:
        """Only the first rows of each split where the config says so; drawn where the first ones lack classes."""
        for split, rows in splits.items():
            limit = self.config.max_train_samples if split == "train" else self.config.max_eval_samples
            if limit is not None and limit < len(rows):
                splits[split] = self._first(rows, limit, split, notes) if label_names else rows.select(range(limit))
        if label_names and (left := len(column(splits["train"], "label").unique())) < len(label_names):
            notes.append(f"the training rows have {left} of the {len(label_names)} classes")
        return datasets.DatasetDict(splits)

    def _first(self, rows: datasets.Dataset, limit: int, split: str, notes: list[str]) -> datasets.Dataset:
        """The first rows of a split, or as many drawn in each class where it is sorted, and the first lack classes."""
        labels, first = column(rows, "label"), rows.select(range(limit))
        there, left = len(labels.unique()), len(column(first, "label").unique())
        if left == there or left >= limit:
            return first
        notes.append(
            f"the first {limit} rows of the {split} split have {left} of its {there} classes, so rows are "
            f"drawn in each class (seed {self.seed})"
        )
        drawn = columns.cut(len(rows), limit / len(rows), self.seed, labels)
        return cached_filter(rows, drawn, f"Drawing {split} rows")


def fingerprint(splits: datasets.DatasetDict, label_names: tuple[str, ...] | None) -> str:
    """Names the texts, the labels and their order."""
    return digest(
        label_names,
        {split: [column_digest(rows, name) for name in rows.column_names] for split, rows in splits.items()},
    )
