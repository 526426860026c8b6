"""``course simulate``: what one rank of a cluster of any size holds and sends, found in this process without a GPU."""

import argparse
from typing import TYPE_CHECKING

from course_lib.commands import tables

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.formula_check import Difference
    from course_lib.planning.simulate import Setting, Simulated

NAME = "simulate"
HELP = "simulate one rank of a cluster: memory by kind and by block, and collectives, without a GPU"

STRATEGIES = ("ddp", "zero2", "zero3", "fsdp", "hsdp", "tp")
MODULES = 12
"""Parts of the model that the page shows; --json has all."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a bundled name (llama-8b), a folder or config.json, or a name on the Hub",
    )
    parser.add_argument("--world_size", type=int, required=True, metavar="N", help="ranks in all")
    parser.add_argument(
        "--strategy",
        default="fsdp",
        choices=STRATEGIES,
        help="zero2: FSDP2 that keeps blocks gathered; zero3 and fsdp are one [fsdp]",
    )
    parser.add_argument("--shards", type=int, default=8, metavar="N", help="hsdp: ranks that share one copy [8]")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which one to simulate [0]")
    parser.add_argument("--micro_batch", type=int, default=1, metavar="N", help="sequences of a rank [1]")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens [what the model takes, at most 2048]")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"), help="of the matmuls [bf16]")
    parser.add_argument("--checkpointing", action="store_true", help="recompute every block in the backward pass")
    parser.add_argument("--compare_formula", action="store_true", help="set it beside the planner's memory model")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Simulate, and print what was found."""
    import dataclasses
    import json

    from course_lib.planning import formula_check, models, simulate

    if args.sequence_length is None:
        args.sequence_length = min(2048, models.load(args.model).context or 2048)
    fields = [field.name for field in dataclasses.fields(simulate.Setting)]
    setting = simulate.Setting(**{name: getattr(args, name) for name in fields})
    if args.compare_formula:
        setting.plan()  # refuses at once what the formula does not know
    simulated = simulate.simulate(args.model, setting)
    compared = formula_check.compare(args.model, setting, simulated) if args.compare_formula else []
    if args.json:
        result = {"model": args.model, **dataclasses.asdict(setting), **dataclasses.asdict(simulated)}
        if compared:
            result["formula"] = [
                dataclasses.asdict(row) | {"error": row.error if row.simulated else None} for row in compared
            ]
        print(json.dumps(result, indent=2))
    else:
        _show(args.model, setting, simulated, compared)
    return 0


def _show(model: str, setting: "Setting", simulated: "Simulated", compared: "list[Difference]") -> None:
    """What is simulated, its peak, and tables of it."""
    from rich.console import Console

    console = Console()
    console.print(
        f"{model} ({simulated.parameters:,} parameters), {setting.strategy}, rank {setting.rank} of "
        f"{setting.world_size:,}, {setting.micro_batch} x {setting.sequence_length:,} tokens, "
        f"{setting.precision}{', every block recomputed' if setting.checkpointing else ''}\n"
        f"peak: {_gib(simulated.total)} GiB, in the {simulated.phase} "
        f"{'pass' * (simulated.phase != 'step')}\n",
        highlight=False,
    )
    sizes = (simulated.peak, simulated.at_peak, simulated.resident)
    kinds = [(kind, *(_gib(of_kind[kind]) for of_kind in sizes)) for kind in simulated.peak]
    console.print(tables.plain(("GiB by kind", "own peak", "at the peak", "after backward"), kinds))
    console.print()
    parts = _parts(simulated)
    console.print(tables.plain(("GiB by part, at the peak", "all", "states", "activations", "rest"), parts))
    if smaller := len(simulated.modules) - len(parts):
        console.print(f"and {smaller} smaller; --json has all and the collectives in order")
    console.print()
    heads = ("collectives", "calls", "dtype", "ranks", "GiB", "GiB sent by this rank")
    console.print(tables.plain(heads, _collectives(simulated)))
    if compared:
        console.print()
        rows = [
            (row.kind, _gib(row.formula), _gib(row.simulated), f"{row.error:+.1%}" if row.simulated else "")
            for row in compared
        ]
        console.print(tables.plain(("GiB", "formula", "simulated", "error"), rows))


def _parts(simulated: "Simulated") -> list[tuple[str, ...]]:
    """The largest parts of the model, and what they hold at the peak."""
    rows = []
    for name in sorted(simulated.modules, key=lambda name: -sum(simulated.modules[name].values()))[:MODULES]:
        held = simulated.modules[name]
        states = sum(held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer states"))
        kept = held.get("activations", 0) + held.get("logits", 0)
        every = sum(held.values())
        rows.append((name or "(the loss)", *map(_gib, (every, states, kept, every - states - kept))))
    return rows


def _collectives(simulated: "Simulated") -> list[tuple[str, ...]]:
    """Calls and bytes of all collectives that are alike."""
    sums: dict[tuple[str, str, int], list[int]] = {}
    for exchange in simulated.exchanges:
        summed = sums.setdefault((f"{exchange.phase}: {exchange.name}", exchange.dtype, exchange.ranks), [0, 0, 0])
        for place, value in enumerate((1, exchange.bytes, exchange.sent)):
            summed[place] += value
    return [
        (name, str(calls), dtype, f"{ranks:,}", _gib(size), _gib(sent))
        for (name, dtype, ranks), (calls, size, sent) in sums.items()
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f}"
