"""Facts of each split in one line: its rows, and what was cut of them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import numpy as np
import pandas as pd

from course_lib.data.cache import batches
from course_lib.errors import one_line

SHOWN_CLASSES = 8
"""Classes whose counts are shown; of more, the most frequent ones."""


@dataclass(frozen=True)
class SplitFacts:
    """Facts of a split.

    Attributes:
        rows: texts.
        classes: rows by class, also of those that have none; empty for language modelling.
        in_train: rows whose text the training split has too, in the training split rows that repeat an earlier one.
        max_length: tokens at which a text is cut, or of a block.
        tokens: of all texts, before anything is cut.
        cut_rows: texts that were longer; for language modelling 0, or those that are packed in pieces.
        cut_tokens: what was cut of them; for language modelling what fills no block.
        packed_rows: rows that whole texts share; 0 where they share none.
        left_out: conversations that have no answer within max_length, and are left out.
    """

    rows: int
    classes: Mapping[str, int]
    in_train: int
    max_length: int
    tokens: int
    cut_rows: int
    cut_tokens: int
    packed_rows: int = 0
    left_out: int = 0

    @property
    def filled(self) -> float:
        """Share of the places of packed rows that hold a token."""
        return (self.tokens - self.cut_tokens) / max(1, self.packed_rows * self.max_length)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a run's summary."""
        return asdict(self)

    def line(self, split: str) -> str:
        """All of it in one line."""
        parts = [_rows(self.rows) + (f": {self._classes()}" if self.classes else f", {self.tokens:,} tokens")]
        if self.in_train:
            parts.append(
                f"{_rows(self.in_train)} again"
                if split == "train"
                else f"{_rows(self.in_train)} of the training split too"
            )
        share = f"{self.cut_tokens / max(1, self.tokens):.1%} of the tokens"
        if self.cut_rows and not self.cut_tokens:
            parts.append(
                f"{_rows(self.cut_rows)} ({self.cut_rows / self.rows:.1%}) in pieces of {self.max_length} tokens"
            )
        elif self.cut_rows:
            parts.append(
                f"{_rows(self.cut_rows)} ({self.cut_rows / self.rows:.1%}) cut at {self.max_length} tokens, "
                f"which leaves out {share}"
            )
        elif self.cut_tokens and not self.left_out:
            parts.append(f"the last {self.cut_tokens:,} tokens ({share}) fill no block of {self.max_length}")
        if self.left_out:
            parts.append(f"{_rows(self.left_out)} without an answer within {self.max_length} tokens left out")
        if self.packed_rows:
            parts.append(
                f"packed into {_rows(self.packed_rows)} of {self.max_length} tokens, {self.filled:.1%} of "
                "whose places are filled"
            )
        return one_line("; ".join(parts))

    def _classes(self) -> str:
        if len(self.classes) <= SHOWN_CLASSES:
            return ", ".join(f"{name} {count:,}" for name, count in self.classes.items())
        most = sorted(self.classes.items(), key=lambda pair: -pair[1])[:SHOWN_CLASSES]
        missing = sum(not count for count in self.classes.values())
        none = f" and none of {missing} classes" if missing else ""
        return f"{len(self.classes)} classes: {', '.join(f'{name} {count:,}' for name, count in most)}, …{none}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def class_counts(rows: datasets.Dataset, names: tuple[str, ...] | None) -> dict[str, int]:
    """Rows by class; empty without classes."""
    if names is None:
        return {}
    counts = np.zeros(len(names), np.int64)
    for labels in batches(rows, "label"):
        counts += np.bincount(labels.to_numpy(zero_copy_only=False), minlength=len(names))
    return dict(zip(names, counts.tolist(), strict=True))


def text_hashes(rows: datasets.Dataset) -> np.ndarray:
    """A number for each row's text, uint64 [rows]; the same for the same text."""
    parts = [
        pd.util.hash_array(texts.to_numpy(zero_copy_only=False), categorize=False) for texts in batches(rows, "text")
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def repeated(splits: Mapping[str, datasets.Dataset]) -> dict[str, int]:
    """Of each split the rows whose text the training split has too; of that one, those that repeat an earlier row."""
    hashes = {split: text_hashes(rows) for split, rows in splits.items()}
    train = np.unique(hashes.get("train", np.empty(0, np.uint64)))
    return {
        split: len(own) - len(train) if split == "train" else int(np.isin(own, train).sum())
        for split, own in hashes.items()
    }
