"""Mutants of the solutions: each with one operator, constant, keyword or line changed, by its syntax tree.

A check that accepts a mutant either does not look where the change shows, or the change changes nothing. Of the second
kind there is a list, with the reason for each, in ``solutions/equivalent.py``.

Source: R. A. DeMillo, R. J. Lipton, F. G. Sayward, "Hints on Test Data Selection" (1978).
"""

import ast
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.grading import masters
from course_lib.grading.check import SECONDS_PER_CASE, CheckJob, Report
from course_lib.grading.hidden import hidden_cases, load, solutions_folder
from course_lib.grading.selftest import MOST, PATIENCE, function_of, observe_all
from course_lib.grading.task import Case, Task
from course_lib.grading.tasks import TASKS

BATCH = 12
"""Mutants whose cases run in one launch."""
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
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
    for path, _ in _nodes(tree):
        for variant in range(4):
            changed = copy.deepcopy(tree)
            parent, field, index = _at(changed, path)
            said = _mutate(parent, field, index, variant)
            if said is None:
                break
            line, change = said
            if change:
                made.append(Mutant(task, line, change, ast.unparse(ast.fix_missing_locations(changed)) + "\n"))
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


def table(rows: Sequence[MutantRow]) -> str:
    """A line for each exercise, and then each mutant that is equivalent, in Markdown."""
    lines = ["| exercise | mutants | rejected | equivalent |", "|---|---:|---:|---:|"]
    names = list(dict.fromkeys(row.mutant.task for row in rows))
    for name in [*names, "all"]:
        mine = [row for row in rows if name in (row.mutant.task, "all")]
        lines.append(
            f"| {name} | {len(mine)} | {sum(bool(row.failed) for row in mine)} | "
            f"{sum(not row.failed for row in mine)} |"
        )
    lines += ["", "| exercise | line | change | why it is as good |", "|---|---:|---|---|"]
    lines += [
        f"| {row.mutant.task} | {row.mutant.line} | `{row.mutant.change}` | {row.equivalent or 'NOT LISTED'} |".replace(
            "||", "or"
        )
        for row in rows
        if not row.failed
    ]
    return "\n".join(lines)


def report(tasks: Mapping[str, Task] = TASKS) -> int:
    """Print the table; exit code 1 if a mutant was accepted that is not known to be equivalent, or the other way."""
    rows = run(tasks)
    print(table(rows))
    wrong = [row for row in rows if not row.holds]
    for row in wrong:
        said = "rejected, and listed as equivalent" if row.failed else "accepted"
        print(f"{row.mutant.task}, line {row.mutant.line}: {row.mutant.change}: {said}")
    print(f"{len(rows)} mutants, {len(wrong)} not graded as they should be")
    return 1 if wrong else 0


def _failures(
    task: Task, batch: Sequence[Mutant], cases: Sequence[Case], seconds: float = PATIENCE
) -> list[tuple[str, ...]]:
    """The properties that fail for each mutant; all of them for one that defines nothing."""
    jobs = [
        [CheckJob(task, function, case, number, seconds, MOST) for case in cases]
        for number, mutant in enumerate(batch)
        if (function := _function(task, mutant)) is not None
    ]
    failed: list[tuple[str, ...]] = [tuple(task.properties)] * len(batch)
    for mine, observed in zip(jobs, observe_all(jobs) if jobs else [], strict=True):
        findings = tuple(
            finding for case, seen in zip(cases, observed, strict=True) for finding in task.judge(case, seen)
        )
        failed[mine[0].answer] = Report(task, findings).failed
    return failed


def _function(task: Task, mutant: Mutant) -> Callable[..., Any] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return function_of(task, mutant.source)
    except Exception:  # such as a class whose body no longer runs: that is a rejection
        return None


Path_ = tuple[tuple[str, int | None], ...]


def _nodes(node: ast.AST, path: Path_ = ()) -> Iterator[tuple[Path_, ast.AST]]:
    """Every node below one, with the way to it."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST):
                here = (*path, (field, index))
                yield here, child
                yield from _nodes(child, here)


def _at(tree: ast.AST, path: Path_) -> tuple[ast.AST, str, int | None]:
    """The parent of the node at the end of a way, and where in it that is."""
    for field, index in path[:-1]:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree, *path[-1]


def _mutate(parent: ast.AST, field: str, index: int | None, variant: int) -> tuple[int, str] | None:
    """Change one node in place, in the variant-th of the ways that its kind has; what was changed, None: no such way.

    An empty change is one that would make nothing new.
    """
    value = getattr(parent, field)
    node = value if index is None else value[index]
    line = getattr(node, "lineno", getattr(parent, "lineno", 0))
    shown = isinstance(node, tuple(OPERATORS)) or (
        isinstance(node, ast.Constant) and isinstance(parent, (ast.expr, ast.keyword))
    )
    before = ast.unparse(parent if shown else node)

    def put(new: ast.AST | None) -> None:
        if index is None:
            setattr(parent, field, new)
        elif new is None:
            del value[index]
            if not value and field in ("body", "orelse", "finalbody"):
                value.extend([ast.Pass()] if field == "body" else [])
        else:
            value[index] = new

    changed: ast.AST = node
    if type(node) in OPERATORS and variant == 0:
        put(OPERATORS[type(node)]())
        changed = parent
    elif isinstance(node, ast.Constant) and variant == 0 and isinstance(node.value, (bool, int, float)):
        changed = ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        put(changed)
        changed = parent if shown else changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)) and variant == 0:
        changed = node.operand
        put(changed)
    elif isinstance(node, ast.IfExp) and variant == 0:
        changed = ast.IfExp(node.test, node.orelse, node.body)
        put(changed)
    elif isinstance(node, ast.keyword) and variant == 0 and isinstance(parent, ast.Call):
        put(None)
        return line, f"{before} -> "
    elif isinstance(node, DROPPED) and variant == 0:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return line, ""  # a docstring
        put(None)
        return line, f"{before.splitlines()[0]} -> "
    else:
        return None
    return line, f"{before} -> {ast.unparse(changed)}"
