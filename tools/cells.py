"""Cells of lessons that are made from course_lib/parallel/minimal: its classes, without types and docstrings.

A cell whose metadata has ``minimal``, a list of ``module.name``, is the source of these; `python tools/notebooks.py
--listings` writes it anew.
"""

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

KEY = "minimal"
PACKAGE = "course_lib.parallel.minimal"
Span = tuple[tuple[int, int], tuple[int, int]]
"""From and to, each a line (from 0) and a byte in it."""


def source_of(names: Sequence[str]) -> str:
    """The text of a cell that shows some classes and functions.

    Args:
        names: ``module.name`` each, in the package of the shortest forms.
    """
    shown = []
    for each in names:
        module, _, name = each.partition(".")
        shown.append(lean(inspect.getsource(getattr(importlib.import_module(f"{PACKAGE}.{module}"), name))))
    return "\n\n".join(shown)


def lean(source: str) -> str:
    """A definition at the top of a file, without annotations and docstrings; its comments stay."""
    lines = [line.encode() for line in source.splitlines()]
    for (first, start), (last, end) in sorted(_unwanted(ast.parse(source)), reverse=True):
        lines[first : last + 1] = [lines[first][:start] + lines[last][end:]]
    text = "\n".join(line.decode().rstrip() for line in lines)
    ruff = [str(Path(sys.executable).parent / "ruff"), "format", "--quiet", "--line-length", "120", "-"]
    return subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout.strip()


def _unwanted(tree: ast.AST) -> Iterator[Span]:
    """Annotations of arguments, results and variables, and docstrings with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation:
            yield _between(node.lineno, node.col_offset + len(node.arg.encode()), node.annotation)
        elif isinstance(node, ast.AnnAssign):
            yield _between(node.target.end_lineno, node.target.end_col_offset, node.annotation)
        if isinstance(node, ast.FunctionDef) and node.returns:
            yield (node.returns.lineno - 1, node.returns.col_offset - 4), _end(node.returns)  # " -> "
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            said, follows = node.body[0], node.body[1]
            decorators = getattr(follows, "decorator_list", [])
            yield (said.lineno - 1, 0), (min(each.lineno for each in (follows, *decorators)) - 1, 0)


def _between(line: int | None, byte: int | None, annotation: ast.expr) -> Span:
    assert line is not None and byte is not None
    return (line - 1, byte), _end(annotation)


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno - 1, node.end_col_offset
