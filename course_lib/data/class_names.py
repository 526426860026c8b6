"""Classes of a label column: spellings that are one class, the order of classes, and notes for the reader."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

NUMBER = re.compile(r"[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})")
"""A number that is written out."""

SENTINELS = ("-1", "-100", "255", "nan", "none", "null", "na", "n/a", "<na>", "unknown", "?", "unlabeled", "unlabelled")
"""What often stands for no label, in lower case; -1 not beside 0 or 1 alone, where it is a class of three or two."""

CODES = ({"-1", "0", "1"}, {"-1", "1"})
"""Usual codes of sentiment in which -1 is a class."""


def visible(name: str) -> str:
    """A name by what a reader sees of it: composed characters (NFC), no invisible ones, single plain blanks."""
    kept = (
        letter
        for letter in unicodedata.normalize("NFC", name)
        if letter.isspace() or unicodedata.category(letter) not in ("Cf", "Cc")
    )
    return " ".join("".join(kept).split())


class Classes:
    """The classes of the training split by name, and which of them another spelling means.

    Args:
        counts: rows by label, as they are written, in the order in which they first occur.
        names: all classes in their order, where the data set has it.
    Attributes:
        names: of the classes, in order: as the data set numbers them, else numbers by size, else sorted.
    """

    def __init__(self, counts: Mapping[str, int], names: Sequence[str] | None = None):
        self.given = names is not None
        self.numbers = not self.given and all(NUMBER.fullmatch(visible(name)) for name in counts)
        whole = self.numbers and all(Decimal(visible(name)) % 1 == 0 and _as_is(visible(name)) for name in counts)
        self.spellings: dict[str, list[str]] = {}
        for name in names or counts:
            self.spellings.setdefault(self.key(name), []).append(name)
        by_key = {key: key if whole or self.given else visible(spelt[0]) for key, spelt in self.spellings.items()}
        ordered = by_key if self.given else sorted(by_key, key=Decimal if self.numbers else by_key.__getitem__)
        self.names = tuple(by_key[key] for key in ordered)
        self.by_key = {key: number for number, key in enumerate(ordered)}
        self.present = {self.key(name) for name in counts}

    def key(self, name: str) -> str:
        """Key that all spellings of a class share; names that the data set itself gives are as they are."""
        if self.given:
            return name
        name = visible(name)
        if not (self.numbers and NUMBER.fullmatch(name) and _as_is(name)):
            return name
        number = Decimal(name)
        return format(number.normalize(), "f") if number else "0"

    def number_of(self, name: str) -> int | None:
        """A class by its name; None where the training split has none of it."""
        key = self.key(name)
        return self.by_key[key] if key in self.present else None

    def notes(self, counts: Mapping[str, int]) -> list[str]:
        """Notes on what a reader of the training labels would overlook."""
        notes, rows = [], Counter[str]()
        for name, count in counts.items():
            rows[self.key(name)] += count
        for key, spelt in self.spellings.items():
            if len(spelt) > 1:
                others = ", ".join(f"{counts[name]} as {name!a}" for name in spelt)
                notes.append(
                    f"class `{self.names[self.by_key[key]]}` is written in {len(spelt)} ways that mean the "
                    f"same ({others})"
                )
        if set(rows) not in CODES:
            notes += [
                f"{rows[key]} training rows have the class `{key}`, which often stands for no label: leave them "
                "out if it does"
                for key in rows
                if key.lower() in SENTINELS
            ]
        return notes

    def unseen(self, name: str) -> str:
        """Way out for a label that the training split does not have."""
        alike = next((known for known in self.names if known.casefold() == visible(name).casefold()), None)
        if alike is not None:
            return f"write it as the training split does, `{alike}`"
        if visible(name).lower() in SENTINELS:
            return "it often stands for no label: leave such rows out, or name another split"
        return "add training rows of that class, or leave such rows out"


def _as_is(number: str) -> bool:
    """Whether a number is written without leading zeros, which codes have that are none."""
    digits = number.lstrip("+-")
    return not (len(digits) > 1 and digits[0] == "0" and digits[1].isdigit())


def all_hidden(names: Iterable[str]) -> bool:
    """Whether all labels of a split are one that stands for none."""
    distinct = {visible(name).lower() for name in names}
    return len(distinct) == 1 and next(iter(distinct)) in SENTINELS
