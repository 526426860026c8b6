"""Mutants of the solutions: each with one operator, constant, keyword or line changed, by its syntax tree.

A check that accepts a mutant either does not look where the change shows, or the change changes nothing. Of the second
kind there is a list, with the reason for each, in ``solutions/equivalent.py``.

Source: R. A. DeMillo, R. J. Lipton, F. G. Sayward, "Hints on Test Data Selection" (1978).
"""

import ast
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.grading import masters
from course_lib.grading.check import SECONDS_PER_CASE
from course_lib.grading.hidden import hidden_cases, load, solutions_folder
from course_lib.grading.selftest import MOST, PATIENCE, function_of, reports
from course_lib.grading.task import Case, Task
from course_lib.grading.tasks import TASKS

BATCH = 12
"""Mutants whose cases run in one launch."""
EXCHANGED = (
    (ast.Add, ast.Sub),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
    (ast.Mult, ast.Div),
)
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **dict(EXCHANGED),
    **{second: first for first, second in EXCHANGED},
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
DROPPED = (ast.Expr, ast.AugAssign, ast.If, ast.For, ast.Delete)
"""Statements that a mutant does without; without an assignment or an import it would not run at all."""


@dataclass(frozen=True)
class Mutant:
    """A solution with one thing changed.

    Attributes:
        task: name of the exercise.
        line: of the change, in the solution.
        change: ``before -> after``; after a dropped statement nothing.
        source: its text.
    """

    task: str
    line: int
    change: str
    source: str


@dataclass(frozen=True)
class MutantRow:
    """Outcome of a mutant.

    Attributes:
        failed: the properties that rejected it.
        equivalent: why it is none the worse; empty where it was to be rejected.
    """

    mutant: Mutant
    failed: tuple[str, ...]
    equivalent: str

    @property
    def holds(self) -> bool:
        """Whether it was rejected, or is known to change nothing."""
        return bool(self.failed) != bool(self.equivalent)


def mutants(task: str, solution: str) -> list[Mutant]:
    """All mutants of a solution, in the order of its lines."""
    tree = ast.parse(solution)
    made = []
    for number in range(sum(1 for _ in _places(tree))):
        changed = copy.deepcopy(tree)
        if said := _mutate(*next(itertools.islice(_places(changed), number, None))):
            made.append(Mutant(task, *said, ast.unparse(ast.fix_missing_locations(changed)) + "\n"))
    return sorted(made, key=lambda mutant: mutant.line)


def run(tasks: Mapping[str, Task] = TASKS, folder: Path | None = None, seed: int = 1) -> list[MutantRow]:
    """Check all mutants of some exercises, on public cases and on hidden ones drawn by ``seed``.

    Raises:
        DataError: a file of the instructor's is missing.
    """
    folder = folder or solutions_folder()
    reasons = load(folder / "equivalent.py").EQUIVALENT
    rows = []
    for task in tasks.values():
        solution = masters.answers(folder / f"{task.lesson}.ipynb")[task.name]
        cases = [*task.cases(random.Random(0)), *hidden_cases(task, random.Random(seed), folder)]
        every = mutants(task.name, solution)
        for first in range(0, len(every), BATCH):
            batch = every[first : first + BATCH]
            for mutant, failed in zip(batch, _failures(task, batch, cases), strict=True):
                reason = reasons.get((task.name, mutant.change), "")
                if failed and reason:  # as good as the solution: so it has as much patience, on a busy machine
                    (failed,) = _failures(task, [mutant], cases, SECONDS_PER_CASE)
                rows.append(MutantRow(mutant, failed, reason))
    return rows


def _failures(
    task: Task, batch: Sequence[Mutant], cases: Sequence[Case], seconds: float = PATIENCE
) -> list[tuple[str, ...]]:
    """The properties that fail for each mutant; all of them for one that defines nothing."""
    functions = [_function(task, mutant) for mutant in batch]
    failed = iter(reports(task, [(function, seconds, MOST) for function in functions if function], cases))
    return [next(failed).failed if function else tuple(task.properties) for function in functions]


def _function(task: Task, mutant: Mutant) -> Callable[..., Any] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return function_of(task, mutant.source)
    except Exception:  # such as a class whose body no longer runs: that is a rejection
        return None


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where every node below one stands: its parent, the field there, and the place in that where it is a list."""
    for field, value in ast.iter_fields(tree):
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                yield tree, field, index
                yield from _places(child)


def _mutate(parent: ast.AST, field: str, index: int | None) -> tuple[int, str] | None:
    """Change the node at a place; the line and the change, None where a node of its kind has none."""
    value = getattr(parent, field)
    node = value if index is None else value[index]
    new: ast.AST | None = None
    if type(node) in OPERATORS:
        new = OPERATORS[type(node)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        new = ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        new = node.operand
    elif isinstance(node, ast.IfExp):
        new = ast.IfExp(node.test, node.orelse, node.body)
    elif not _can_go(node, parent):
        return None
    # --- an operator and a number are shown with what is around them ---
    around = type(node) in OPERATORS or (isinstance(node, ast.Constant) and isinstance(parent, (ast.expr, ast.keyword)))
    before = ast.unparse(parent if around else node)
    if index is None:
        setattr(parent, field, new)
    elif new is not None:
        value[index] = new
    else:
        del value[index]
        if field == "body" and not value:
            value.append(ast.Pass())
    after = "" if new is None else ast.unparse(parent if around else new)
    line = getattr(node, "lineno", getattr(parent, "lineno", 0))
    return line, f"{before if after else before.splitlines()[0]} -> {after}"


def _can_go(node: ast.AST, parent: ast.AST) -> bool:
    """Whether a node is a call's keyword, or a statement of `DROPPED` other than a docstring."""
    if isinstance(node, ast.keyword):
        return isinstance(parent, ast.Call)
    return isinstance(node, DROPPED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
