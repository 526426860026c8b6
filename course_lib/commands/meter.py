"""``course meter``: what the ranks of any job send each other, and who waits for whom; its script stays as it is."""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what --help need not load
    from course_lib.metering.job_report import RankLog

NAME = "meter"
HELP = "run a command, as torchrun train.py, and say what its ranks moved, by collective and axis, and who waited"
TAKES_COMMAND = True
HELD = ("parameters", "gradients", "optimizer states")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "course meter [--steps A:B] [--trace FILE] [--folder DIR] [--json FILE] -- COMMAND ..."
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="write down the optimizer's steps A to B - 1 alone, counted from 0: a long job's trace "
        "is more than a viewer opens [all]",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        default=Path("course-meter.trace.json"),
        help="all ranks on one clock, for ui.perfetto.dev [course-meter.trace.json]",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where the ranks write, which stays; for several machines one that they share [temporary]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables as JSON, too")


def _steps(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not colon or not first.isdecimal() or not end.isdecimal() or int(first) >= int(end):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no window of steps: give the first one and the one after the last, as 10:20"
        )
    return int(first), int(end)


def run(args: argparse.Namespace) -> int:
    """Run the command; print the tables; give its exit code."""
    from course_lib.attach import command
    from course_lib.metering import job_report, traces
    from course_lib.writing import write_text

    with tempfile.TemporaryDirectory(prefix="course-meter-") as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("rank*.jsonl"):  # of an earlier job
            path.unlink()
        code = command.run(args.command_line, {"meter": {"folder": str(folder), "steps": args.steps}})
        logs = job_report.read(folder)
    if not logs:
        print("course meter: no process of the command made a process group, so nothing was moved", file=sys.stderr)
        return code
    write_text(args.trace, json.dumps(traces.of_job(logs)))
    if args.json:
        write_text(args.json, json.dumps(_as_json(logs), indent=1) + "\n")
    print("\n".join(lines(logs)), end="\n\n")
    print(f"trace of {len(logs)} rank{'s' * (len(logs) > 1)}: {args.trace} (open it at https://ui.perfetto.dev)")
    return code


def _as_json(logs: "Sequence[RankLog]") -> dict[str, Any]:
    from course_lib.metering.job_report import table, under_way

    return {
        "collectives": table(logs),
        "ranks": [
            {
                "rank": log.rank,
                "host": log.host,
                "steps": len(log.step_ends),
                "sent": log.sent,
                "communication_seconds": under_way(log.calls),
                "waited_for": _waited_for(logs)[log.rank],
                "held": log.held,
                "ended": log.ended,
                "error": log.error,
            }
            for log in logs
        ],
    }


def _waited_for(logs: "Sequence[RankLog]") -> dict[int, dict[int, float]]:
    """Seconds that a rank waited, by the rank that it waited for."""
    from course_lib.metering.job_report import waits

    seconds: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for wait in waits(logs):
        seconds[wait.rank][wait.last] += wait.seconds
    return seconds


def lines(logs: "Sequence[RankLog]") -> list[str]:
    """Both tables, of 80 columns where the names allow it."""
    from course_lib.metering.job_report import table, under_way

    waited = _waited_for(logs)
    moved = [
        (
            row["axis"],
            _groups(row["groups"]),
            row["collective"],
            row["dtype"],
            str(row["calls"]),
            size(row["bytes"]),
            size(row["sent"]),
            f"{row['seconds']:.3f}",
        )
        for row in table(logs)
    ]
    ranks = []
    for log in logs:
        most = max(waited[log.rank].items(), key=lambda wait: wait[1], default=None)
        ranks.append(
            (
                str(log.rank),
                str(len(log.step_ends)),
                size(log.sent),
                f"{under_way(log.calls):.3f}",
                f"{sum(waited[log.rank].values()):.3f}",
                f"rank {most[0]}, {most[1]:.3f}" if most else "-",
                *(size(log.held[kind]) if kind in log.held else "-" for kind in HELD),
                (log.error or "") if log.ended else "killed",
            )
        )
    missing = sorted(set(range(logs[0].world)) - {log.rank for log in logs})
    return [
        "Per rank, by axis: what it handed in, and what of it it sends over a ring",
        "",
        *_aligned(("axis", "ranks", "collective", "dtype", "calls", "payload", "sent", "seconds"), moved, words=4),
        "",
        "Each rank: seconds in collectives, of these before the last of its ranks came, for whom most; memory",
        "",
        *_aligned(("rank", "steps", "sent", "seconds", "waited", "most for", "params", "grads", "optim", ""), ranks),
        *([f"no record of ranks {', '.join(map(str, missing))}: on other machines, or never begun"] if missing else []),
    ]


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """Columns of equal width, the first ``words`` and the last flush left."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            text.ljust(width) if i < words else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def _groups(groups: list[tuple[int, ...]]) -> str:
    """The first group, and how many more there are."""
    ranks = groups[0]
    shown = ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return shown + (f" and {len(groups) - 1} more" if len(groups) > 1 else "")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""
