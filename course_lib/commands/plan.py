"""``course plan``: how to train a model on some GPUs: what fits, what is fastest, why, and how to start it."""

import argparse
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.errors import ConfigError, nearest

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.strategy import Candidate, Search

NAME = "plan"
RULE = """\
Which plan leads: the fastest that fits with a chance of 80 % or more and that
`course train` runs, so that there is a command; if it runs none of those, the
fastest of them, for another trainer; if none fits with such a chance, the
fastest of 50 % or more. What is less likely to fit is no plan: if all is, the
nearest is named, and what would fit. What is faster elsewhere is named.
Tried are data, tensor, context, expert and pipeline ranks, 1F1B, interleaved
and zero-bubble schedules, ZeRO, FSDP and HSDP, offload, recomputation, and the
losses `chunked` and `linear`; context ranks where each has 2,048 tokens, HSDP
with copies over one node, two, four.
"""
HELP = "plan a training: the layouts that fit on some GPUs, ranked, explained, with memory, hours and cost"

FAMILIES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "3-D")
OPTIMIZERS = ("adamw", "adamw-8bit", "adafactor", "muon", "sgd-momentum", "sgd")
LOSSES = ("plain", "chunked", "linear")
COLUMNS = ("strategy", "micro-\nbatch", "accumu-\nlation", "GiB per\nGPU", "chance\nto fit", "tokens/s", "MFU")
COLOURS = {"parameters": "blue", "gradients": "cyan", "optimizer": "magenta", "activations": "yellow",
           "logits": "red", "buffers": "green", "runtime": "white"}
BAR = 60
"""Characters of the memory bar, where the terminal has them."""
BESIDE = 28
"""Characters beside it."""
STAND_IN = "pydocs"
"""Data of the printed command where none are named: text that every machine has."""
SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def tokens(text: str) -> float:
    """A number of tokens: 3e9, 500M, 100B, 1.5T."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\d{1,2})?)([KMBT]?)", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(text)
    return float(match[1]) * SUFFIX[match[2]]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.epilog = RULE
    parser.add_argument("--model", required=True, metavar="NAME",
                        help="a bundled name (facebook/opt-6.7b), a folder or config.json, or a name on the Hub")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all [one node]")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="A100-80, H100, T4 ..., or a SageMaker instance")
    parser.add_argument("--max_memory_gb", type=float, metavar="GIB", help="plan with no more memory per GPU than this")
    parser.add_argument("--calibration", type=Path, metavar="FILE",
                        help="take the shares of peak that `course bench --run` measured, not the catalogue's")
    parser.add_argument("--calibrate", type=Path, metavar="RUN",
                        help="measure this host's time for an operation, and take the share of peak that a run of "
                        "`course train` on this GPU reached: its folder")
    parser.add_argument("--global_batch", type=int, metavar="N", help="sequences of one step [about 1M tokens]")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens [what the model takes, at most 2048]")
    parser.add_argument("--tokens", type=tokens, metavar="N", help="to train on, as 100B: adds hours and cost")
    parser.add_argument("--dataset", default=STAND_IN, metavar="NAME",
                        help=f"what the printed command and the files train on, as for `course train` [{STAND_IN}]")
    parser.add_argument("--families", nargs="+", metavar="NAME", help=f"plan only with these: {', '.join(FAMILIES)}")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="whose states are planned for [adamw]")
    parser.add_argument("--lora_rank", type=int, default=0, metavar="R", help="train adapters of this rank alone")
    parser.add_argument("--base_bits", type=int, default=16, choices=(4, 16),
                        help="what the weights beside adapters are kept in; 4 is QLoRA [16]")
    parser.add_argument("--loss", choices=LOSSES, help="of all logits in fp32, in chunks of rows, or joined with the "
                        "output layer [chunked and linear are tried]")
    parser.add_argument("--what_if", metavar="OPTION=A,B,C", help="vary one thing: gpus, gpu, max_memory_gb, "
                        "global_batch or sequence_length; a line for each value")
    parser.add_argument("--emit", type=Path, metavar="DIR",
                        help="write the fastest plan that `course train` runs as files for every launcher")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Search, and print what was found."""
    if args.what_if:
        return _vary(args)
    result = find(args)
    if args.json:
        import json

        print(json.dumps(as_json(result, args.tokens, args.dataset), indent=2))
    else:
        _show(result, args.tokens, args.dataset)
    if args.emit:
        from course_lib.commands import plan_files

        files = plan_files.write(result, args.emit, dataset=args.dataset, tokens=args.tokens)
        print(f"wrote {', '.join(files)} to {args.emit}", file=sys.stderr if args.json else sys.stdout)
    return 0


