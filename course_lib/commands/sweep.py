"""``course sweep``: many runs with some fields varied, here, one after another or side by side."""

import argparse
import signal
from pathlib import Path
from typing import NoReturn

from course_lib.commands.options import add_config_options
from course_lib.writing import write_text

NAME = "sweep"
HELP = "run a grid or random sweep over any fields, or write it for `wandb sweep`"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "sweep", type=Path, metavar="FILE", help="YAML as `wandb sweep` reads it: method, parameters, metric, run_cap"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time [1]")
    parser.add_argument("--dry_run", action="store_true", help="print the settings and run nothing")
    parser.add_argument(
        "--wandb_yaml", type=Path, metavar="FILE", help="write the sweep for `wandb sweep` and run nothing"
    )
    parser.add_argument("--sweep_dir", type=Path, metavar="FOLDER", help="where the runs go [runs/sweeps/NAME]")
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the sweep; 1 where a run of it failed."""
    from course_lib.commands.options import as_options, config_from
    from course_lib.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUME, ConfigError, TrainingInterrupted
    from course_lib.tracking import sweeps

    config_from(args)  # what all runs share is checked before the first
    sweep = sweeps.read_sweep(args.sweep)
    base = as_options(args)
    settings = sweep.settings()
    for setting in settings:
        config_from(args, **setting)
    if args.wandb_yaml:
        write_text(args.wandb_yaml, sweeps.wandb_yaml(args.sweep, base))
        print(f"wandb sweep {args.wandb_yaml}, and then the wandb agent that it names, in the folder of the course")
        return 0
    if args.dry_run:
        for number, setting in enumerate(settings):
            print(f"{number}: {sweeps.shown(setting)}")
        return 0
    if args.parallel < 1:
        raise ConfigError(f"--parallel {args.parallel}", "take at least 1")
    folder = args.sweep_dir or Path("runs/sweeps") / sweep.name
    signal.signal(signal.SIGTERM, _stop)
    try:
        outcomes = sweeps.run_sweep(sweep, base, folder, parallel=args.parallel)
    except KeyboardInterrupt as stopped:
        ended = len(list(folder.glob("*/summary.json")))
        raise TrainingInterrupted(
            f"sweep stopped: {ended} of {len(settings)} runs have ended",
            "the same command goes on",
            EXIT_RESUME if stopped.args else EXIT_INTERRUPTED,
        ) from None
    _print(sweep, outcomes)
    print(f"all results: {folder / sweeps.RESULTS}")
    return EXIT_FAILED if any(outcome.error for outcome in outcomes) else 0


def _stop(number: int, _: object) -> NoReturn:
    """SIGTERM ends a sweep as Ctrl-C does, with the number as argument."""
    raise KeyboardInterrupt(number)


def _print(sweep, outcomes) -> None:
    """The runs, the best first."""
    from rich.console import Console
    from rich.table import Table

    from course_lib.tracking.sweeps import ranked, with_interval

    frame = ranked(sweep, outcomes)
    columns = ["run", *sweep.parameters, *([sweep.metric] if sweep.metric in frame else []), "error"]
    table = Table(title=f"{sweep.name}: {len(outcomes)} runs by {sweep.metric} ({sweep.goal})")
    for column in columns:
        table.add_column(
            column, justify="left" if column in ("run", "error") else "right", no_wrap=column == sweep.metric
        )
    table.caption = (
        "in brackets: 95 % interval over such rows, for the same weights; other rows could turn round "
        "the order of runs whose intervals overlap"
    )
    for _, row in frame.iterrows():
        table.add_row(
            *(
                with_interval(row, column)
                if column == sweep.metric and row[column] == row[column]
                else f"{row[column]:.4g}"
                if isinstance(row[column], float)
                else str(row[column])
                for column in columns
            )
        )
    Console().print(table)
