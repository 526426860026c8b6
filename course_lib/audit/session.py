"""Runs a model on one process and on every layout, and compares."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from course_lib.audit.layouts import Layout
from course_lib.audit.subject import Make, Record, observe
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
    """

    reference: Record
    verdicts: list[Verdict]
    refused: dict[Layout, str]

    @property
    def clean(self) -> bool:
        """At least one layout ran, and in none anything differs."""
        return bool(self.verdicts) and all(verdict.clean for verdict in self.verdicts)


def audit(make: Make, layouts: Iterable[Layout], *, timeout: float = 120.0) -> Audited:
    """Compare one process with every layout; ranks are processes of this machine over gloo.

    Args:
        make: called on each rank, see :class:`course_lib.audit.subject.Subject`. It splits the batch itself, as the
            layout says; ``NotImplementedError`` says that it has no such layout.
        layouts: to be compared with one process.
        timeout: seconds for each.
    Raises:
        CourseError: ``make`` or a step raised, or did not end; two runs of one process differ, or the ranks do not
            begin with the weights of one process: the verdict would be of that.
    """
    run = functools.partial(_observe_all, make, timeout)
    reference, again = (run(Layout())[0] for _ in range(2))
    _check_deterministic(reference, again)
    verdicts, refused = [], {}
    for layout in layouts:
        try:
            found = run(layout)
        except NotImplementedError as error:
            refused[layout] = str(error)
            continue
        _check_start(reference, found, layout)
        verdicts.append(judge(reference, found, layout))
    return Audited(reference, verdicts, refused)


def _observe_all(make: Make, timeout: float, layout: Layout) -> list[Record]:
    """What each rank did.

    Raises:
        NotImplementedError: ``make`` has no such layout.
        CourseError: anything else that was raised, or a rank that did not end.
    """
    try:
        return launch(observe, make, layout, STEPS, num_processes=layout.ranks, device="cpu", timeout=timeout,
                      stream=False)
    except RankError as error:
        if isinstance(error.cause, NotImplementedError):
            raise error.cause from None
        calls = [line.strip() for line in error.failure.traceback.splitlines()
                 if line.strip().startswith("File ") and "site-packages" not in line]
        where = f" ({calls[-1].removeprefix('File ')})" if calls else ""
        raise CourseError(f"{layout}: rank {error.rank} {error.failure.summary}{where}",
                          "let it run in this layout before it is audited") from None
    except RanksHung as error:
        raise CourseError(f"{layout}: {str(error).splitlines()[0]}",
                          "call each collective on all its ranks, or give a longer timeout") from None


def _check_deterministic(first: Record, second: Record) -> None:
    if not first.gradients:
        raise CourseError("no gradient was seen: `optimizer.step()` was not called, or no parameter has one",
                          "give the optimizer that steps, with parameters that the loss reaches")
    for name, gradient in first.gradients.items():
        other = second.gradients[name]
        if gradient is not None and (other is None or not torch.equal(gradient, other)):
            raise CourseError(f"two runs of one process differ in the gradient of `{name}`",
                              "seed what is drawn, switch dropout off, and use deterministic operations")


def _check_start(reference: Record, found: list[Record], layout: Layout) -> None:
    for rank, record in enumerate(found):
        for name, weight in record.start.items():
            right = reference.start.get(name)
            if right is None:
                raise CourseError(f"rank {rank} of {layout} has a parameter `{name}`, and one process has none",
                                  "give names as in one process, without what a wrapper adds")
            if weight.shape == right.shape and not torch.equal(weight, right):
                raise CourseError(f"`{name}` begins with other values on rank {rank} of {layout} than in one process",
                                  "build the model from the same seed on every rank, or from the same file")
