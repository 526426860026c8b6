"""``course train --explain FIELD``: what a field of the configuration is, who reads it, and where it stands."""

import textwrap
import types
import typing
from typing import Any

from course_lib.config import Option, combinations, option
from course_lib.config import files as config_files
from course_lib.config.axes import AXES, Refusal, merged
from course_lib.config.unread import READERS

BOUNDS = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
"""Words for the limits of a number."""
INDENT = 12
"""Characters before what is told."""


def explained(name: str, width: int) -> str:
    """A field in a few lines: meaning, type, default, who reads it, its place in YAML, its other names.

    Args:
        name: of the field, or another name of it.
        width: characters that a line may have.
    Raises:
        ConfigError: there is no such field; the nearest are named.
    """
    field = option(config_files.canonical(name.removeprefix("--")))
    aliases = [alias for alias, meant in config_files.ALIASES.items() if meant == field.name]
    readers = list(dict.fromkeys(reader.only for reader in READERS if field.name in reader.fields))
    default = "none" if field.default is None else str(field.default).lower() if field.is_flag else str(field.default)
    facts = {
        "meaning": field.help,
        "type": type_of(field),
        "default": default,
        "read by": "; ".join(readers) if readers else "every run",
        "in YAML": f"{field.section}: {{{field.name}: {_example(field)}}}, or {field.name}: … at the top",
        **_combinations(field.name),
        "also": ", ".join(f"--{alias}" for alias in aliases),
    }
    lines = [
        textwrap.fill(
            text,
            width,
            initial_indent=f"  {fact:{INDENT - 2}}",
            subsequent_indent=" " * INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for fact, text in facts.items()
        if text
    ]
    return "\n".join([f"--{field.name}", *lines])


def _combinations(name: str) -> dict[str, str]:
    """Axes that an option goes together with, by engines, and those that it does not, with the reason."""
    shown = (*combinations.RANKS, *combinations.OTHERS)
    own = [axis for axis in shown if AXES[axis].option == name]
    runs, refused = [], []
    for axis in own:
        by_engines: dict[str, list[str]] = {}
        by_row: dict[Refusal, list[str]] = {}
        reasons: dict[Refusal, str] = {}
        for other in shown:
            answers = combinations.together(axis, other)
            if answers is None or other in own:
                continue
            if row := combinations.reason(axis, other):
                run = {**combinations.PLAIN, "engine": "torch", **(merged((axis, other)) or {})}
                reasons.setdefault(row, row.error(run).what)
                by_row.setdefault(row, []).append(AXES[other].word)
            else:
                engines = ", ".join(engine for engine, row in answers.items() if row is None)
                by_engines.setdefault(engines, []).append(AXES[other].word)
        start = f"{axis}: " if len(own) > 1 else ""
        runs.append(start + "; ".join(f"{', '.join(words)} ({engines})" for engines, words in by_engines.items()))
        if by_row:
            refused.append(start + "; ".join(f"{', '.join(words)}: {reasons[row]}" for row, words in by_row.items()))
    return {"with": " · ".join(runs), "not with": " · ".join(refused)}


def type_of(field: Option) -> str:
    """A field's type for people: ``a whole number from 1``, or its choices."""
    text = " or ".join(field.choices) if field.choices else _named(field.type)
    nothing = type(None) in typing.get_args(field.type)
    return f"{text}, or none" if nothing else text


def _named(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_named(member) for member in typing.get_args(kind) if member is not type(None))
    if typing.get_origin(kind) is typing.Annotated:
        plain, *limits = typing.get_args(kind)
        bounds = [
            f"{word} {getattr(limit, key)}" for limit in limits for key, word in BOUNDS.items() if hasattr(limit, key)
        ]
        return " ".join([_named(plain), *bounds])
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def _example(field: Option) -> str:
    return "…" if field.default is None else str(field.default).lower() if field.is_flag else str(field.default)