def find(args: argparse.Namespace) -> "Search":
    """The search that the options ask for.

    Raises:
        ConfigError: an option is out of range, or nothing fits.
    """
    from course_lib.planning import benchmark, from_run, hardware, models, strategy

    for name in ("gpus", "global_batch", "sequence_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", "give a whole number from 1 on")
    for name in args.families or ():
        if name not in FAMILIES:
            raise ConfigError(f"--families {name}", nearest(name, FAMILIES))
    model = models.load(args.model)
    cluster = hardware.cluster(args.gpu, args.gpus, memory_gb=args.max_memory_gb)
    if cluster.dollars_per_gpu_hour is None:  # as `course select` prices it
        cluster = replace(cluster, dollars_per_gpu_hour=hardware.lowest_price(args.gpu))
    if args.calibration and args.calibrate:
        raise ConfigError("--calibration and --calibrate both say what matmuls reach", "leave one of them out")
    if args.calibration:
        cluster = benchmark.calibrated(cluster, args.calibration)
    if args.calibrate:
        calibrated = from_run.calibrate(cluster, args.calibrate)
        cluster = calibrated.cluster
        print(*calibrated.lines(), sep="\n", file=sys.stderr if args.json else sys.stdout)
    length = min(2048, model.context or 2048) if args.sequence_length is None else args.sequence_length
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    return strategy.search(model, cluster, length, args.global_batch, families=args.families or FAMILIES,
                           settings=settings, losses=("chunked", "linear")).for_our_trainer()


SETTINGS = ("optimizer", "lora_rank", "base_bits", "loss")
"""Options that are fields of every plan."""
VARIED = {"gpus": int, "gpu": str, "max_memory_gb": float, "global_batch": int, "sequence_length": int}
"""What --what-if can vary, and how a value is read."""


def _vary(args: argparse.Namespace) -> int:
    """The best plan for each value of one option, in a table."""
    import json

    from rich.console import Console
    from rich.table import Table

    from course_lib.planning.strategy import NothingFits

    if args.emit:
        raise ConfigError("--what-if finds several plans, and --emit writes one", "leave one of them out")
    name, _, listed = args.what_if.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if name not in VARIED or not listed:
        raise ConfigError(f"--what-if {args.what_if}", f"write OPTION=A,B,C with one of {', '.join(VARIED)}")
    rows = []
    for text in listed.split(","):
        try:
            value = VARIED[name](text.strip())
        except ValueError:
            raise ConfigError(f"--what-if {name}: `{text}` is no number", "write it as --what-if gpus=8,16") from None
        varied: dict[str, Any] = {name: value}
        try:
            best = find(argparse.Namespace(**vars(args) | {name: value})).best
        except NothingFits as why:
            rows.append(varied | {"fits": False, "why": str(why)})
            continue
        time = {"hours": best.cost.hours(args.tokens), "dollars": best.cost.dollars(args.tokens)} if args.tokens else {}
        rows.append(varied | {"fits": True, "strategy": best.plan.strategy, "micro_batch": best.plan.micro_batch,
                              "accumulation": best.plan.accumulation, "bytes": best.memory.total,
                              "chance_that_it_fits": best.chance,
                              "tokens_per_second": best.cost.tokens_per_second, "mfu": best.cost.mfu} | time)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table(box=None, pad_edge=False)
    for head in (name.replace("_", " "), *COLUMNS, *(("hours",) if args.tokens else ())):
        table.add_column(head, justify="left" if head == "strategy" else "right")
    for row in rows:
        if row["fits"]:
            cells = [row["strategy"], str(row["micro_batch"]), str(row["accumulation"]),
                     f"{row['bytes'] / 2**30:.1f}", f"{row['chance_that_it_fits']:.0%}",
                     f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}",
                     *([f"{row['hours']:,.1f}"] if args.tokens else [])]
        else:
            cells = ["does not fit: " + row["why"].rsplit(": ", 1)[1]]
        table.add_row(str(row[name]), *cells)
    Console().print(table)
    return 0


