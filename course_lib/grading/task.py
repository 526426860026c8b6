"""Exercises: cases drawn by the grader, observations made beside the learner's function, rules.

A task's `observe` runs in the learner's process and judges nothing; its rules run in the grader's process alone, on
plain data, and hold the oracle. So nothing that a learner's code can reach decides about its points.
"""

import random
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pprint import pformat
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # arithmetic does without: it is checked in the book's pages, which have no numpy
    import numpy as np

Plain: TypeAlias = Any
"""None, bool, int, float, str, a list or dict of these, or a numpy array: all that crosses a process border."""


MAX_DESCRIBED = 220
"""Characters of a case in a line."""


@dataclass(frozen=True)
class Case:
    """One call of the learner's function on each of ``world_size`` ranks.

    Attributes:
        world_size: ranks, each with a process group of just these; 1 for a task without ranks.
        inputs: what was drawn, the same for all ranks.
    """

    world_size: int
    inputs: dict[str, Plain]


@dataclass(frozen=True)
class Miss:
    """Place where a property does not hold.

    Attributes:
        expected: in a few words.
        found: likewise.
        rank: the first rank that shows it; None where it is no rank's own.
        note: what helps to understand it: a ratio, a drawing; may have several lines.
        step: the first of several steps that shows it; None where a case has one, or it is no step's own.
    """

    expected: str
    found: str
    rank: int | None = None
    note: str = ""
    step: int | None = None


class Malformed(Exception):
    """An observation that is not of the form that a rule reads; carries the Miss to report."""

    def __init__(self, miss: Miss):
        self.miss = miss
        super().__init__(f"expected {miss.expected}, found {miss.found}")


@dataclass(frozen=True)
class Finding:
    """Whether a property holds in one case.

    Attributes:
        property: its name.
        holds: whether it does.
        rank: the rank that shows that it does not; None where it holds or is no rank's own.
        expected: in a few words; empty where it holds.
        found: likewise.
        note: as of a `Miss`.
        case: the case in words, such as `described` gives; empty where it holds or nobody is to know.
        step: as of a `Miss`.
    """

    property: str
    holds: bool
    rank: int | None
    expected: str
    found: str
    note: str = ""
    case: str = ""
    step: int | None = None


Observation: TypeAlias = Mapping[str, Plain]
Part: TypeAlias = Callable[[Any, int, int], Plain]
"""(an input, rank, world size) -> the input in its form, without what is another rank's."""
Rule: TypeAlias = Callable[[Case, Sequence[Observation]], Miss | None]


@dataclass(frozen=True)
class Property:
    """A behaviour that earns points.

    Attributes:
        points: for it in all cases; none if it fails in one.
        rule: from a case and the ranks' observations, None where it holds. May raise `Malformed`.
    """

    points: int
    rule: Rule


@dataclass(frozen=True)
class Met:
    """Mean over ranks as seen from outside, where rank 1 of two is our own (`course_lib.grading.trusted_peer`).

    Attributes:
        property: whose points hang on the result.
        key: observation that holds the result.
        brings: what rank 0 itself has of it, flat.
    """

    property: str
    key: str
    brings: Callable[[Case], "np.ndarray"]


