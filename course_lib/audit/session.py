"""Runs a model on one process and on every layout, and compares."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from course_lib.audit.attribution import Parts, attribute
from course_lib.audit.layouts import Layout
from course_lib.audit.subject import Make, Record, observe, observe_parts
from course_lib.audit.verdict import Verdict, judge
from course_lib.errors import CourseError
from course_lib.launching.launch import RankError, RanksHung, launch

STEPS = 2
"""Of each run: the second one shows what the first one's update made of the gradient."""


@dataclass(frozen=True)
class Audited:
    """All layouts.

    Attributes:
        reference: of one process.
        verdicts: of the layouts that ran.
        refused: why a layout did not, in the words of ``make``.
        notes: what was changed for the comparison.
        failed: what was raised in a layout; a finding too, where others ran.
    """

    reference: Record
    verdicts: list[Verdict]
    refused: dict[Layout, str]
    notes: list[str] = field(default_factory=list)
    failed: dict[Layout, str] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """At least one layout ran, and in none anything differs."""
        return bool(self.verdicts) and not self.failed and all(verdict.clean for verdict in self.verdicts)


def audit(make: Make, layouts: Iterable[Layout], *, timeout: float = 120.0) -> Audited:
    """Compare one process with every layout; ranks are processes of this machine over gloo.

    Args:
        make: called on each rank, see :class:`course_lib.audit.subject.Subject`. It splits the batch itself, as the
            layout says; ``NotImplementedError`` says that it has no such layout.
        layouts: to be compared with one process.
        timeout: seconds for each.
    Raises:
        CourseError: two runs of one process differ, or its loss reaches no weight; or in every layout ``make`` or a
            step raised or did not end, or the ranks do not begin with its weights: the verdict would be of that.
    """
    import torch._dynamo  # noqa: F401  (every optimizer does: 0.8 s of each rank that is forked from here)

    reference, dropout, notes = _reference(make, timeout)

    def gradients_of(batches: list[Any]) -> Parts:
        return _on_ranks(Layout(), timeout, observe_parts, make, batches, dropout)[0]

    verdicts, refused = [], {}
    failed: dict[Layout, CourseError] = {}
    for layout in layouts:
        try:
            observed = _on_ranks(layout, timeout, observe, make, layout, STEPS, dropout=dropout)
            _check_start(reference, observed, layout)
        except NotImplementedError as error:
            refused[layout] = str(error)
            continue
        except CourseError as error:
            failed[layout] = error
            continue
        verdict = judge(reference, observed, layout)
        if verdict.wrong:
            attribute(verdict, reference, observed, gradients_of)
        verdicts.append(verdict)
    if failed and not verdicts:
        raise next(iter(failed.values()))
    return Audited(
        reference,
        verdicts,
        refused,
        notes,
        {layout: str(error).removeprefix(f"{layout}: ") for layout, error in failed.items()},
    )


def _reference(make: Make, timeout: float) -> tuple[Record, bool, list[str]]:
    """One process, whether its dropout draws, and what is to be said of it.

    Raises:
        CourseError: it cannot be compared with: two runs differ, or its loss reaches no weight.
    """

    def alone(seed: int, dropout: bool = True) -> Record:
        return _on_ranks(Layout(), timeout, observe, make, Layout(), STEPS, seed, dropout)[0]

    first = alone(0)
    check_reaches(first)
    if (name := _differing(first, alone(0))) is not None:
        raise CourseError(
            f"two runs of one process differ in the gradient of `{name}`",
            "use deterministic operations, and read no clock",
        )
    if (name := _differing(first, alone(1))) is None:
        return first, True, []
    if first.dropouts:
        quiet = alone(0, dropout=False)
        if (name := _differing(quiet, alone(1, dropout=False))) is None:
            check_reaches(quiet)
            return (
                quiet,
                False,
                [
                    f"dropout is switched off (modules: {first.dropouts}), on one process and on all "
                    "layouts: ranks draw other numbers than one process"
                ],
            )
    raise CourseError(
        f"the step draws at random: with another seed one process has another gradient of `{name}`",
        "switch off what draws (dropout of functions and of attention, noise, samplers), or seed it in "
        "each step as on one process",
    )


def _on_ranks(layout: Layout, timeout: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What each rank gives.

    Raises:
        NotImplementedError: ``make`` has no such layout.
        CourseError: anything else that was raised, or a rank that did not end.
    """
    try:
        return launch(
            function, *args, num_processes=layout.ranks, device="cpu", timeout=timeout, stream=False, **kwargs
        )
    except RankError as error:
        if isinstance(error.cause, NotImplementedError):
            raise error.cause from None
        calls = [
            line.strip()
            for line in error.failure.traceback.splitlines()
            if line.strip().startswith("File ") and "site-packages" not in line
        ]
        where = f" ({calls[-1].removeprefix('File ')})" if calls else ""
        raise CourseError(
            f"{layout}: rank {error.rank} {error.failure.summary}{where}",
            "let it run in this layout before it is audited",
        ) from None
    except RanksHung as error:
        raise CourseError(
            f"{layout}: {str(error).splitlines()[0]}", "call each collective on all its ranks, or give a longer timeout"
        ) from None


def check_reaches(record: Record) -> None:
    """Refuse a reference whose loss reaches no weight.

    Raises:
        CourseError: no gradient, zeros alone, or one that is not finite.
    """
    held = {name: gradient for name, gradient in record.gradients.items() if gradient is not None}
    if not held:
        raise CourseError(
            "no gradient was seen: `optimizer.step()` was not called, or no parameter has one",
            "give the optimizer that steps, with parameters that the loss reaches",
        )
    for name, gradient in held.items():
        if not gradient.isfinite().all():
            raise CourseError(
                f"one process has a gradient of `{name}` that is not finite",
                "lower the learning rate or the scale of the loss, and mend what divides by zero",
            )
    if not record.norm:
        raise CourseError(
            f"the loss reaches no weight: all {len(held)} gradients of one process are zero",
            "let the loss depend on the model's output, and detach nothing between them",
        )


def _differing(first: Record, second: Record) -> str | None:
    """The first parameter whose gradient is not the same to the bit."""
    for name, gradient in first.gradients.items():
        other = second.gradients[name]
        if gradient is not None and (other is None or not torch.equal(gradient, other)):
            return name
    return None


def _check_start(reference: Record, observed: list[Record], layout: Layout) -> None:
    for rank, record in enumerate(observed):
        for name, weight in record.start.items():
            right = reference.start.get(name)
            if right is None:
                raise CourseError(
                    f"rank {rank} of {layout} has a parameter `{name}`, and one process has none",
                    "give names as in one process, without what a wrapper adds",
                )
            if weight.shape == right.shape and not torch.equal(weight, right):
                raise CourseError(
                    f"`{name}` begins with other values on rank {rank} of {layout} than in one process",
                    "build the model from the same seed on every rank, or from the same file",
                )