def as_json(result: "Search", budget: float | None, dataset: str | None = None) -> dict[str, Any]:
    """Everything that the page says, with bytes and seconds."""
    from course_lib.planning import margins, strategy, to_launchers

    return {
        "model": result.model.name, "parameters": result.model.parameters,
        "gpu": result.cluster.accelerator.name, "gpus": result.cluster.gpus,
        "gpu_memory_bytes": result.cluster.accelerator.memory, "layouts_tried": result.considered,
        "layouts_that_fit": len(result.candidates),
        "plans": [_candidate(candidate, budget) | _sure(result, candidate)
                  | {"why_not_here": to_launchers.why_not(candidate.plan, result.model)}
                  for candidate in result.best_of_each()],
        "failed": [{"family": f.family, "plan": f.plan.strategy, "needs_bytes": strategy.needed(f.memory),
                    "remedy": f.remedy} for f in result.failed],
        "answer": answer(result), "explanation": strategy.explain(result),
        "error": {"tokens_per_second": asdict(margins.THROUGHPUT), "memory": asdict(margins.MEMORY)},
        "launch": to_launchers.launch_line(result.best.plan, result.cluster.gpus_per_node, result.model,
                                           dataset=dataset, tokens=budget)
        if to_launchers.runs_here(result.best.plan, result.model) else None}


def _candidate(candidate: "Candidate", budget: float | None) -> dict[str, Any]:
    time: dict[str, float | None] = {"tokens_per_second": candidate.cost.tokens_per_second,
                                     "step_seconds": candidate.cost.step, "mfu": candidate.cost.mfu}
    if budget:
        time |= {"hours": candidate.cost.hours(budget), "dollars": candidate.cost.dollars(budget)}
    return {"strategy": candidate.plan.strategy, "plan": asdict(candidate.plan),
            "memory_bytes": candidate.memory.at_peak(), "host_bytes": candidate.memory.host, **time}


def _sure(result: "Search", candidate: "Candidate") -> dict[str, Any]:
    """The interval of a plan's speed, and the chance that it fits."""
    from course_lib.planning import intervals

    regime = intervals.regime_of(result.model, candidate.plan)
    between = intervals.interval("tokens/s/GPU", candidate.cost.tokens_per_second, regime)
    return {"tokens_per_second_interval": [between.low, between.high], "interval_share": intervals.SHARE,
            "chance_that_it_fits": candidate.chance}


def _show(result: "Search", budget: float | None, dataset: str) -> None:
    """The answer, the command, the alternatives, and what the answer hangs on."""
    from rich.console import Console

    from course_lib.planning import margins, strategy, to_launchers

    console, model = Console(), result.model
    console.print(answer(result), highlight=False)
    if budget:
        console.print(_bill(result, budget), highlight=False)
    for line in command(result, budget, dataset, console.width):
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith(" "))
    console.print()
    console.print(_table(result, budget))
    console.print()
    _bar(console, result)
    for line in strategy.explain(result):
        console.print(line, highlight=False)
    for candidate in result.best_of_each():
        if reason := to_launchers.why_not(candidate.plan, model):
            console.print(f"{candidate.plan.strategy}: `course train` {reason}.", highlight=False)
    console.print(margins.said(), highlight=False)


def answer(result: "Search") -> str:
    """The plan in a sentence, with the interval of its speed and the chance that it fits."""
    from course_lib.planning import intervals

    plan, model, chip = result.best.plan, result.model, result.cluster.accelerator
    regime = intervals.regime_of(model, plan)
    speed = result.best.cost.tokens_per_second
    between = intervals.interval("tokens/s/GPU", speed, regime)
    held = result.best.memory.total
    micro = "1 sequence" if plan.micro_batch == 1 else f"{plan.micro_batch} sequences"
    return (f"Train {model.name} ({model.parameters:,} parameters) on {result.cluster.gpus} x {chip.name} with "
            f"{plan.strategy}, {micro} at a time, {plan.global_batch} x {plan.sequence_length:,} tokens per step: "
            f"about {speed:,.0f} tokens/s ({intervals.SHARE:.0%} of such plans: {between.low:,.0f} to "
            f"{between.high:,.0f}), {held / 2**30:.1f} of {chip.memory / 2**30:.1f} GiB, which fits with a chance of "
            f"{result.best.chance:.0%}.")


