"""What tasks have in common: rules by rank, by kind of case and by what was sent, and one way to say what is wrong.

It imports neither numpy nor torch before it is asked, as tasks of plain arithmetic do without.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.grading.rules import Seen, array, events, made_by, near, short
from course_lib.grading.task import Case, Miss, Plain, Rule, plain

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from course_lib.grading.recorder import Recorder

with Path(__file__).with_name("exercises.csv").open(encoding="utf-8", newline="") as _file:
    CATALOGUE: dict[str, dict[str, str]] = {row["name"]: row for row in csv.DictReader(_file)}
"""By name, in the order of the lessons, each exercise's row of exercises.csv, as text."""

Oracle = Callable[[Case], Any]
"""Right answer of a case: a list by rank, or the same for all of them, or several of these by name or number."""


def about(name: str) -> dict[str, Any]:
    """What exercises.csv says of an exercise, as a `Task` has it."""
    row = CATALOGUE[name]
    texts = {key: row[key] for key in ("name", "lesson", "function", "title")}
    numbers = {key: int(row[key]) for key in ("difficulty", "importance", "minutes")}
    return {**texts, **numbers, "needs_ranks": row["needs_ranks"] == "yes"}


# --- what is observed ---


def tensor(values: "np.ndarray") -> "Tensor":
    """A tensor of an answer's own, that shares no memory with the case."""
    import torch

    return torch.from_numpy(values.copy())


def part(case: Case, name: str, rank: int, axis: int = 0) -> "Tensor":
    """A rank's piece of an input that the ranks split along an axis."""
    import numpy as np

    return tensor(np.split(case.inputs[name], case.world_size, axis)[rank])


def gradients(leaves: "Mapping[str, Tensor]") -> dict[str, Any]:
    """The gradients of leaves, by their names."""
    return {name: leaf.grad for name, leaf in leaves.items()}


def noted(record: "Recorder", **values: Any) -> dict[str, Plain]:
    """An observation: what a function returned or changed, and the events of its record."""
    return {name: plain(value) for name, value in values.items()} | {"events": record.events}


# --- what is wrong ---


def unless(holds: object, expected: str, shown: str, note: str = "", step: int | None = None) -> Miss | None:
    """A miss that is no rank's own, or none where it holds."""
    return None if holds else Miss(expected, shown, note=note, step=step)


def listed(names: Sequence[str], nothing: str = "no collective") -> str:
    """Events in a line."""
    return short(", ".join(names) or nothing)


def carried(made: Sequence[str]) -> int:
    """Payload bytes of collectives."""
    return sum(int(event.split()[1]) for event in made)


def largest(made: Sequence[str]) -> int:
    """Payload bytes of the largest of collectives."""
    return max((int(event.split()[1]) for event in made), default=0)


def first_wrong(
    wrong: "np.ndarray", name: str, right: "np.ndarray", actual: "np.ndarray", digits: int = 5, said: str = ""
) -> Miss | None:
    """A miss at the first place where an array is wrong.

    Args:
        wrong: where it is.
        name: of the array.
        right: the expected numbers.
        actual: the ones found.
        digits: that both are told with.
        said: of the expected number.
    """
    import numpy as np

    if not wrong.any():
        return None
    place = tuple(map(int, np.argwhere(wrong)[0]))
    return Miss(f"{name}{list(place)} = {right[place]:.{digits}g}{said}", f"{actual[place]:.{digits}g}")


def first_apart(right: Sequence[str], actual: Sequence[str]) -> Miss | None:
    """A miss at the first event of a long list that is not the expected one."""
    if list(actual) == list(right):
        return None
    at = next((i for i, (a, b) in enumerate(zip(actual, right, strict=False)) if a != b), len(actual))
    return Miss(f"{listed(right[at : at + 3], '')} as event {at}", listed(actual[at : at + 3], "nothing more"))


def explained(miss: Miss | None, note: str) -> Miss | None:
    """A miss with a note."""
    return miss and replace(miss, note=note)


def on_rank(miss: Miss | None, rank: int) -> Miss | None:
    """A miss that is a rank's own."""
    return miss and replace(miss, rank=rank)


