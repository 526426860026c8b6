"""The lessons' questions on their pages: asked first, the author's answer and the measured one after the reader's.

Python writes what a page without JavaScript shows, and what waits for which answer; questions.js asks, and hides it.
"""

import ast
import json
import re
from dataclasses import asdict
from html import escape

import nbformat
from nbformat import NotebookNode

from book.links import FENCED
from book.stored_questions import QUESTION, RECORD, Question, anchor, asking, parsed, questions_of

LISTING = "application/vnd.course.listing+json"
HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
PROMPT = {
    "code_prompt_show": "Code of the question, with the author's prediction",
    "code_prompt_hide": "Hide the code of the question",
}


def is_question_cell(cell: NotebookNode) -> bool:
    """Whether a cell asks the reader."""
    return any(QUESTION in output.get("data", {}) for output in cell.get("outputs", []))


def ask(cells: list[NotebookNode]) -> list[NotebookNode]:
    """A notebook's cells as a page asks them: each question a form, its code folded, what gives it away waiting for it.

    What waits for a question, up to the next heading: what was found, all else that its cell shows, and outputs between
    question and finding; then what follows directly, up to the first text and with it, and takeaways.

    Args:
        cells: of the stored notebook, with its records; they are changed.
    """
    page = _Page(questions_of(cells))
    return [made for cell in cells for made in page.cells_of(cell)]


class _Page:
    """What a page has asked and told, from its beginning to the cell that is looked at.

    Args:
        questions: of the page, by name.
    """

    def __init__(self, questions: dict[str, Question]):
        self.questions = questions
        self.pending: list[str] = []  # asked in this section, and not found yet
        self.found: list[str] = []  # in this section
        self.fresh: list[str] = []  # found just now: what follows directly is about it

    def cells_of(self, cell: NotebookNode) -> list[NotebookNode]:
        """What stands on the page for the next cell."""
        if cell.cell_type == "markdown":
            return [self._text(cell)]
        if cell.cell_type != "code":
            return [cell]
        told = [name for output in cell.outputs if (name := _recorded(output)) in self.questions]
        self.pending = [name for name in self.pending if name not in told]
        shown = [output for output in cell.outputs if _gives_away(output)]
        if told:
            self.found, self.fresh = self.found + told, told
            for output in (output for output in cell.outputs if _recorded(output) in told):
                output.data["text/html"] = _waits([_recorded(output)], output.data["text/html"])
            cell.outputs.insert(0, _mark(told, "outputs"))
        elif is_question_cell(cell) or not shown:
            # a listing shows code, and begins something else
            self.fresh = [] if is_question_cell(cell) or cell.outputs else self.fresh
        elif self.fresh or (self.found and all(map(_is_takeaway, shown))):
            cell.outputs.insert(0, _mark([*(self.fresh or self.found), *self.pending], "cell"))
        elif self.pending:
            cell.outputs.insert(0, _mark(self.pending, "outputs"))
        elif self.found:
            for output in filter(_is_takeaway, shown):
                output.data["text/html"] = _waits(self.found, output.data["text/html"])
        for output in cell.outputs:
            if name := output.get("data", {}).get(QUESTION, {}).get("name"):
                output.data["text/html"] = html(self.questions[name])
                self.pending += [name] if self.questions[name].found else []
        return _folded(cell) if is_question_cell(cell) else [cell]

    def _text(self, cell: NotebookNode) -> NotebookNode:
        code_blanked = FENCED.sub(lambda code: re.sub(r"\S", " ", code[0]), cell.source)
        heading = HEADING.search(code_blanked)
        text, rest = (cell.source[: heading.start()], cell.source[heading.start() :]) if heading else (cell.source, "")
        names = self.fresh or (self.found if text.startswith("> **Takeaway") else [])
        if names and text.strip():
            cell.source = _waits(names, f"\n\n{text.strip()}\n\n") + (f"\n\n{rest}" if rest else "")
        self.fresh = []
        if heading:
            self.pending, self.found = [], []
        return cell


def html(question: Question) -> str:
    """A question as a page without JavaScript shows it, with the data of its form."""
    data = {name: value for name, value in asdict(question).items() if name != "ask"} | {"id": question.anchor}
    choices = f"<p class='question-choices'>{escape(' · '.join(question.choices))}</p>" if question.choices else ""
    because = f" ({escape(question.because)})" if question.because else ""
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(question.ask))
    return (
        f"<div class='question' id='{question.anchor}' data-question='{escape(json.dumps(data))}'>"
        f"<p class='question-ask'><b>Your prediction.</b> {words}</p>{choices}"
        f"<details class='question-author'><summary>The author's prediction</summary>"
        f"<p>{escape(question.author)}{because}</p></details></div>"
    )


def _waits(names: list[str], inner: str) -> str:
    """HTML that is hidden until the questions are answered; without JavaScript it is not."""
    return f"<div class='waits' data-after='{' '.join(map(anchor, names))}'>{inner}</div>"


def _mark(names: list[str], hides: str) -> NotebookNode:
    """An output that says what waits with it: all other ``outputs`` of its cell, or the whole ``cell``."""
    mark = f"<div class='waits-mark' data-after='{' '.join(map(anchor, names))}' data-hides='{hides}'></div>"
    return nbformat.v4.new_output("display_data", data={"text/html": mark})


def _recorded(output: NotebookNode) -> str:
    """The name that an output keeps a value under; empty where it keeps none."""
    return output.get("data", {}).get(RECORD, {}).get("name", "")


def _is_takeaway(output: NotebookNode) -> bool:
    return "<b>Takeaway.</b>" in output.get("data", {}).get("text/html", "")


def _gives_away(output: NotebookNode) -> bool:
    """Whether an output shows something that may be found: no question, no listing, no prediction, nothing empty."""
    if "data" not in output:
        return bool(output.get("text", "error").strip())
    if QUESTION in output.data or LISTING in output.data or "<b>Predicted</b>" in output.data.get("text/html", ""):
        return False
    return any(str(content).strip() for kind, content in output.data.items() if not kind.startswith("application/vnd."))


def _folded(cell: NotebookNode) -> list[NotebookNode]:
    """A question's cell with the question's code folded, for it holds the author's prediction; other code stands above.

    Returns:
        One cell, or two: the other code with what the cell shows before it asks, and the question's.
    """
    tree = parsed(cell.source)
    calls = set(asking(tree))
    taken = {
        line
        for statement in tree.body
        if calls.intersection(ast.walk(statement))
        for line in range(statement.lineno - 1, statement.end_lineno or statement.lineno)
    }
    lines = cell.source.splitlines()
    other = "\n".join(line for at, line in enumerate(lines) if at not in taken).strip()
    made = []
    if taken and other:
        first = next(at for at, output in enumerate(cell.outputs) if QUESTION in output.get("data", {}))
        if any("waits-mark" in output.get("data", {}).get("text/html", "") for output in cell.outputs):
            first = 0  # what hides outputs stands among them
        made.append(nbformat.v4.new_code_cell(other, id=f"{cell.id[:58]}-code", outputs=cell.outputs[:first]))
        cell.outputs = cell.outputs[first:]
        cell.source = "\n".join(line for at, line in enumerate(lines) if at in taken)
    cell.metadata.tags = [*cell.metadata.get("tags", []), "hide-input"]
    cell.metadata.mystnb = {**cell.metadata.get("mystnb", {}), **PROMPT}
    return [*made, cell]
