"""``course watch``: the watchdog over the ranks of any job, whose script stays as it is."""

import argparse
import shutil
import sys
import time
import zipfile
from pathlib import Path

from course_lib.errors import EXIT_HUNG, ConfigError

NAME = "watch"
HELP = "run a command, as torchrun train.py, and when its ranks hang say which one they wait for, where, and end them"
TAKES_COMMAND = True


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "course watch [--seconds S] [--folder DIR] -- COMMAND ...\n       course watch ... --export"
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="without progress on the rank that all wait for, until they report and end [300]",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("course-watch"),
        metavar="DIR",
        help="where the ranks' reports go [course-watch]",
    )
    parser.add_argument(
        "--export",
        action="store_true",
        help="start nothing: print the lines of shell that bring it into all jobs started after them",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; where it hung, or a rank died, say why; EXIT_HUNG where it hung, else its exit code."""
    from course_lib.attach import command
    from course_lib.hangs.report import has_report, read_reports

    if not args.seconds > 0:
        raise ConfigError(f"--seconds is {args.seconds:g}", "give it more than 0")
    folder = args.folder.absolute()
    tools = {"watch": {"seconds": args.seconds, "folder": str(folder)}}
    if args.export:
        print(command.exports(tools))
        return 0
    began = time.time()
    code = command.run(args.command_line, tools)
    for notes in folder.parent.glob(f"{folder.name}-start-*"):  # of ranks that never made a process group, or died
        shutil.rmtree(notes, ignore_errors=True)
    if not has_report(folder, began):
        return code
    reports = read_reports(folder)
    bundle = folder.with_suffix(".zip")
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.glob("hang-rank*")):
            packed.write(path, path.name)
    print(
        f"course watch: {reports[0].summary}\n  stacks and last calls of all ranks: {folder}/hang-rank*.txt; "
        f"to attach to a report: {bundle}",
        file=sys.stderr,
    )
    died = bool(reports[0].verdicts) and all(culprit.what == "dead" for culprit in reports[0].verdicts)
    return code if died or code == 0 else EXIT_HUNG  # a rank's own exit code; 0: a launcher's next attempt went well
