"""Result of a grading as plain JSON: of a hidden case only whether each property held."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from course_lib.grading.task import Finding, Task

TIMEOUT, MEMORY, PROCESSES, OUTPUT = "timeout", "too much memory", "too many processes", "too much output"
CRASHED, NO_ANSWER, HIDDEN_ERROR = "crashed", "no answer", "failed in a hidden case"
TEXT_CHARACTERS = 500


@dataclass(frozen=True)
class Score:
    """Points for one property of a task.

    Attributes:
        points: earned. Where a property that is the point of the task fails, those that hold may earn less than their
            maximum: together what `Task.most` says.
        maximum: to be earned.
        said: why it does not hold, for the learner to read; empty where it did.
    """

    points: int
    maximum: int
    said: str = ""


@dataclass(frozen=True)
class Verdict:
    """Result of one answer to one task.

    Attributes:
        task: its name.
        scores: by property.
        error: why no property was judged, or not in every case; None where all were.
        seconds: that the grading took.
    """

    task: str
    scores: Mapping[str, Score]
    error: str | None
    seconds: float

    @property
    def points(self) -> int:
        return sum(score.points for score in self.scores.values())

    @property
    def maximum(self) -> int:
        return sum(score.maximum for score in self.scores.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back."""
        return asdict(self) | {"points": self.points, "maximum": self.maximum}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Verdict":
        """The verdict that `to_json` gave."""
        return cls(
            data["task"],
            {name: Score(**score) for name, score in data["scores"].items()},
            data["error"],
            data["seconds"],
        )


def printable(text: str) -> str:
    """Somebody else's text, cut to TEXT_CHARACTERS, with nothing in it that a terminal or a file cannot take."""
    return "".join(character if character.isprintable() else "?" for character in text[:TEXT_CHARACTERS])


def scores_of(
    task: Task, public: Sequence[Finding], hidden: Sequence[Finding] | None, error: str | None
) -> dict[str, Score]:
    """Points per property: its own if it was judged, held wherever it was, and nothing went wrong besides.

    What all of them earn is at most `Task.most`.
    """
    said_of = {}
    for name in task.points:
        shown = [finding for finding in public if finding.property == name]
        unseen = [finding for finding in hidden or () if finding.property == name]
        missed = next((finding for finding in shown if not finding.holds), None)
        if missed:
            where = f" on rank {missed.rank}" if missed.rank is not None else ""
            note = f" ({missed.note})" if missed.note and "\n" not in missed.note else ""
            case = f"; {' '.join(missed.case.split())}" if missed.case else ""
            said = printable(f"expected {missed.expected}, found {missed.found}{where}{note}{case}")
        elif error is not None:
            said = error
        elif not shown or (hidden is not None and not unseen):
            said = "not judged"
        elif not all(finding.holds for finding in unseen):
            said = "does not hold in a hidden case"
        else:
            said = ""
        said_of[name] = said
    left = task.most({name for name, said in said_of.items() if said})
    scores = {}
    for name, points in task.points.items():
        mine = 0 if said_of[name] else min(points, left)
        left -= mine
        scores[name] = Score(mine, points, said_of[name])
    return scores
