"""Learners' cells as Python: what Jupyter runs and Python refuses, with every line where it was.

IPython turns ``!ls`` into ``get_ipython().system('ls')``, and a cell under ``%%time`` into a string: where an answer
runs there is no IPython, and a message about line 7 has to mean the learner's. So what is not Python becomes ``pass``,
and is told, and what a magic would run as Python stays. A text is looked through once and neither run nor compiled:
learners' notebooks are read outside the sandbox. IPython's own way may take five hundred tries over all of it.
"""

import re
import textwrap
from dataclasses import dataclass

RUN_CELL = ("time", "timeit", "capture", "prun", "debug", "wandb")
"""Cell magics that run the cell's other lines as Python."""
RUN_STATEMENT = "time"
"""Line magic that runs what follows it as Python, so that the notebook has what it defines."""
MOST = 256 << 10  # characters: a longer text is no answer (`course_lib.grading.runner`)
SHOWN = 60  # characters of a line that are told
TOLD = 5  # lines at most that are told

_PROMPT = re.compile(r"^[ \t]*(?:>>>|\.\.\.+:?|(?:\[\w+\] )?In \[\d+\]:)(?: |$)")
_FIRST_PROMPT = re.compile(r"[ \t]*(?:>>>(?: |$)|(?:\[\w+\] )?In \[\d+\]: )")
_CELL_MAGIC = re.compile(r"%%(\w+)(?![\w?])")
_ESCAPE = re.compile(r"([ \t]*)([%!?,;/])()")  # at the start of a statement, where Python has none of these
_ASSIGNMENT = re.compile(r"([ \t]*[A-Za-z_][^=!%(\"'#\n]*=[ \t]*)([%!])(?!=)()")
_MAGIC = re.compile(r"(\w+)(?:[ \t]+-\S+)*[ \t]+(?=\S)")
_QUESTION = re.compile(r"[\w*.\]]\?{1,2}$")
_TOKEN = re.compile(
    r'''
    (?P<quiet> [rbfuRBFU]{0,2} (?:
        """[^\\"]*(?:(?:\\.|"(?!""))[^\\"]*)*""" | \'\'\'[^\\']*(?:(?:\\.|'(?!\'\'))[^\\']*)*\'\'\'
        | (?:"""|\'\'\').*                                                      # to the end: nobody closes it
        | "[^\\"\n]*(?:\\.[^\\"\n]*)*(?:"|$|(?=\n)) | '[^\\'\n]*(?:\\.[^\\'\n]*)*(?:'|$|(?=\n)) )
      | \#[^\n]* | \\\n | [^\W\d]\w* | [ \t]+ )
  | (?P<open>[\[({]) | (?P<close>[\])}]) | (?P<end>\n)
  | (?P<space>[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]) | .''',
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Cell:
    """A cell's text as Python, as many lines as it had; and what of it is not run here, a clause each."""

    text: str
    skipped: tuple[str, ...] = ()


def python_of(source: str) -> Cell:
    """A cell, or a script, without what only IPython understands."""
    if len(source) > MOST:
        return Cell(source)
    lines = _as_typed(source.replace("\r\n", "\n").split("\n"))
    # --- cell magics, which may stand under each other ---
    for number, line in enumerate(lines):
        if magic := _CELL_MAGIC.match(line):
            if magic[1] not in RUN_CELL:
                return Cell(
                    "\n" * (len(lines) - 1),
                    (f"line {number + 1}, `%%{magic[1]}`, makes the cell something else than Python",),
                )
            lines = [*[""] * (number + 1), *_as_typed(lines[number + 1 :])]
        elif line.strip():
            break
    # --- each statement: an escape, a question, or Python ---
    text, place, line_number, made, skipped = "\n".join(lines), 0, 1, [], []
    while place < len(text):
        python, end, told = _escape(text, place) or _statement(text, place)
        rows = text.count("\n", place, end)
        if told:
            shown = " ".join(text[place:end].split())
            skipped.append(f"line {line_number}, `{shown[:SHOWN]}`, {told}")
        made.append(python + "\n" * (rows - python.count("\n")))
        place, line_number = end, line_number + rows
    more = [f"and {len(skipped) - TOLD} lines more"] if len(skipped) > TOLD else []
    return Cell("".join(made), (*skipped[:TOLD], *more))


def _as_typed(lines: list[str]) -> list[str]:
    """Lines without the prompts and the indentation of where they were copied from."""
    first = next((line for line in lines if line.strip()), "")
    if _FIRST_PROMPT.match(first):
        lines = [_PROMPT.sub("", line) for line in lines]
        first = next((line for line in lines if line.strip()), "")
    return textwrap.dedent("\n".join(lines)).split("\n") if first[:1] in (" ", "\t") else lines


def _escape(text: str, place: int) -> tuple[str, int, str] | None:
    """What stands in place of a magic or a shell's command, where the next statement begins, and why it is not run."""
    if (match := _ESCAPE.match(text, place) or _ASSIGNMENT.match(text, place)) is None:
        return None
    before, sign = match[1], match[2]
    if sign == "%" and (magic := _MAGIC.match(text, match.end())) and magic[1] == RUN_STATEMENT:
        python, end, _ = _statement(text, magic.end())
        return before + python, end, ""
    end = text.find("\n", place)
    while end > 0 and text[end - 1] == "\\":  # one command on several lines
        end = text.find("\n", end + 1)
    told = "is IPython's, and is not run here"
    python, told = (f"{before}None", f"{told}: it gives None") if "=" in before else (f"{before}pass", told)
    return python, len(text) if end < 0 else end + 1, told


def _statement(text: str, place: int) -> tuple[str, int, str]:
    """A statement, with ordinary spaces; where the next one begins; and, of a question to IPython, that it is one."""
    begin, depth, asked, pieces = place, 0, "", []
    for token in _TOKEN.finditer(text, place):
        kind, place = token.lastgroup, token.end()
        if kind == "end" and depth == 0:
            pieces.append("\n")
            break
        depth = max(0, depth + (kind == "open") - (kind == "close"))
        pieces.append(" " if kind == "space" else token[0])
        if kind != "quiet" or token[0][0] not in "# \t":
            asked = (asked + token[0])[-3:] if token[0] != ";" else asked
    if _QUESTION.search(asked):
        indent = text[begin:place].partition(text[begin:place].strip())[0]
        return f"{indent}pass", place, "asks IPython, and is not run here"
    return "".join(pieces), place, ""
