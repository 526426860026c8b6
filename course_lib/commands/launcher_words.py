"""Settings of ``accelerate launch`` as options of this course, one row per environment variable that it leaves.

A word is taken (it becomes options), refused with what to give instead, or decides nothing here: launcher_words.yaml
has them all.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from course_lib.errors import ConfigError

Leaves = Mapping[str, tuple[str, ...]]
"""Values by option: the first is taken where the run says nothing, and any of them agrees with the launcher."""
Words = Mapping[str, str]
"""Values by name, in lower case except for paths."""
Values = Mapping[str, list[str]]
"""Some values of other words, by name; of a word that is not there the empty one."""

LAUNCHER = "accelerate launch"


@dataclass(frozen=True)
class Word:
    """One word of a launcher.

    Attributes:
        name: of the environment's variable, of the launcher's option where that leaves none (`--name`), or of a key in
            DeepSpeed's file (`a.b`).
        option: of ours that takes a value as it is, where no meaning is listed.
        means: options by value; an empty mapping for a value that says nothing.
        instead: what to give in place of any other value; empty where such values decide nothing here.
        besides: options that go with ``option``.
        all_of: the row counts where all of these words have one of these values,
        any_of: one of them has,
        none_of: and none of them has.
    """

    name: str
    option: str = ""
    means: Mapping[str, Leaves] = field(default_factory=dict)
    instead: str = ""
    besides: Leaves = field(default_factory=dict)
    all_of: Values = field(default_factory=dict)
    any_of: Values = field(default_factory=dict)
    none_of: Values = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The word as the launcher's own help has it."""
        return self.name.lower().removeprefix("accelerate_").removeprefix("deepspeed_")

    def counts(self, words: Words) -> bool:
        """Whether the launcher reads the word, by all of its words."""

        def hold(values: Values) -> list[bool]:
            return [words.get(name, "").lower() in listed for name, listed in values.items()]

        return all(hold(self.all_of)) and any(hold(self.any_of) or [True]) and not any(hold(self.none_of))

    def read(self, value: str) -> Leaves:
        """Value of the word in our options.

        Raises:
            ConfigError: it has no counterpart here.
        """
        if value.lower() in self.means:
            return self.means[value.lower()]
        if self.option:
            return {self.option: (value.lower(),), **self.besides}
        if self.instead:
            raise ConfigError(f"{LAUNCHER} says {self.shown} {value}, which is not here", self.instead)
        return {}


def _word(name: str, about: Mapping[str, Any]) -> Word:
    """A row of the file."""
    means = {value: _leaves(options) for value, options in about.get("means", {}).items()}
    return Word(
        name,
        about.get("option", ""),
        dict.fromkeys(about.get("nothing", ()), {}) | means,
        about.get("instead", ""),
        _leaves(about.get("besides", {})),
        about.get("if", {}),
        about.get("if_any", {}),
        about.get("unless", {}),
    )


def _leaves(options: Mapping[str, str | list[str]]) -> Leaves:
    return {name: (values,) if isinstance(values, str) else tuple(values) for name, values in options.items()}


_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WORDS = tuple(_word(name, about or {}) for name, about in _FILE["environment"].items())
"""Environment that the launcher of Accelerate leaves to the script it starts. A `*` stands for any end."""
FILE_WORDS = tuple(_word(name, about or {}) for name, about in _FILE["deepspeed_file"].items())
"""Keys of the file that ``--deepspeed_config_file`` names."""
READ_BY_OTHERS = {name for names in _FILE["read_by_others"].values() for name in names}
"""Words that reach whom they are for."""


@dataclass(frozen=True)
class Said:
    """A word that a launcher said, and its value in our options."""

    word: Word
    value: str
    leaves: Leaves

    def __str__(self) -> str:
        return f"{self.word.shown} {self.value}"


def row(name: str, table: tuple[Word, ...] = WORDS) -> Word | None:
    """The first row of a table that a name belongs to."""
    return next(
        (word for word in table if word.name == name or (word.name.endswith("*") and name.startswith(word.name[:-1]))),
        None,
    )


def said(words: Words, beside: Path = Path()) -> list[Said]:
    """Settings of a launcher that mean something here.

    Args:
        words: the environment, and `--name` for options that the launcher keeps to itself.
        beside: folder of the launcher's own file, where a path in it is looked for too.
    Raises:
        ConfigError: something that is not here.
    """
    decide = {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "ACCELERATE_DEEPSPEED_CONFIG_FILE"}
    uses_deepspeed = words.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if uses_deepspeed and not decide & {*words}:
        words = {**words, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}  # what Accelerate makes of none
    settings = _read(words, WORDS)
    if (file := words.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")) and uses_deepspeed:
        settings += _read(_keys_of(file, beside), FILE_WORDS)
    return settings


def _read(words: Words, table: tuple[Word, ...]) -> list[Said]:
    rows = ((row(name, table), value) for name, value in words.items())
    read = [Said(word, value, word.read(value)) for word, value in rows if word is not None and word.counts(words)]
    return [setting for setting in read if setting.leaves]


def _keys_of(file: str, beside: Path) -> Words:
    """DeepSpeed's file as words: nested keys are joined by points."""
    path = next((path for path in (Path(file), beside / file) if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{LAUNCHER} names {file} as DeepSpeed's file, and it is not there",
            "give --deepspeed_config_file a path from here, or leave it out and use --strategy zero2",
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}, DeepSpeed's file, is not JSON ({error})", "mend it, or leave it out") from None
    return dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in tree.items():
        nested = isinstance(value, Mapping)
        pairs += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", str(value).lower())]
    return pairs
