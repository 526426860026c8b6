"""Report of a watchdog: the ranks that caused the hang, every rank's state, and the stacks."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.hangs.diagnosis import Culprit, describe, place
from course_lib.hangs.rank_state import RankSnapshot
from course_lib.writing import write_text

HANG_FOLDER = "hang"
"""In a run's folder."""


@dataclass(frozen=True)
class ReportedRank:
    """One rank, as it was when the report was written.

    Attributes:
        step: of its last beat; -1 before the first.
        sequence: number, in its group, of the last collective that it issued; None where it has issued none, as for
            all that follows but ``seconds_since`` and ``alive``.
        shape: of what it handed in.
        group: global ranks.
        file: where the collective was issued, in the user's code.
        ended: whether the collective had.
        seconds_since: it made progress.
        alive: whether its process is there, stopped or not.
    """

    rank: int
    pid: int
    host: str
    step: int
    sequence: int | None
    collective: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    group: tuple[int, ...] | None
    file: str | None
    line: int | None
    ended: bool
    seconds_since: float
    alive: bool

    @classmethod
    def of(cls, seen: RankSnapshot) -> "ReportedRank":
        last = seen.calls[-1] if seen.calls else None
        issued = {name: getattr(last, name, None) for name in ("sequence", "shape", "dtype", "file", "line")}
        return cls(
            seen.rank,
            seen.pid,
            seen.host,
            seen.step,
            collective=getattr(last, "name", None),
            group=getattr(last, "ranks", None),
            ended=last is not None and last.ended,
            seconds_since=seen.stalled,
            alive=seen.life not in ("dead", "silent"),
            **issued,
        )


@dataclass(frozen=True)
class HangReport:
    """Report that one rank wrote.

    Attributes:
        rank: who wrote it.
        seconds: without progress after which it was written; fewer where a rank had died.
        verdicts: the ranks to blame; empty where all had come to the same collectives.
        states: every rank's.
        stacks: the Python stacks of every rank that could answer.
        backend_error: what NCCL had said has gone wrong, such as ``COMM_ERROR``.
    """

    rank: int
    seconds: float
    verdicts: tuple[Culprit, ...]
    states: tuple[ReportedRank, ...]
    stacks: str
    backend_error: str | None = None

    @property
    def summary(self) -> str:
        """The verdicts in one line."""
        said = "; ".join(verdict.sentence for verdict in self.verdicts) or (
            "no rank is behind: all have come to the same collectives, and those do not end; look at the network"
        )
        return f"{said}; NCCL reports {self.backend_error}" if self.backend_error else said

    def write(self, folder: Path, snapshots: Sequence[RankSnapshot], backend: Any = None) -> None:
        """Write ``hang-rank{R}.txt`` and ``.json``.

        Args:
            folder: where; it is made if need be.
            snapshots: for each rank's last calls.
            backend: what the backends' own flight recorders hold, or None.
        Raises:
            OSError: they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        content = dataclasses.asdict(self) | {
            "calls": {seen.rank: [dataclasses.asdict(call) for call in seen.calls] for seen in snapshots},
            "backend": backend,
        }
        write_text(folder / f"hang-rank{self.rank}.json", json.dumps(content, indent=1) + "\n")
        write_text(folder / f"hang-rank{self.rank}.txt", self._text(snapshots))

    def _text(self, snapshots: Sequence[RankSnapshot]) -> str:
        lines = [f"Hang, as rank {self.rank} saw it after {self.seconds:.1f} s without progress", ""]
        lines += [verdict.sentence for verdict in self.verdicts] or [self.summary]
        if self.backend_error and self.verdicts:
            lines.append(f"NCCL reports {self.backend_error}")
        lines += ["", "rank  step  last collective"]
        for seen in snapshots:
            file, line = place(seen)
            shown = "none"
            if seen.calls:
                last = seen.calls[-1]
                shown = f"{describe(last)}, {'ended' if last.ended else 'not ended'}, issued at {last.file}:{last.line}"
            lines.append(
                f"{seen.rank:4}  {seen.step if seen.step >= 0 else '-':>4}  {shown}; {seen.life}, "
                f"at {file}:{line}, {seen.stalled:.1f} s without progress"
            )
        return "\n".join([*lines, "", self.stacks, ""])


def read_reports(folder: str | Path) -> list[HangReport]:
    """The reports in a folder, by rank; empty where there are none."""
    reports = []
    for path in Path(folder).glob("hang-rank*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        states = tuple(
            ReportedRank(**{**state, "shape": _tuple(state["shape"]), "group": _tuple(state["group"])})
            for state in content["states"]
        )
        reports.append(
            HangReport(
                content["rank"],
                content["seconds"],
                tuple(Culprit(**verdict) for verdict in content["verdicts"]),
                states,
                content["stacks"],
                content.get("backend_error"),
            )
        )
    return sorted(reports, key=lambda report: report.rank)


def has_report(folder: Path, since: float) -> bool:
    """Whether a report was written after a moment of ``time.time``."""
    return any(path.stat().st_mtime >= since for path in folder.glob("hang-rank*.json"))


def _tuple(value: list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)
