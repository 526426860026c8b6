"""Claims of a lesson's words about its numbers: tests/notebooks/claims/NAME.yaml, held against a page.

    python tools/claims.py [notebooks/02_data_parallel.ipynb …]

A file is a list of claims. `says` are words of the page, `holds` an expression over what its cells recorded and the
names of its parameters cell, with the margin that the words need. `timed: true` marks one that rests on seconds, or on
a training so short that rounding decides: only the stored page has to fulfil it. `near(a, b, rel)` is there, and
Python's own functions of numbers and lists.
"""

import ast
import html
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.lessons.notebook import recorded  # noqa: E402

FOLDER = ROOT / "tests" / "notebooks" / "claims"
FUNCTIONS = {f.__name__: f for f in (abs, all, any, len, list, max, min, round, set, sorted, str, sum, zip)}


@dataclass(frozen=True)
class Claim:
    """Words of a page, and what has to hold of its recorded numbers where they are said."""

    says: str
    holds: str
    timed: bool = False

    def failure(self, page: str, values: dict[str, Any]) -> str:
        """Why a page does not bear the claim out, in one line; empty where it does."""
        if squeezed(self.says) not in page:
            return f"no cell says “{self.says}”: if the sentence has changed, look whether `{self.holds}` still fits"
        names = {node.id for node in ast.walk(ast.parse(self.holds, mode="eval")) if isinstance(node, ast.Name)}
        bound = {
            node.id
            for node in ast.walk(ast.parse(self.holds, mode="eval"))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        known = FUNCTIONS | {"near": near, "inf": math.inf} | values
        if unknown := sorted(names - bound - set(known)):
            return f"“{self.says}” rests on {', '.join(unknown)}, which no cell records"
        if eval(self.holds, {"__builtins__": {}} | known):
            return ""
        found = ", ".join(f"{name} = {values[name]}" for name in sorted(names & set(values)))
        return f"the page says “{self.says}”, and `{self.holds}` does not hold: {found}"


def near(a: float, b: float, rel: float) -> bool:
    """Whether two numbers differ by no more than a share of the second."""
    return abs(a - b) <= rel * abs(b)


def of_lesson(name: str) -> list[Claim]:
    """The claims of a lesson, in the order of its file."""
    return [Claim(**entry) for entry in yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")) or ()]


def untrue(path: Path, *, counted_only: bool = False) -> list[str]:
    """What an executed notebook says and its own numbers do not bear out, a line each.

    Args:
        path: the notebook; its name without suffix names the claims.
        counted_only: without the claims that rest on seconds.
    """
    notebook = nbformat.read(path, as_version=4)
    page, values = squeezed(" ".join(texts(notebook))), parameters(notebook) | recorded(path)
    failures = (claim.failure(page, values) for claim in of_lesson(path.stem) if not (counted_only and claim.timed))
    return [failure for failure in failures if failure]


def parameters(notebook: nbformat.NotebookNode) -> dict[str, Any]:
    """The parameters cell's names, and those that papermill put in their place."""
    values = {}
    for cell in notebook.cells:
        if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", ())):
            for line in ast.parse(cell.source).body:
                if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                    values[line.targets[0].id] = ast.literal_eval(line.value)
    return values


def texts(notebook: nbformat.NotebookNode) -> Iterator[str]:
    """All that a reader reads: prose, and the text of outputs."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield cell.source
        for output in cell.get("outputs", ()):
            yield from (output[key] for key in ("text",) if key in output)
            data = output.get("data", {})
            yield from (data[kind] for kind in ("text/html", "text/plain", "text/markdown") if kind in data)


def squeezed(text: str) -> str:
    """Text without markup and line ends, so that a sentence is found however it is set."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>|[*_`$\\{}]", "", text))).casefold()


if __name__ == "__main__":
    pages = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    failures = {path.stem: untrue(path) for path in pages}
    for name, lines in failures.items():
        print(f"{name}: {len(of_lesson(name))} claims, {len(lines)} untrue", *lines, sep="\n  ")
    sys.exit(any(failures.values()))
