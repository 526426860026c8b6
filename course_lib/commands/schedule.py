"""``course schedule``: a pipeline schedule's table, its bubble and its memory, or all schedules compared."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.errors import ConfigError

if TYPE_CHECKING:  # what --help need not load
    from fractions import Fraction

    from course_lib.parallel.pipeline.actions import Schedule
    from course_lib.parallel.pipeline.simulation import Costs

NAME = "schedule"
HELP = "show a pipeline schedule: its table, its bubble and its memory; or compare them all"

DRAWN = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv", "dualpipev")
FITTED = ("zb_auto", "zbv_auto", "v_half", "v_min")
SIMULATED = 2_000_000
"""Actions beyond which no table is made: a step would take longer on paper than on the machine."""


def number(text: str) -> "Fraction":
    """A number from 0 on: 2, 0.5 or 1/3, read exactly."""
    from fractions import Fraction

    if not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,2})?|\d+/0*[1-9]\d*", text):
        raise ValueError(text)
    return Fraction(text)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    what = parser.add_argument_group("what")
    what.add_argument(
        "--schedule", metavar="NAME", help=f"{', '.join(DRAWN)}; fitted to the costs: {', '.join(FITTED)}"
    )
    what.add_argument("--table", metavar="FILE", help="instead, a table of your own: CSV, as --csv writes it")
    what.add_argument("--compare", action="store_true", help="rank all schedules for these costs and this limit")
    what.add_argument("--ranks", type=int, metavar="P", help="ranks of the pipeline")
    what.add_argument(
        "--microbatches", type=int, nargs="+", metavar="M", help="micro-batches of a step; several with --compare"
    )
    what.add_argument("--virtual", type=int, metavar="V", help="stages per rank, where the schedule takes any [2]")
    costs = parser.add_argument_group("costs of one micro-batch in all the stages of a rank, in any unit (2, 0.5, 1/3)")
    costs.add_argument("--cost_f", type=number, default=1, metavar="T", help="time of the forward [1]")
    costs.add_argument(
        "--cost_b",
        type=number,
        default=1,
        metavar="T",
        help="time of the backward for the input alone; a whole backward takes --cost-w too [1]",
    )
    costs.add_argument("--cost_w", type=number, default=1, metavar="T", help="time of the backward for the weights [1]")
    costs.add_argument("--cost_comm", type=number, default=0, metavar="T", help="time of a message between ranks [0]")
    costs.add_argument(
        "--cost_overlap",
        type=number,
        metavar="T",
        help="time of a forward and a whole backward that overlap (dualpipev) [one after the other]",
    )
    costs.add_argument("--bytes", type=number, default=1, metavar="X", help="held from forward to backward [1]")
    costs.add_argument("--bytes_w", type=number, metavar="X", help="of these, needed by the backward for weights [all]")
    costs.add_argument("--memory_limit", type=number, metavar="X", help="what a rank may hold, in the unit of --bytes")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--csv", metavar="FILE", help="write the table: one row per rank, as torch's compute-only form")


def run(args: argparse.Namespace) -> int:
    """Print one schedule, or the comparison of all."""
    from course_lib.parallel.pipeline.simulation import Costs

    given = [name for name in ("schedule", "table", "compare") if getattr(args, name)]
    if len(given) != 1:
        said = " and ".join(f"--{name}" for name in given) or "none of --schedule, --table and --compare"
        raise ConfigError(f"given: {said}", "give one of --schedule NAME, --table FILE and --compare")
    if not args.table:
        missing = [name for name in ("ranks", "microbatches") if getattr(args, name) is None]
        if missing:
            raise ConfigError(f"--{missing[0]} is missing", f"say how many, as in --{missing[0]} 4")
        actions = 3 * args.ranks * max(args.microbatches) * (args.virtual or 2)
        if actions > SIMULATED:
            raise ConfigError(f"a table of up to {actions} actions", f"take fewer ranks or micro-batches ({SIMULATED})")
    if not args.cost_f + args.cost_b + args.cost_w:
        raise ConfigError("all costs are 0", "give --cost-f, --cost-b or --cost-w a time")
    costs = Costs(args.cost_f, args.cost_b, args.cost_w, args.cost_comm, args.bytes, args.bytes_w, args.cost_overlap)
    return _compare(args, costs) if args.compare else _show(args, costs)


def _show(args: argparse.Namespace, costs: "Costs") -> int:
    from rich.console import Console

    from course_lib.commands import schedule_report
    from course_lib.parallel.pipeline import csv_form
    from course_lib.parallel.pipeline.fitted.search import stage_costs
    from course_lib.parallel.pipeline.passes import without_communication
    from course_lib.parallel.pipeline.simulation import simulate
    from course_lib.parallel.pipeline.validation import check

    schedule, stages = _table(args, costs)
    per_stage = stage_costs(costs, stages)
    in_flight = check(schedule)
    timeline = simulate(schedule, per_stage)
    if args.json:
        import json

        print(json.dumps(schedule_report.as_json(timeline, in_flight)))
    else:
        schedule_report.show(Console(), timeline, per_stage, in_flight, args.memory_limit)
    if args.csv:
        csv_form.write(without_communication(schedule), args.csv)
    return 0


def _table(args: argparse.Namespace, costs: "Costs") -> "tuple[Schedule, int]":
    """The table asked for, and how many stages share a rank's costs."""
    from course_lib.parallel.pipeline import csv_form
    from course_lib.parallel.pipeline.fitted.search import build, stage_costs, stages_for

    if args.table:
        schedule = csv_form.read(args.table, Path(args.table).name)  # no formula is known for it, whatever its name
        return schedule, max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
    if len(args.microbatches) > 1:
        raise ConfigError(f"{len(args.microbatches)} values of --microbatches", "give one, or --compare them")
    stages = stages_for(args.schedule, args.virtual)
    return build(
        args.schedule, args.ranks, args.microbatches[0], stages, stage_costs(costs, stages), args.memory_limit
    ), stages


def _compare(args: argparse.Namespace, costs: "Costs") -> int:
    from rich.console import Console

    from course_lib.commands import schedule_report
    from course_lib.parallel.pipeline.fitted.search import search

    if args.csv:
        raise ConfigError("--csv with --compare", "write one table, with --schedule NAME")
    virtual = 2 if args.virtual is None else args.virtual
    candidates = search(args.ranks, args.microbatches, costs, args.memory_limit, stages_per_rank=[virtual])
    if args.json:
        import json

        print(json.dumps(schedule_report.candidates_json(candidates), indent=1))
    else:
        schedule_report.compare(Console(), candidates, args.memory_limit)
    return 0
