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
    parser.add_argument(
        "folders", nargs="*", default=["runs"], metavar="FOLDER", help="output_dir of a run, or a folder of such [runs]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    parser.add_argument("--report", metavar="FILE", help="write a report: FILE.md or FILE.html")
    parser.add_argument("--metrics", metavar="NAMES", help="metrics to draw in it, with commas between")


def run(args: argparse.Namespace) -> int:
    """List, and write the report where one is asked for."""
    path = Path(args.report) if args.report else None
    if path and path.suffix not in (".md", ".html"):
        raise ConfigError(f"report {path} is neither Markdown nor HTML", "name it FILE.md or FILE.html")
    from course_lib.tracking import collect

    runs = collect.distinct(collect.read_runs(*args.folders))
    if args.json:
        for line in collect.runs_frame(runs).to_dict(orient="records") if runs else []:
            print(_json_of(line))
    elif not runs:
        print(f"no tracked runs in {', '.join(args.folders)}")
    else:
        _print(runs)
    if path:
        from course_lib.tracking import report

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
    from course_lib.tracking import collect, summary

    metrics = collect.metrics_frame(runs)
    known = sorted(set(metrics["metric"]))
    for name in names:
        if name not in known:
            raise ConfigError(f"no run has the metric `{name}`", nearest(name, known))
    shown = names or [name for name in ("train/loss", "eval/loss", "train/samples_per_second") if name in known]
    figures = {"curves": plots.compare_curves(metrics, shown)} if shown else {}
    for name in summary.score_columns(runs)[:1]:
        figures["results"] = plots.compare_results(collect.runs_frame(runs), name)
    return figures


def _json_of(row: dict) -> str:
    import json

    import pandas as pd

    return json.dumps(
        {name: value for name, value in row.items() if isinstance(value, list) or not pd.isna(value)}, default=str
    )


def _print(runs: "list[TrackedRun]") -> None:
    """The runs in a table that fits the terminal, or 80 columns where there is none."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from course_lib.tracking import summary

    console = Console(highlight=False)
    fitting = summary.summary_table(runs).within(console.width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in fitting.columns:
        table.add_column(
            column, no_wrap=True, overflow="ellipsis", justify="left" if column in ("run", "state") else "right"
        )
    for row in fitting.rows:
        table.add_row(*map(Text, row))
    console.print(table)
    if fitting.left_out:
        console.print(f"No room for {', '.join(fitting.left_out)}: use --json, --report runs.html or a wider terminal.")
