"""``course bench``: plans of benchmarks; ``course bench scaling``: a training against the number of processes."""

import argparse
import json
from pathlib import Path

from course_lib.commands import tables
from course_lib.commands.options import add_config_options, as_options, config_from
from course_lib.errors import ConfigError

NAME = "bench"
HELP = "generate a benchmark of a model; or measure how a training scales"

SET_BY_SCALING = (
    "num_processes",
    "max_steps",
    "num_epochs",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "baselines",
    "keep_best",
    "progress_bar",
    "max_eval_samples",
    "early_stopping_patience",
    "split_batches",
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options, and the sub-commands."""
    _add_options_of_plans(parser)
    parser.set_defaults(measure=run_plan)
    benchmarks = parser.add_subparsers(metavar="BENCHMARK")
    scaling = benchmarks.add_parser(
        "scaling",
        allow_abbrev=False,
        help="time, throughput and efficiency of a training against the number of processes",
        description="Train with each number of processes in turn, and compare time, throughput, efficiency and memory.",
    )
    scaling.add_argument(
        "--num_processes",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="N",
        help="numbers of ranks, one after another; the first is compared with [1 2]",
    )
    scaling.add_argument("--steps", type=int, default=30, help="optimizer steps of each; a third warms up [30]")
    scaling.add_argument(
        "--scaling",
        choices=("weak", "strong"),
        default="weak",
        help="keep batch_size per rank, or over all ranks [weak]",
    )
    scaling.add_argument(
        "--out",
        type=Path,
        default=Path("runs/scaling"),
        metavar="FOLDER",
        help="for scaling.csv, scaling.png and the runs [runs/scaling]",
    )
    add_config_options(scaling, ("data", "model", "optim", "parallel", "pipeline", "run"), without=SET_BY_SCALING)
    scaling.set_defaults(measure=run_scaling, options=[o for a in scaling._actions for o in a.option_strings])


def _add_options_of_plans(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list_models", action="store_true", help="list the bundled models")
    parser.add_argument(
        "--model",
        metavar="NAME",
        default=argparse.SUPPRESS,  # it is an option of the runs' too
        help="write a benchmark plan for this model",
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=["cuda"],
        metavar="NAME",
        help="cuda, rocm, cpu, or names of accelerators or SageMaker instances [cuda]",
    )
    parser.add_argument("--distributed", action="store_true", help="plan for 1, 2, 4 ... GPUs, not for one alone")
    parser.add_argument("--max_gpus", type=int, default=8, metavar="N", help="the most GPUs [8]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan there [print it]")


def run(args: argparse.Namespace) -> int:
    """Run the sub-command."""
    return args.measure(args)


def run_plan(args: argparse.Namespace) -> int:
    """List models, or generate a benchmark plan."""
    from course_lib.planning import benchmark, models

    if args.list_models:
        for name in models.names():
            print(f"{name}  {models.load(name).parameters / 1e6:,.0f}M")
        return 0
    if "model" not in args:
        raise ConfigError("nothing to benchmark", "give --model NAME, --list-models, or `course bench scaling`")
    document = benchmark.generate(args.model, args.hardware, distributed=args.distributed, max_gpus=args.max_gpus)
    text = json.dumps(document, indent=2) + "\n"
    if args.output:
        from course_lib.writing import write_text

        write_text(args.output, text)
        print(f"wrote {len(document['runs'])} runs to {args.output}")
    else:
        print(text, end="")
    return 0


def run_scaling(args: argparse.Namespace) -> int:
    """Measure, print the table, and write it with its figure."""
    if args.steps < 3:
        raise ConfigError(f"--steps {args.steps}", "take at least 3: a third warms up")
    if min(args.num_processes) < 1 or len(set(args.num_processes)) != len(args.num_processes):
        raise ConfigError(
            f"--num_processes {' '.join(map(str, args.num_processes))}", "give each number once, from 1 on"
        )
    counts = args.num_processes
    del args.num_processes  # each run is given its own
    for count in counts:
        config_from(args, num_processes=count, split_batches=args.scaling == "strong")  # checked before the first runs

    from course_lib.figures.scaling import scaling as figure_of
    from course_lib.lessons import scaling
    from course_lib.writing import write_text

    args.out.mkdir(parents=True, exist_ok=True)
    points = scaling.study(as_options(args), counts, args.out, steps=args.steps, strong=args.scaling == "strong")
    table = scaling.frame(points)
    write_text(args.out / "scaling.csv", table.to_csv(index=False))
    figure_of(table).savefig(args.out / "scaling.png")
    show(table, args.scaling)
    print(f"table and figure: {args.out / 'scaling.csv'}, {args.out / 'scaling.png'}")
    return 0


def show(table, kind: str) -> None:
    """The points, and whether the ranks had cores of their own."""
    from rich.console import Console
    from torch import cuda

    from course_lib.system import machine

    heads = ("processes", "global batch", "ms per step", "samples/s", "speed-up", "efficiency", "peak MiB per rank")
    rows = [
        (
            str(row.processes),
            str(row.global_batch),
            f"{row.step_ms:.1f}",
            f"{row.samples_per_second:.1f}",
            f"{row.speed_up:.2f}",
            f"{row.efficiency:.0%}",
            f"{row.peak_mib:,.0f}",
        )
        for row in table.itertuples()
    ]
    Console().print(tables.plain(heads, rows, title=f"{kind} scaling"))
    cores, most = machine.describe(hub_timeout=0.1).cores, max(table["processes"])
    if most > cores and not cuda.is_available():
        print(f"{most} processes shared {cores} cores: their efficiency says more of the cores than of the training")