# --- rules ---


def each_rank(check: Callable[[Case, Seen, int], Miss | None]) -> Rule:
    """A rule: what ``check(case, seen, rank)`` finds on the first rank that shows something."""

    @wraps(check)
    def rule(case: Case, seen: Seen) -> Miss | None:
        for rank in range(case.world_size):
            if miss := check(case, seen, rank):
                return miss if miss.rank is not None else on_rank(miss, rank)
        return None

    return rule


def all_of(*rules: Rule) -> Rule:
    """A rule: the first miss of several."""
    return lambda case, seen: next((miss for rule in rules if (miss := rule(case, seen))), None)


def reads(what: str | Callable[[Case, Seen], Any]) -> Rule:
    """A rule: rank 0 has observed numbers by this name, or what a function reads without `Malformed`."""

    def rule(case: Case, seen: Seen) -> None:
        if isinstance(what, str):
            array(seen, 0, what)
        else:
            what(case, seen)

    return rule


def equals(
    key: str,
    oracle: Oracle,
    *kinds: str,
    of: str | int | None = None,
    on_all: bool = False,
    tolerance: float = 1e-4,
    first_step: int | None = None,
) -> Rule:
    """A rule: each rank's array is what the oracle says.

    Args:
        key: name of the array in an observation.
        oracle: what is right.
        kinds: of the cases that count, by their input ``kind``; in others just the shape has to be right. None: all.
        of: its name or number among what the oracle says; None: it is all.
        on_all: the oracle has it once, for all ranks, and not by rank.
        tolerance: as of `near`.
        first_step: as of `near`.
    """

    def rule(case: Case, seen: Seen) -> Miss | None:
        right = oracle(case) if of is None else oracle(case)[of]
        by_rank = [right] * case.world_size if on_all else right
        if kinds and case.inputs["kind"] not in kinds:
            array(seen, 0, key, by_rank[0].shape)
            return None
        return near(seen, key, by_rank, tolerance, first_step)

    return rule


def made_are(right: Callable[[Case], Sequence[str]]) -> Rule:
    """A rule: on each rank the collectives are ``right(case)``, such as ``all_reduce 4096``, in order."""

    @each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        made = made_by(seen, rank)
        return unless(made == right(case), short(", ".join(right(case))), listed(made))

    return rule


def bytes_at_most(limit: int | Callable[[Case], int], said: str = "at most {} bytes", nothing: str = "nothing") -> Rule:
    """A rule: the collectives of each rank carry no more than so many bytes, and on several ranks some.

    Args:
        limit: bytes, or what they are in a case.
        said: what is expected, with a place for the limit.
        nothing: word for no collective.
    """

    @each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        most, made = limit if isinstance(limit, int) else limit(case), made_by(seen, rank)
        fits = carried(made) <= most and (case.world_size == 1 or carried(made))
        return unless(fits, said.format(most), listed(made, nothing))

    return rule


def few_bytes(limit: int) -> Rule:
    """A rule: the collectives carry no more than so many bytes in all, and on several ranks some."""
    return bytes_at_most(limit, "collectives of at most {} bytes in all", "none")


def by_step(seen: Seen, rank: int, mark: str = "step") -> list[list[str]]:
    """A rank's events behind each mark, up to the next."""
    parts: list[list[str]] = []
    for event in events(seen, rank):
        if event == mark:
            parts.append([])
        elif parts:
            parts[-1].append(event)
    return parts


def each_step(check: Callable[[Case, int, list[str]], Miss | None], mark: str, steps: int) -> Rule:
    """A rule: what ``check(case, step, events)`` finds in a rank's steps; without as many of them nothing happened."""

    @each_rank
    def rule(case: Case, seen: Seen, rank: int) -> Miss | None:
        parts = by_step(seen, rank, mark)
        parts = parts if len(parts) == steps else [[] for _ in range(steps)]
        return next((miss for step, part in enumerate(parts) if (miss := check(case, step, part))), None)

    return rule


def count(happened: Sequence[str], name: str) -> int:
    """Number of the events of a name."""
    return sum(event.split()[0] == name for event in happened)
