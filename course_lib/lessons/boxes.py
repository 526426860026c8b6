"""Boxes of the lessons: a word, a colour and a left edge for each kind of number."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

LOOKS = {
    "predicted": ("#8f6b00", "dashed"),
    "measured": ("#1f5f99", "solid"),
    "computed": ("#7a3e9d", "double"),
    "simulated": ("#00705c", "dotted"),
    "published": ("#6b6b6b", "ridge"),
}
"""Colour and left edge by the word that says where a number comes from; the edges differ without the colours."""
FAINT = "opacity:.75"


def box(colour: str, edge: str, inner: str) -> str:
    """HTML of one or more lines behind a coloured edge, readable on light and dark pages."""
    return (
        f"<div style='border-left:6px {edge} {colour};padding:.4em .8em;margin:.3em 0;"
        f"background:{colour}1a'>{inner}</div>"
    )


def kind_box(kind: str, inner: str) -> str:
    """The box of a key of ``LOOKS``, beginning with its word."""
    return box(*LOOKS[kind], f"<b>{kind.capitalize()}</b> {inner}")


def number(value: Any) -> str:
    """A number in few digits; a truth value as yes or no; words as they are."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def with_unit(value: Any, unit: str) -> str:
    """A number and its unit, which is given in the plural: 2 ranks, 1 rank, 3 bytes per rank."""
    shown, (first, *rest) = number(value), unit.split(" ")
    if shown == "1" and first != "times" and re.fullmatch(r"[a-z-]{2,}[^s]s", first):
        unit = " ".join([first[:-1], *rest])
    return f"{shown} {unit}".rstrip()


def labelled(choices: Mapping[str, Any] | Sequence[Any] | None) -> dict[str, Any]:
    """Choices by what the learner reads: values alone are read as numbers are."""
    if choices is None:
        return {}
    if isinstance(choices, Mapping):
        return dict(choices)
    return {number(value): value for value in choices}


def compared(value: Any, expected: Any, word: str = "the prediction", choices: Sequence[Any] = ()) -> str:
    """Compare a value with the expected one: the ratio, or the distance from 0, or whether it was the right choice.

    Args:
        value: a number, a truth value or words.
        expected: of the same kind.
        word: what was expected, as "the prediction" or "your answer".
        choices: those that there were.
    """
    same = "as predicted" if word == "the prediction" else f"as in {word}"
    if choices or isinstance(value, (str, bool)) or isinstance(expected, (str, bool)):
        return same if is_close(expected, value, choices) else f"not {same}"
    if expected:
        return f"{value / expected:.2f} of {word}"
    return f"{number(abs(value))} {'above' if value > 0 else 'below'} it" if value else same


def is_close(answer: Any, value: Any, choices: Sequence[Any] = ()) -> bool:
    """Whether an answer counts as close: the right choice, or within 10 % of the value (1e-6 of a value of 0).

    Args:
        answer: the learner's.
        value: what was found.
        choices: those that there were; of numbers, the right one is the nearest to the value.
    """
    if isinstance(value, (str, bool)) or isinstance(answer, (str, bool)):
        return answer == value
    if choices:
        return abs(answer - value) <= min(abs(choice - value) for choice in choices if not isinstance(choice, str))
    return abs(answer - value) <= max(0.1 * abs(value), 1e-6) * (1 + 1e-9)  # 1.1 is 10 % from 1, and rounds above it
