"""``course plan``: how to train a model on some GPUs: what fits, what is fastest, why, and how to start it."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.commands import plan_page, tables
from course_lib.errors import ConfigError, nearest
from course_lib.planning.plan import FAMILIES, LOSSES, OPTIMIZERS

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.strategy import Search

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
    _add_model_and_cluster(parser)
    _add_training(parser)
    parser.add_argument(
        "--what_if",
        metavar="OPTION=A,B,C",
        help="vary one thing: gpus, gpu, max_memory_gb, global_batch or sequence_length; a line for each value",
    )
    parser.add_argument(
        "--emit",
        type=Path,
        metavar="DIR",
        help="write the fastest plan that `course train` runs as files for every launcher",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def _add_model_and_cluster(parser: argparse.ArgumentParser) -> None:
    """Add what is trained on which GPUs, and what is measured of them."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a bundled name (facebook/opt-6.7b), a folder or config.json, or a name on the Hub",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all [one node]")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="A100-80, H100, T4 ..., or a SageMaker instance")
    parser.add_argument("--max_memory_gb", type=float, metavar="GIB", help="plan with no more memory per GPU than this")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RUN",
        help="measure this host's time for an operation, and take the share of peak that a run of "
        "`course train` on this GPU reached: its folder",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the batch, the data, and what every plan has or is chosen from."""
    parser.add_argument("--global_batch", type=int, metavar="N", help="sequences of one step [about 1M tokens]")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens [what the model takes, at most 2048]")
    parser.add_argument("--tokens", type=tokens, metavar="N", help="to train on, as 100B: adds hours and cost")
    parser.add_argument(
        "--dataset",
        default=plan_page.STAND_IN,
        metavar="NAME",
        help=f"what the printed command and the files train on, as for `course train` [{plan_page.STAND_IN}]",
    )
    parser.add_argument("--families", nargs="+", metavar="NAME", help=f"plan only with these: {', '.join(FAMILIES)}")
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS, help="whose states are planned for [adamw]")
    parser.add_argument(
        "--lora_rank", "--lora_r", type=int, default=0, metavar="R", help="train adapters of this rank alone"
    )
    parser.add_argument(
        "--base_bits",
        type=int,
        default=16,
        choices=(4, 16),
        help="bits of the weights beside adapters; 4 is QLoRA, `course train --load_in_4bit` [16]",
    )
    parser.add_argument(
        "--loss",
        choices=LOSSES,
        help="of all logits in fp32, in chunks of rows, or joined with the output layer [chunked and linear are tried]",
    )


def run(args: argparse.Namespace) -> int:
    """Search, and print what was found."""
    if args.what_if:
        return _vary(args)
    result = find(args)
    if args.json:
        import json

        print(json.dumps(plan_page.as_json(result, args.tokens, args.dataset), indent=2))
    else:
        plan_page.show(result, args.tokens, args.dataset)
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
    from course_lib.planning import hardware, models, strategy

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
    if args.calibrate:
        from course_lib.planning import from_run

        calibrated = from_run.calibrate(cluster, args.calibrate)
        cluster = calibrated.cluster
        print(*calibrated.lines(), sep="\n", file=sys.stderr if args.json else sys.stdout)
    length = min(2048, model.context or 2048) if args.sequence_length is None else args.sequence_length
    settings = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    return strategy.search(
        model,
        cluster,
        length,
        args.global_batch,
        families=args.families or FAMILIES,
        settings=settings,
        losses=("chunked", "linear"),
    ).for_our_trainer()


SETTINGS = ("optimizer", "lora_rank", "base_bits", "loss")
"""Options that are fields of every plan."""
VARIED = {"gpus": int, "gpu": str, "max_memory_gb": float, "global_batch": int, "sequence_length": int}
"""What --what-if can vary, and how a value is read."""


def vary(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]]]:
    """The option that ``--what_if`` varies, and the best plan for each of its values, or why none fits.

    Raises:
        ConfigError: no such option, no such value, or another option is out of range.
    """
    from course_lib.planning.strategy import NothingFits

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
            best = find(argparse.Namespace(**vars(args) | varied)).best
        except NothingFits as why:
            rows.append(varied | {"fits": False, "why": str(why)})
        else:
            rows.append(varied | {"fits": True} | plan_page.row(best, args.tokens))
    return name, rows


def _vary(args: argparse.Namespace) -> int:
    """The best plan for each value of one option, in a table."""
    if args.emit:
        raise ConfigError("--what-if finds several plans, and --emit writes one", "leave one of them out")
    name, rows = vary(args)
    if args.json:
        import json

        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console

    told = (plan_page.cells(row) if row["fits"] else ["does not fit: " + row["why"].rsplit(": ", 1)[1]] for row in rows)
    lines = [[str(row[name]), *cells] for row, cells in zip(rows, told, strict=True)]
    Console().print(tables.plain([name.replace("_", " "), *plan_page.columns(args.tokens)], lines, names=1))
    return 0