def command(result: "Search", budget: float | None, dataset: str, width: int) -> list[str]:
    """Lines of the page: the command that starts the first plan of the search that ``course train`` runs, indented.

    Where that is not the best one it says which it is, and where there is none whose the best one is, in words that
    no one takes for a command.
    """
    from course_lib.planning import to_launchers

    model, node, best = result.model, result.cluster.gpus_per_node, result.best
    ours = next((candidate for candidate in result.candidates if to_launchers.runs_here(candidate.plan, model)), None)
    data = "" if dataset != STAND_IN else f" (on {STAND_IN}, which every machine has: name your data with --dataset)"
    lines = [""]
    if ours is not best:
        lines += [f"No command of this course starts it. {to_launchers.launch_line(best.plan, node, model)}", ""]
    if ours is None:
        return lines[:-1]
    start = f"Start it with{data}:" if ours is best else (
        f"The next that it runs is {ours.plan.strategy}, at "
        f"{ours.cost.tokens_per_second / best.cost.tokens_per_second:.0%} of that speed, which fits with a chance of "
        f"{ours.chance:.0%}{data}:")
    line = to_launchers.launch_line(ours.plan, node, model, dataset=dataset, tokens=budget)
    return [*lines, start, "", *(f"  {part}" for part in broken(line, width - 2))]


def broken(line: str, width: int) -> list[str]:
    """A command on several lines that a shell reads as one: each but the last ends in a backslash.

    Args:
        line: the command; it is broken before words that begin with ``-``, so that an option keeps its value, and
            never inside quotes.
        width: characters that a line may have, the backslash among them; an option that is longer has its own line.
    """
    options: list[str] = []
    for word in map(shlex.quote, shlex.split(line)):
        if options and not word.startswith("-"):
            options[-1] += f" {word}"
        else:
            options.append(word)
    lines = [""]
    for option in options:
        if lines[-1] and len(f"{lines[-1]} {option} \\") > width - (2 if len(lines) > 1 else 0):
            lines.append(option)
        else:
            lines[-1] = f"{lines[-1]} {option}".strip()
    return [f"{'  ' if i else ''}{part}{'' if i == len(lines) - 1 else ' ' + chr(92)}" for i, part in enumerate(lines)]


def _table(result: "Search", budget: float | None) -> Any:
    """The fastest layout of each family."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in (*COLUMNS, *(("hours",) if budget else ())):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for candidate in result.best_of_each():
        cost = candidate.cost
        cells = [candidate.plan.strategy, str(candidate.plan.micro_batch), str(candidate.plan.accumulation),
                 f"{candidate.memory.total / 2**30:.1f}", f"{candidate.chance:.0%}", f"{cost.tokens_per_second:,.0f}",
                 f"{cost.mfu:.1%}"]
        table.add_row(*cells, *((f"{cost.hours(budget):,.1f}",) if budget else ()))
    return table


def _bill(result: "Search", budget: float) -> str:
    """What so many tokens take, and cost."""
    from course_lib.planning import intervals

    hours, dollars = result.best.cost.hours(budget), result.best.cost.dollars(budget)
    between = intervals.of_hours(result.model, result.best.plan, hours)
    whose = f"of {result.cluster.instance}" if result.cluster.instance else "of the cheapest SageMaker instance with it"
    price = (f"${dollars:,.0f} at the list price {whose}" if dollars
             else "no price is known: SageMaker has no instance with it")
    return (f"{budget:,.0f} tokens take {hours:,.1f} hours ({intervals.SHARE:.0%} of such plans: {between.low:,.1f} to "
            f"{between.high:,.1f}); {price}.")


def _bar(console: Any, result: "Search") -> None:
    """Memory of one rank of the best plan as a bar over the GPU's whole memory; what the runtime takes comes after it,
    and is in no number of the page."""
    from rich.padding import Padding
    from rich.text import Text

    from course_lib.planning.memory import RUNTIME

    whole = result.cluster.accelerator.memory
    held = result.best.memory
    parts = {**held.at_peak(), "runtime": float(RUNTIME)}
    length = min(BAR, console.width - BESIDE)
    bar, filled, drawn = Text("a rank  ["), 0.0, 0
    for kind, size in parts.items():
        filled += size
        upto = round(filled / whole * length)
        bar.append(kind[0].upper() * (upto - drawn), style=COLOURS[kind])
        drawn = upto
    bar.append("." * (length - drawn) + f"] {held.total / 2**30:.1f} of {whole / 2**30:.1f} GiB")
    console.print(bar, soft_wrap=True)
    legend = Text("  ").join(Text(f"{kind[0].upper()} {kind} {size / 2**30:.1f}".replace(" ", "\u00a0"), COLOURS[kind])
                             for kind, size in parts.items())
    legend.append("\u00a0besides")
    if held.host:
        legend.append(f"  and {held.host / 2**30:.1f} GiB of host memory for each GPU")
    console.print(Padding(legend, (0, 0, 0, 8)))
    console.print()
