"""Kit of the notebooks: questions, predictions beside measurements, recorded claims, boxes, shown source.

A claim is recorded under a name and travels in the notebook's own outputs, so that a test reads
what a cell measured rather than trusting what the prose says.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import nbformat
import pandas as pd
from IPython.display import HTML, display

from course_lib import learner_files
from course_lib.lessons import boxes, questions, widget_display
from course_lib.lessons.listing import Listing

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

MIME = "application/vnd.course.record+json"
QUESTION = "application/vnd.course.question+json"
"""Of a cell that asks the learner: the name that is asked for."""
How: TypeAlias = Literal["measured", "computed", "simulated", "published"]


@dataclass
class Prediction:
    """The author's expectation under a name, and the learner's question, where one was asked."""

    value: Any
    label: str
    choices: dict[str, Any] = field(default_factory=dict)
    question: questions.Question | None = None
    asked: bool = False


_predictions: dict[str, Prediction] = {}


def record(name: str, value: Any, unit: str = "", *, show: str | None = None) -> None:
    """Keep a value under a name in the outputs of the cell, for the lesson's test; on the page only where asked.

    Args:
        name: what it is, for example ``padding_share``.
        value: anything that JSON can hold.
        unit: shown behind the value.
        show: a phrase; then the page has a line with the phrase, the value and its unit.
    """
    data: dict[str, Any] = {MIME: {"name": name, "value": json.loads(json.dumps(value))}}
    if show is None:
        data |= {"text/html": "", "text/plain": ""}
    else:
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        data["text/plain"] = f"{show}: {shown} {unit}".rstrip()
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


def predict(
    name: str,
    value: Any,
    unit: str = "",
    because: str = "",
    *,
    ask: str | None = None,
    choices: Mapping[str, Any] | Sequence[Any] | None = None,
    label: str | None = None,
) -> Any:
    """Write a prediction down before it is measured; with ``ask``, ask the learner for theirs first.

    :func:`measure` sets the predictions and the measurement side by side. In JupyterLab a question has a field and a
    button that keeps the learner's answer (:mod:`course_lib.learner_files`). It can be changed until the measurement
    has been seen. Where nobody sits before the kernel, and in the stored notebook, there is the question alone. The
    author's prediction is folded below it.

    The question stands in a cell before that of :func:`measure`: a field that appears with its answer is no question.

    Args:
        name: what it is, for example ``ring_bytes``.
        value: the author's prediction: a number, a truth value or words.
        unit: of the value.
        because: the author's reason, as a phrase.
        ask: a question in words.
        choices: to choose the answer from: values, or values by what the learner reads. Without it, a number is asked.
        label: what the boxes say; otherwise the name's words.

    Returns:
        ``value``.
    """
    prediction = _predictions[name] = Prediction(
        value, label or name.replace("_", " "), boxes.labelled(choices), asked=ask is not None
    )
    shown = _shown(value, unit, prediction.choices)
    reason = f" <span style='{boxes.FAINT}'>({escape(because)})</span>" if because else ""
    author = boxes.kind_box("predicted", f"{escape(prediction.label)}: <b>{escape(shown)}</b>{reason}")
    if ask is None:
        display(HTML(author))
        return value
    said = f"Your prediction. {ask}"
    options = f" <span style='{boxes.FAINT}'>{escape(' · '.join(prediction.choices))}</span>"
    page = boxes.box(
        *boxes.LOOKS["predicted"], f"<b>Your prediction.</b> {escape(ask)}" + (options if prediction.choices else "")
    )
    fold = f"<details><summary>The author&#x27;s prediction</summary>{author}</details>"
    answers = questions.current()
    if entry := answers.entry(name):
        page += f"<div>You: <b>{escape(_shown(entry['value'], unit, prediction.choices))}</b></div>"
    bundle = {"text/html": page + fold, "text/plain": said, QUESTION: {"name": name}}
    if learner_files.is_live():
        prediction.question = questions.Question(name, ask, unit, prediction.choices, fold, answers)
        bundle |= widget_display.view(prediction.question.widget)
    display(bundle, raw=True)
    return value


def measure(name: str, value: Any, unit: str = "", *, how: How = "measured", label: str | None = None) -> Any:
    """Record a value, and show it beside the learner's answer and the author's prediction.

    Shown is the ratio to each, or how far it is from a predicted 0; of choices, whether it was the nearest one.

    Args:
        name: that it was predicted under.
        value: a number, a truth value or words.
        unit: of the value.
        how: where the value comes from: ``measured`` in a run of this notebook, ``computed`` by a formula,
            ``simulated``, or ``published`` by others.
        label: what the box says; otherwise what the prediction's says.

    Returns:
        ``value``.
    Raises:
        KeyError: nothing was predicted under that name.
        ValueError: no such ``how``.
    """
    prediction = _predictions[name]
    if how == "predicted" or how not in boxes.LOOKS:
        raise ValueError(f"how={how!r}: a value is measured, computed, simulated or published")
    value = value.item() if hasattr(value, "item") else value
    choices, said = prediction.choices, label or prediction.label
    ratio = boxes.compared(value, prediction.value, choices=list(choices.values()))
    expected, actual = _shown(prediction.value, "", choices), _shown(value, unit, choices)
    plain = f"{said}: predicted {expected}, {how} {actual} ({ratio})"
    detail = f"predicted {expected}; {ratio}"
    answers = questions.current()
    if prediction.asked and (entry := answers.entry(name)):
        yours = _shown(entry["value"], "", choices)
        of_yours = boxes.compared(value, entry["value"], "your answer", list(choices.values()))
        plain = f"{said}: you: {yours}, the author: {expected}, {how}: {actual} ({of_yours}; {ratio})"
        detail = f"you: {yours}, {of_yours}; the author: {expected}, {ratio}"
        answers.seen(name, value, list(choices.values()))
    if prediction.question:
        prediction.question.closed = True
    display(
        {
            MIME: {"name": name, "value": value, "predicted": prediction.value, "how": how},
            "text/plain": plain,
            "text/html": boxes.kind_box(
                how, f"{escape(said)}: <b>{escape(actual)}</b> <span style='{boxes.FAINT}'>({escape(detail)})</span>"
            ),
        },
        raw=True,
    )
    return value


def takeaway(text: str) -> None:
    """Box the one line to keep from a section; numbers in it come from the caller's variables."""
    display(HTML(boxes.box("#2e7d4f", "solid", f"<b>Takeaway.</b> {escape(text)}")))


def source(thing: Callable | type, doc: bool = True) -> Listing:
    """The real source of a function or class of the course, highlighted, below a link to its file and lines.

    Args:
        thing: function, method, class or module of the course.
        doc: with its docstring.
    """
    return Listing.of(thing, doc)


def left_aligned(table: pd.DataFrame) -> "Styler":
    """A table of words, which pages would otherwise set flush right, as they do numbers."""
    left = table.style.set_uuid("words").set_properties(**{"text-align": "left"})
    return left.set_table_styles([{"selector": "th", "props": "text-align:left"}])


def text_table(frame: pd.DataFrame) -> "Styler":
    """A table of long texts: :func:`left_aligned`, in lines that break, without the index."""
    whole = {"white-space": "normal", "vertical-align": "top"}
    return left_aligned(frame).hide().format(precision=3).set_properties(**whole)


def _shown(value: Any, unit: str, choices: dict[str, Any]) -> str:
    label = questions.label_of(value, choices)
    if label is value or label == boxes.number(value):
        return boxes.with_unit(value, unit)
    return str(label)
