"""A question to the learner: a field, a button that keeps the answer, and the file that it is kept in."""

import math
import re
from html import escape
from typing import Any

import ipywidgets as widgets

from course_lib import learner_files
from course_lib.errors import DataError
from course_lib.lessons import boxes

MANY = 6
"""Choices beyond which a list that opens takes less of the page than buttons."""


class Answers:
    """The learner's answers in one lesson.

    Args:
        file: that they are kept in.
        lesson: None where nobody says which lesson runs: then there are no answers, and none are kept.
    """

    def __init__(self, file: learner_files.LearnerFile, lesson: str | None):
        self.file, self.lesson = file, lesson or ""

    def entry(self, name: str) -> dict[str, Any] | None:
        """Entry that was kept under a name, or None; a damaged file is kept aside and said in one line."""
        if not self.lesson:
            return None
        try:
            if said := self.file.set_aside():
                print(said)
            entry = self.file.read().get(self.lesson, {}).get(name)
        except (DataError, OSError) as error:
            print(error)
            return None
        return entry if entry and "value" in entry else None

    def keep(self, name: str, value: Any) -> str:
        """Keep an answer, unless its measurement has been seen.

        Returns:
            What was in the way, in one line; empty where it is kept.
        """
        if not self.lesson:
            return "nobody says which lesson this is: set the environment variable COURSE_LESSON to keep answers"
        refused: list[str] = []

        def edit(content: dict[str, Any]) -> None:
            answers = content.setdefault(self.lesson, {})
            if "measured" in answers.get(name, {}):
                measured = boxes.number(answers[name]["measured"])
                refused.append(f"your answer stays: you have seen the result ({measured})")
            else:
                answers[name] = {"value": value, "when": learner_files.now()}

        return self._change(edit) or "".join(refused)

    def seen(self, name: str, measured: Any, choices: list[Any]) -> None:
        """Keep what was found beside the learner's answer, the first time that it is shown."""

        def edit(content: dict[str, Any]) -> None:
            entry = content[self.lesson][name]
            if "measured" not in entry:
                entry |= {"measured": measured, "close": boxes.is_close(entry["value"], measured, choices)}

        entry = self.entry(name)
        if entry and "measured" not in entry and (problem := self._change(edit)):
            print(problem)

    def _change(self, edit: Any) -> str:
        try:
            if said := self.file.change(edit):
                print(said)
        except DataError as error:
            return str(error)
        return ""


def current() -> Answers:
    """Answers of the notebook that runs."""
    return Answers(learner_files.answers_file(), learner_files.lesson_name())


class Question:
    """A question's widgets.

    Args:
        name: that the answer is kept under.
        ask: the question, in words.
        unit: of the answer.
        choices: values by what the learner reads; none: a number is asked for.
        author: HTML below the field.
        answers: where it is kept.

    Attributes:
        field: Text, RadioButtons or Dropdown.
        button: keeps what the field holds.
        status: says whether it is kept.
        widget: all of it.
        closed: the result has been shown in this session.
    """

    def __init__(self, name: str, ask: str, unit: str, choices: dict[str, Any], author: str, answers: Answers):
        self.name, self.unit, self.choices, self.answers, self.closed = name, unit, choices, answers, False
        if choices:
            chooser = widgets.RadioButtons if len(choices) <= MANY else widgets.Dropdown
            self.field = chooser(options=list(choices), value=None, layout={"width": "max-content"})
        else:
            # A busy kernel gets the first of several changes, then the click, then the last change: so one change only.
            self.field = widgets.Text(placeholder="a number", continuous_update=False, layout={"width": "12em"})
        self.button = widgets.Button(description="Keep my answer", layout={"width": "max-content"})
        self.status = widgets.HTML()
        self.button.on_click(lambda _: self.keep())
        parts = [self.field, widgets.HTML(escape(unit)), self.button, self.status]
        line = widgets.HBox(parts, layout={"align_items": "center", "flex_flow": "row wrap"})
        self.widget = widgets.VBox([widgets.HTML(question_html(ask)), line, widgets.HTML(author)])
        if entry := answers.entry(name):
            self._show(entry)
        self.field.observe(lambda _: self._say("not kept yet"), names="value")

    def keep(self) -> None:
        """Keep what the field holds, and say so."""
        if self.closed:
            self._say("the result is shown already, so this would be no prediction: run this cell again first")
            return
        if self.choices:
            if self.field.value is None:
                self._say("choose one first")
                return
            value = self.choices[self.field.value]
        else:
            try:
                value = parsed(self.field.value)
            except ValueError:
                self._say("write a number, as 12, 0.5, 3/4, 1e9 or 40 %")
                return
        problem = self.answers.keep(self.name, value)
        self._say(problem or f"kept: {boxes.with_unit(self._label(value), self.unit)}")

    def _show(self, entry: dict[str, Any]) -> None:
        label = self._label(entry["value"])
        if not self.choices or label in self.choices:
            self.field.value = label if self.choices else f"{label:.10g}"
        said = f"kept {entry['when'][:10]}: {boxes.with_unit(label, self.unit)}"
        if "measured" in entry:
            self.field.disabled = self.button.disabled = True
            said += f"; found: {boxes.with_unit(entry['measured'], self.unit)}"
        self._say(said)

    def _label(self, value: Any) -> Any:
        return label_of(value, self.choices)

    def _say(self, text: str) -> None:
        self.status.value = f"<span role='status'>{escape(text)}</span>"


def question_html(ask: str) -> str:
    """The question as it stands on every page."""
    return boxes.box(*boxes.LOOKS["predicted"], f"<b>Your prediction.</b> {escape(ask)}")


def label_of(value: Any, choices: dict[str, Any]) -> Any:
    """Text that the learner reads for a value: its choice's label, else itself."""
    return next((label for label, choice in choices.items() if choice == value and type(choice) is type(value)), value)


def parsed(text: str) -> float:
    """A number as people write it: 1,000, 0,5, 3/4, 40 %, 1e9.

    Raises:
        ValueError: it is not a finite number.
    """
    text = text.replace("_", "").replace(" ", "")
    thousands = re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?%?", text) and not text.startswith("0,")
    text = text.replace(",", "" if thousands else ".")
    scale = 1.0
    if text.endswith("%"):
        text, scale = text[:-1], 0.01
    top, slash, bottom = text.partition("/")
    try:
        value = float(top) / float(bottom) * scale if slash else float(text) * scale
    except ZeroDivisionError:
        raise ValueError("a division by 0") from None
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
