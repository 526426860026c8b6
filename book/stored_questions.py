"""The questions of a stored lesson: read from what `predict` and `measure` leave in its outputs and its code."""

import ast
import re
from dataclasses import dataclass
from html import unescape
from typing import Any

from nbformat import NotebookNode

from course_lib.lessons import boxes

QUESTION, RECORD = "application/vnd.course.question+json", "application/vnd.course.record+json"
ASKED = re.compile(
    r"<div [^>]*><b>Your prediction\.</b> (?P<ask>.*?)(?: <span [^>]*>(?P<choices>.*?)</span>)?</div>"
    r"(?:<div>You: .*?</div>)?<details><summary>[^<]*</summary>"
    r"<div [^>]*><b>Predicted</b> (?P<label>.*?): <b>(?P<author>.*?)</b>(?: <span [^>]*>\((?P<because>.*)\)</span>)?"
    r"</div></details>",
    re.DOTALL,
)
"""What `predict(ask=...)` leaves in a stored notebook."""
MEASURED = re.compile(r"<div [^>]*><b>\w+</b> .*?: <b>(?P<shown>.*?)</b> <span [^>]*>\(.*\)</span></div>", re.DOTALL)
"""And `measure`."""


@dataclass(frozen=True)
class Found:
    """What the lesson found, where a question asked for it.

    Args:
        value: a number, a truth value or words.
        shown: with its unit.
        how: measured, computed, simulated or published.
    """

    value: Any
    shown: str
    how: str


@dataclass(frozen=True)
class Question:
    """A question of a lesson, as its stored notebook has it.

    Args:
        name: that answers are kept under.
        ask: the question, in words.
        unit: of the number asked for.
        choices: what one chooses from; empty: a number is asked for.
        right: those of the choices that count as right.
        author: the author's prediction, with its unit.
        because: the author's reason, may be empty.
        predicted: the author's prediction as a value; None where nothing was found.
        author_close: whether it counts as close to what was found, as the reader's would.
        found: None where the lesson measures nothing under that name.
    """

    name: str
    ask: str
    unit: str
    choices: tuple[str, ...]
    right: tuple[str, ...]
    author: str
    because: str
    predicted: Any
    author_close: bool
    found: Found | None

    @property
    def anchor(self) -> str:
        """Its element's id."""
        return anchor(self.name)


def anchor(name: str) -> str:
    """The id of a question's element."""
    return "question-" + re.sub(r"\W+", "-", name)


def questions_of(cells: list[NotebookNode]) -> dict[str, Question]:
    """A notebook's questions by name, each with what is found under that name later on.

    Raises:
        ValueError: a stored output is not what the library writes, or nothing says which choice is right.
    """
    asked: dict[str, Question] = {}
    for at, cell in enumerate(cells):
        for output in cell.get("outputs", []):
            if QUESTION in output.get("data", {}):
                name = output.data[QUESTION]["name"]
                said = ASKED.fullmatch(output.data["text/html"])
                if not said:
                    raise ValueError(f"the question {name} is not stored as predict() writes it: run the lesson again")
                asked[name] = _question(
                    name,
                    {key: unescape(text or "") for key, text in said.groupdict().items()},
                    _record(name, cells[at:]),
                    cell.source,
                )
    return asked


def _record(name: str, cells: list[NotebookNode]) -> NotebookNode | None:
    """The output that holds what was found under a name."""
    return next(
        (
            output.data
            for cell in cells
            for output in cell.get("outputs", [])
            if output.get("data", {}).get(RECORD, {}).get("name") == name
        ),
        None,
    )


def _question(name: str, said: dict[str, str], record: NotebookNode | None, source: str) -> Question:
    choices = tuple(said["choices"].split(" · ")) if said["choices"] else ()
    found = None
    if record is not None:
        shown = MEASURED.fullmatch(record["text/html"])
        if not shown:
            raise ValueError(f"the measurement {name} is not stored as measure() writes it: run the lesson again")
        found = Found(record[RECORD]["value"], unescape(shown["shown"]), record[RECORD]["how"])
    units = [re.sub(r"^\S+ ?", "", shown) for shown in (said["author"], found.shown if found else said["author"])]
    # a unit stands in the singular behind 1
    unit = "" if choices else units[1] if said["author"].startswith("1 ") else units[0]
    predicted = record[RECORD]["predicted"] if record is not None else None
    values = _values(choices, source)
    right = _right(name, choices, found, values) if found and choices else ()
    close = found is not None and boxes.is_close(predicted, found.value, [*values.values()])
    return Question(name, said["ask"], unit, choices, right, said["author"], said["because"], predicted, close, found)


def _right(name: str, choices: tuple[str, ...], found: Found, values: dict[str, float]) -> tuple[str, ...]:
    """The choices that are right: the one that was found, or, of numbers, the nearest to it."""
    if found.shown in choices:
        return (found.shown,)
    right = tuple(label for label, value in values.items() if boxes.is_close(value, found.value, [*values.values()]))
    if not right:
        raise ValueError(f"nothing says which choice of {name} is right: write its choices as a dict of numbers")
    return right


def _values(choices: tuple[str, ...], source: str) -> dict[str, float]:
    """The numbers that choices stand for: by the dict in the question's cell that has them as keys, else as written."""
    try:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Dict) and [getattr(key, "value", None) for key in node.keys] == list(choices):
                return dict(zip(choices, map(_number, node.values), strict=True))
        return {label: float(label.replace(",", "")) for label in choices}
    except ValueError:
        return {}  # words, or what only a running notebook knows


def _number(node: ast.expr) -> float:
    """A number, or a quotient of two.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return ast.literal_eval(node.left) / ast.literal_eval(node.right)
    return float(ast.literal_eval(node))


def parsed(source: str) -> ast.Module:
    """A cell as Python; an empty program for one with a line that is IPython's."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module([], [])


def asking(cell: ast.Module) -> list[ast.Call]:
    """The calls in a cell that ask."""
    return [
        node
        for node in ast.walk(cell)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "predict"
        and any(keyword.arg == "ask" for keyword in node.keywords)
    ]