@dataclass(frozen=True)
class Task:
    """An exercise as the grader sees it: how cases are drawn, run and judged.

    Attributes:
        name: ``topic.mechanism``.
        lesson: notebook that it belongs to, without its ending.
        function: name that the learner's cell defines.
        title: a few words.
        difficulty: 1 (fill in a line) to 5 (build a mechanism).
        importance: 1 to 5.
        minutes: that it takes.
        draw: makes cases; the public ones from ``random.Random(0)``.
        observe: (function, case, rank) -> observation. Runs on each rank, beside the learner's code.
        properties: by name.
        needs_ranks: False: a pure function, one process without a process group.
        own: inputs of which each rank has its own part, each with what a rank is given of it in the sandbox: what the
            others hold can only reach it from them.
        met: for a mean by all-reduces; None: each rank is the learner's.
        shown: a case's inputs in words, where `described` would not say enough of them to make the case by hand.
        essential: properties that are the point of the exercise: without one of them an answer earns at most a third
            of the points (`most`). None of them: its parts are exercises of their own.
    """

    name: str
    lesson: str
    function: str
    title: str
    difficulty: int
    importance: int
    minutes: int
    draw: Callable[[random.Random], list[Case]]
    observe: Callable[[Callable[..., Any], Case, int], dict[str, Plain]]
    properties: Mapping[str, Property]
    needs_ranks: bool = True
    own: Mapping[str, Part] = field(default_factory=dict)
    met: Met | None = None
    shown: Callable[[dict[str, Plain]], str] | None = None
    essential: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.essential) - set(self.properties)
        assert not unknown, f"{self.name} has no properties {unknown}"

    def most(self, failed: Container[str]) -> int:
        """The points that an answer without some properties earns at most."""
        whole = sum(self.points.values())
        return whole // 3 if any(name in failed for name in self.essential) else whole

    @property
    def points(self) -> dict[str, int]:
        """Points by property."""
        return {name: prop.points for name, prop in self.properties.items()}

    @property
    def grade_id(self) -> str:
        """nbgrader's name for the answer cell, where it allows no dot: ``ddp-bucketing``."""
        return self.name.replace(".", "-")

    def cases(self, rng: random.Random) -> list[Case]:
        """Cases with shapes, seeds and world sizes drawn from ``rng``."""
        return self.draw(rng)

    def judge(self, case: Case, observations: Sequence[Observation]) -> list[Finding]:
        """One finding per property, from what the ranks observed.

        An observation of a function that raised is ``{"error": text, "at": seconds}``: then no property holds, and the
        error that came first is told, since others follow from it.
        """
        errors = [
            (_at(seen), rank, str(seen["error"]) if isinstance(seen, Mapping) else "no observation")
            for rank, seen in enumerate(observations)
            if not isinstance(seen, Mapping) or "error" in seen
        ]
        if errors:
            _, rank, error = min(errors)
            return [
                Finding(name, False, rank, "a result", error, case=self._described(case)) for name in self.properties
            ]
        if len(observations) != case.world_size:
            actual = f"from {len(observations)}"
            return [
                Finding(name, False, None, f"observations from {case.world_size} ranks", actual)
                for name in self.properties
            ]
        return [self._finding(name, case, observations) for name in self.properties]

    def _finding(self, name: str, case: Case, observations: Sequence[Observation]) -> Finding:
        try:
            miss = self.properties[name].rule(case, observations)
        except Malformed as malformed:
            miss = malformed.miss
        if miss is None:
            return Finding(name, True, None, "", "")
        return Finding(name, False, miss.rank, miss.expected, miss.found, miss.note, self._described(case), miss.step)

    def _described(self, case: Case) -> str:
        return self.shown(case.inputs) if self.shown else described(case, self.needs_ranks)


def described(case: Case, on_ranks: bool = True) -> str:
    """A case in words: its ranks, and of its inputs the numbers and the shapes; long ones without arrays as Python."""
    ranks = [f"{case.world_size} ranks" if case.world_size > 1 else "1 rank"] * on_ranks
    text = ", ".join([*ranks, *(f"{name} {_form(value)}" for name, value in case.inputs.items() if value is not None)])
    if len(text) <= MAX_DESCRIBED:
        return text
    if any(map(_has_array, case.inputs.values())):
        return text[: MAX_DESCRIBED - 3] + "..."
    return "\n".join(
        [
            *ranks,
            *(
                f"{name} = {pformat(value, width=100, compact=True, sort_dicts=False)}"
                for name, value in case.inputs.items()
            ),
        ]
    )


def is_array(value: Plain) -> bool:
    """Whether a value is an array of numpy; where numpy was never imported, nothing is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _has_array(value: Plain) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return is_array(value) or (isinstance(value, (list, tuple)) and any(map(_has_array, value)))


def _form(value: Plain) -> str:
    """A number or a text itself, of an array its shape, of a list with arrays the distinct shapes in it."""
    if is_array(value):
        return "x".join(map(str, value.shape)) or "a number"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} {_form(item)}" for name, item in value.items()) + "}"
    if isinstance(value, (list, tuple)) and any(
        is_array(item) or isinstance(item, (list, tuple, dict)) for item in value
    ):
        forms = [_form(item) for item in value]
        return f"{len(forms)} of {forms[0]}" if len(set(forms)) == 1 else "[" + ", ".join(forms) + "]"
    return str(value)


def _at(seen: Observation) -> float:
    """When an error was raised; 0 where it does not say."""
    at = seen.get("at") if isinstance(seen, Mapping) else None
    return at if isinstance(at, float) else 0.0


def plain(value: Any) -> Plain:
    """Plain data from what a learner's function returned: tensors as arrays, tuples as lists.

    Raises:
        TypeError: a value of another kind.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
        return value.item()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy().copy()
    if is_array(value):
        return value
    raise TypeError(f"the function returned a {type(value).__name__}; return numbers, strings, tensors, lists or dicts")


def earned(task: Task, findings: Sequence[Finding]) -> int:
    """Points: a property's own, if all its findings hold and there is one; in all at most `Task.most`."""
    verdicts: dict[str, bool] = {}
    for finding in findings:
        verdicts[finding.property] = verdicts.get(finding.property, True) and finding.holds
    held = {name for name in task.points if verdicts.get(name, False)}
    return min(sum(task.points[name] for name in held), task.most(task.points.keys() - held))


def name_of(word: str, tasks: Mapping[str, Task]) -> str | None:
    """The name of the task that is called so, or whose function is."""
    return word if word in tasks else next((task.name for task in tasks.values() if task.function == word), None)
