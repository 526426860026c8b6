"""``course runs``: list the tracked runs in folders, compare them, and write a report."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from course_lib.tracking.collect import TrackedRun

NAME = "runs"
HELP = "list tracked runs and compare them"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("folders", nargs="*", default=["runs"], metavar="FOLDER",
                        help="output_dir of a run, or a folder of such [runs]")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parser.add_argument("--report", metavar="FILE", help="write a report: FILE.md or FILE.html")
    parser.add_argument("--metrics", metavar="NAMES", help="metrics to draw in it, with commas between")


def run(args: argparse.Namespace) -> int:
    """List, and write the report where one is asked for."""
    path = Path(args.report) if args.report else None
    if path and path.suffix not in (".md", ".html"):
        raise ConfigError(f"report {path} is neither Markdown nor HTML", "name it FILE.md or FILE.html")
    from course_lib.tracking import collect, report

    runs = collect.distinct(collect.read_runs(*args.folders))
    if args.json:
        for line in collect.runs_frame(runs).to_dict(orient="records") if runs else []:
            print(_json_of(line))
    elif not runs:
        print(f"no tracked runs in {', '.join(args.folders)}")
    else:
        print(_aligned(*report.summary_table(runs)))
    if path:
        chosen = args.metrics.split(",") if args.metrics else []
        figures = figures_of(runs, chosen)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            report.write_markdown(path, "Runs", runs, figures)
        else:
            from course_lib.writing import write_text

            write_text(path, report.html_page("Runs", runs, figures))
        print(f"report: {path}")
    return 0


def figures_of(runs: "list[TrackedRun]", names: list[str]) -> "dict[str, Figure]":
    """Curves of the named metrics, or of the losses, and each run's final score, as far as the runs have them.

    Raises:
        ConfigError: a named metric that no run has.
    """
    from course_lib.errors import nearest
    from course_lib.figures import runs as plots
    from course_lib.tracking import collect

    metrics = collect.metrics_frame(runs)
    known = sorted(set(metrics["metric"]))
    for name in names:
        if name not in known:
            raise ConfigError(f"no run has the metric `{name}`", nearest(name, known))
    shown = names or [name for name in ("train/loss", "eval/loss", "train/samples_per_second") if name in known]
    figures = {"curves": plots.compare_curves(metrics, shown)} if shown else {}
    for name in ("test/macro_f1", "test/loss", "eval/loss"):
        if name in known:
            figures["results"] = plots.compare_results(collect.runs_frame(runs), name)
            break
    return figures


def _json_of(row: dict) -> str:
    import json

    import pandas as pd

    return json.dumps({name: value for name, value in row.items() if isinstance(value, list) or not pd.isna(value)},
                      default=str)


def _aligned(columns: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                     for line in (columns, *rows))
