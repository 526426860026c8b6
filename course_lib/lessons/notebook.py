"""What the notebooks share: predictions beside measurements, recorded claims, boxes, shown source.

A claim is recorded under a name and travels in the notebook's own outputs, so that a test reads
what a cell measured rather than trusting what the prose says.
"""

import inspect
import json
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from IPython.display import HTML, Code, display

MIME = "application/vnd.course.record+json"

_predictions: dict[str, float] = {}


def record(name: str, value: Any, unit: str = "") -> None:
    """Keep a measured value under a name, in the outputs of the cell, and show it.

    Args:
        name: what it is, for example ``padding_share``.
        value: anything that JSON can hold.
        unit: shown behind the value.
    """
    shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
    data = {MIME: {"name": name, "value": json.loads(json.dumps(value))},
            "text/plain": f"{name} = {shown} {unit}".rstrip()}
    display(data, raw=True)


def recorded(notebook: str | Path) -> dict[str, Any]:
    """Every value that the cells of an executed notebook recorded, by name.

    Raises:
        ValueError: a name was recorded twice.
    """
    values: dict[str, Any] = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", []):
            entry = output.get("data", {}).get(MIME)
            if entry is not None:
                if entry["name"] in values:
                    raise ValueError(f"{notebook} records {entry['name']} twice")
                values[entry["name"]] = entry["value"]
    return values


def predict(name: str, value: float, unit: str = "", because: str = "") -> float:
    """Write a prediction down before it is measured; :func:`measure` sets the two side by side."""
    _predictions[name] = value
    display(HTML(_box("#8f6b00", f"<b>Predicted</b> {escape(name)}: <b>{_number(value)}</b> {escape(unit)}"
                      + (f" <span style='opacity:.75'>({escape(because)})</span>" if because else ""))))
    return value


def measure(name: str, value: float, unit: str = "") -> float:
    """Record a measurement, and show it beside its prediction with their ratio, or how far it is from a predicted 0.

    Raises:
        KeyError: nothing was predicted under that name.
    """
    predicted = _predictions[name]
    ratio = _compared(value, predicted)
    display({MIME: {"name": name, "value": value, "predicted": predicted},
             "text/plain": f"{name}: predicted {_number(predicted)}, measured {_number(value)} {unit} ({ratio})",
             "text/html": _box("#1f5f99", f"<b>Measured</b> {escape(name)}: <b>{_number(value)}</b> {escape(unit)} "
                               f"<span style='opacity:.75'>(predicted {_number(predicted)}; {ratio})</span>")},
            raw=True)
    return value


def takeaway(text: str) -> None:
    """Box the one line to keep from a section; numbers in it come from the caller's variables."""
    display(HTML(_box("#2e7d4f", f"<b>Takeaway.</b> {escape(text)}")))


def source(thing: Callable | type, doc: bool = False) -> Code:
    """The real source of a function or class of the course, highlighted; without its docstring unless asked."""
    text = textwrap.dedent(inspect.getsource(thing))
    if not doc and thing.__doc__:
        for quotes in ('"""', "'''"):
            head, quote, rest = text.partition(quotes)
            if quote and not head.rstrip().endswith("="):
                text = head.rstrip() + "\n" + rest.partition(quotes)[2].lstrip("\n")
                break
    return Code(text, language="python")


def _compared(value: float, predicted: float) -> str:
    if predicted:
        return f"{value / predicted:.2f} of the prediction"
    return f"{_number(abs(value))} {'above' if value > 0 else 'below'} it" if value else "as predicted"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _box(colour: str, inner: str) -> str:
    """A line with a coloured edge, readable on light and dark pages."""
    return (f"<div style='border-left:4px solid {colour};padding:.4em .8em;margin:.3em 0;"
            f"background:{colour}1a'>{inner}</div>")
