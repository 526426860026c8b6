"""Lines of our engines, changed one at a time, under `course audit`: is each wrong gradient seen?

    python -m benchmarks.audit_mutants      # from the repository's root; writes benchmarks/audit-mutants.md

A mutant is a line of course_lib/parallel and what stands there instead, on every rank of a layout of more than one.
They are in audit_mutants.tsv: all that rules (a collective or call left out, a divisor, a factor, an index, a condition
turned round) make of the lines that a step runs, except for those that raise an error there, and for `wait()`, whose
lack is a race.
"""

import csv
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import HERE, options, publish, table
from course_lib.audit import Layout, Subject, audit
from course_lib.errors import CourseError
from course_lib.training.audited_models import ModelOnEngine
from tests.audit import subjects, upstream

TIMEOUT = 20.0
"""Seconds until ranks that wait for each other are ended; that is one way of being caught."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed line.

    Attributes:
        engine: that runs it, see :func:`engine`.
        module: below course_lib.parallel.
        line: as it stands, without its indentation.
        instead: what stands there.
        equivalent: why no gradient can differ; empty where one must.
        at: which of the module's lines that read so, from 0.
    """

    engine: str
    module: str
    line: str
    instead: str
    equivalent: str = ""
    at: int = 0


def read_mutants() -> list[Mutant]:
    """Mutants of audit_mutants.tsv, whose columns are the attributes."""
    with (HERE / "audit_mutants.tsv").open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [Mutant(**row | {"at": int(row["at"])}) for row in rows]


MUTANTS = read_mutants()


@functools.cache
def small_qwen(tied: bool) -> ModelOnEngine:
    """For the tensor ranks; written to a folder before there are any."""
    return ModelOnEngine("qwen3", "scratch", tie_word_embeddings=tied)


def gradients_kept(layout: Layout) -> tuple:
    """Data parallelism whose gradients are zeroed between steps, and not dropped."""
    model, optimizer, *rest = subjects.ours("ddp", layout)
    optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
    return model, optimizer, *rest


def two_backwards(layout: Layout) -> Subject | tuple:
    """ZeRO-2, two micro-batches per step, each reduced."""
    made = subjects.ours("zero2", layout)

    def loss(model: Any, batch: Any) -> Any:
        halves = list(zip(*(tensor.chunk(2) for tensor in batch), strict=True))
        first = subjects.mean_loss(model, halves[0]) / 2
        first.backward()
        return subjects.mean_loss(model, halves[1]) / 2 + first.detach()

    return dataclasses.replace(made, loss=loss)


def engine(name: str) -> tuple[Callable[[Layout], Any], tuple[Layout, ...]]:
    """How it is made, and the layouts of its audit."""
    if name.startswith("tensor_parallel"):
        return small_qwen("tied" in name), (Layout(tp=2), Layout(dp=2, tp=2))
    if name == "experts":
        return upstream.mixture, (Layout(ep=2), Layout(dp=2, ep=2))
    makers = {"ddp, gradients kept": gradients_kept, "zero2, two backwards": two_backwards}
    return makers.get(name) or functools.partial(subjects.ours, name), (Layout(dp=2), Layout(dp=3))


def functions(space: dict[str, Any], module: str) -> Iterator[tuple[str, types.FunctionType]]:
    """Those that a module defines, and its classes' methods, by their full names."""
    for name, value in space.items():
        if inspect.isclass(value) and value.__module__ == module:
            for inner, method in vars(value).items():
                method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if inspect.isfunction(method):
                    yield f"{name}.{inner}", inspect.unwrap(method)
        elif inspect.isfunction(value) and value.__module__ == module:
            yield name, inspect.unwrap(value)


def apply(mutant: Mutant) -> None:
    """Change the code of the functions in this process; who has imported them sees it too.

    Raises:
        LookupError: there is no such line, or it is in no function.
    """
    name = f"course_lib.parallel.{mutant.module}"
    module = sys.modules.get(name) or __import__(name, fromlist=["x"])
    lines = Path(module.__file__ or "").read_text(encoding="utf-8").splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines) if line.strip() == mutant.line]
    if len(numbers) <= mutant.at:
        raise LookupError(f"{mutant.module} has no line `{mutant.line}`")
    number = numbers[mutant.at]
    lines[number] = lines[number].replace(mutant.line, mutant.instead)
    changed = types.ModuleType(name)
    changed.__file__ = module.__file__
    exec(compile("".join(lines), module.__file__ or name, "exec"), vars(changed))
    new, count = dict(functions(vars(changed), name)), 0
    for title, function in functions(vars(module), name):
        if function.__code__ != new[title].__code__:
            function.__code__, count = new[title].__code__, count + 1
    if not count:
        raise LookupError(f"{mutant.module}: `{mutant.line}` is in no function")


def _mutated(mutant: Mutant, make: Callable[[Layout], Any], layout: Layout) -> Subject | tuple:
    if layout.ranks > 1:
        apply(mutant)
    return make(layout)


def said(mutant: Mutant) -> str:
    """What the audit says of a mutant; empty: nothing, on any of its layouts."""
    make, layouts = engine(mutant.engine)
    try:
        audited = audit(functools.partial(_mutated, mutant, make), layouts, timeout=TIMEOUT)
    except CourseError as error:
        return str(error).partition(' ("')[0]
    for verdict in audited.verdicts:
        if verdict.wrong:
            more = f"; so {len(verdict.wrong) - 1} more" if len(verdict.wrong) > 1 else ""
            return f"{verdict.layout}: {verdict.wrong[0].sentence}{more}"
        if not verdict.clean:
            what = "losses" if not verdict.losses_agree else "weights" if verdict.weights else "buffers"
            return f"{verdict.layout}: the gradients agree, the {what} do not"
    return ""


def main() -> None:
    """Audit all, and write the table.

    Raises:
        SystemExit: one that is not equivalent was not seen, or one that is called so was.
    """
    options(__doc__)
    rows, wrong = [], []
    for mutant in MUTANTS:
        told = said(mutant)
        if bool(told) == bool(mutant.equivalent):
            wrong.append(f"{mutant}: {told or 'not seen'}")
        text = " ".join((told or f"nothing: {mutant.equivalent}").split())
        rows.append((mutant.engine, mutant.module, f"`{mutant.line}`", f"`{mutant.instead}`", text[:230]))
    if wrong:
        raise SystemExit("\n".join(wrong))
    equivalent = sum(bool(mutant.equivalent) for mutant in MUTANTS)
    publish(
        "audit-mutants",
        "Mutants of our engines under `course audit`",
        ("torch",),
        f"{len(MUTANTS)} lines of `course_lib/parallel`, each changed alone, on all ranks: "
        f"{len(MUTANTS) - equivalent} are caught, {equivalent} change no gradient, and it says nothing of them.",
        table("engine | module | line | instead | the audit says", rows),
    )


if __name__ == "__main__":
    main()
