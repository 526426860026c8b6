"""The report of a check, as it is printed for the learner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from course_lib.grading.task import Case, Finding, Observation, Task, earned


@dataclass(frozen=True)
class Report:
    """Findings of a check; prints as the answer to the learner.

    Attributes:
        task: that was checked.
        findings: of all cases.
    """

    task: Task
    findings: tuple[Finding, ...]

    @property
    def points(self) -> int:
        """Points earned."""
        return earned(self.task, self.findings)

    @property
    def failed(self) -> tuple[str, ...]:
        """Properties that do not hold in some case."""
        return tuple(
            name
            for name in self.task.properties
            if not all(finding.holds for finding in self.findings if finding.property == name)
        )

    def __str__(self) -> str:
        whole = sum(self.task.points.values())
        lines = [f"{self.task.name}: {self.points} of {whole} points"]
        misses = {finding.property: finding for finding in reversed(self.findings) if not finding.holds}
        told: set[tuple[str, str]] = set()
        for name, points in self.task.points.items():
            miss = misses.get(name)
            lines.append(f"  {'no ' if miss else 'yes'}  {name} ({points})")
            if miss and (miss.expected, miss.found) not in told:  # an error is every property's
                told.add((miss.expected, miss.found))
                if cause := self._cause(miss, misses.values()):
                    lines.append(
                        f"       from step {miss.step} on; `{cause.property}` is wrong in step {cause.step} "
                        "already: mend that first"
                    )
                where = "" if miss.rank is None or not self.task.needs_ranks else f" on rank {miss.rank}"
                lines.append(f"       expected{where}: {miss.expected}; found: {miss.found}")
                lines += [f"       {line}" for line in [*miss.note.splitlines(), *miss.case.splitlines()] if line]
        if self.task.most(self.failed) < whole and self.points:
            point = ", ".join(f"`{name}`" for name in self.task.essential if name in self.failed)
            most = self.task.most(self.failed)
            lines.append(f"  without {point}, which is the point of it, at most {most} point{'s' * (most != 1)}")
        return "\n".join(lines)

    @staticmethod
    def _cause(miss: Finding, misses: Iterable[Finding]) -> Finding | None:
        """The miss of another property, in the same case and an earlier step, that this one may follow from."""
        earlier = [
            other
            for other in misses
            if other.case == miss.case and miss.step is not None and other.step is not None and other.step < miss.step
        ]
        return min(earlier, key=lambda other: other.step or 0, default=None)


def of_case(task: Task, case: Case, seen: Sequence[Observation], place: str) -> list[Finding]:
    """The findings in one of several cases; their ``case`` begins with ``place``, such as ``case 2 of 4``."""
    return [replace(finding, case=finding.case and f"{place}: {finding.case}") for finding in task.judge(case, seen)]
