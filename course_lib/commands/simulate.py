"""``course simulate``: what one rank of a cluster of any size holds and sends, found in this process without a GPU."""

import argparse
from typing import TYPE_CHECKING

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
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{model} ({simulated.parameters:,} parameters), {setting.strategy}, rank {setting.rank} of "
        f"{setting.world_size:,}, {setting.micro_batch} x {setting.sequence_length:,} tokens, "
        f"{setting.precision}{', every block recomputed' if setting.checkpointing else ''}\n"
        f"peak: {_gib(simulated.total)} GiB, in the {simulated.phase} "
        f"{'pass' * (simulated.phase != 'step')}\n",
        highlight=False,
    )

    def table(*heads: str) -> Table:
        made = Table(box=None, pad_edge=False)
        for place, head in enumerate(heads):
            made.add_column(head, justify="right" if place else "left")
        return made

    kinds = table("GiB by kind", "own peak", "at the peak", "after backward")
    for kind in simulated.peak:
        kinds.add_row(kind, *(_gib(sizes[kind]) for sizes in (simulated.peak, simulated.at_peak, simulated.resident)))
    console.print(kinds)

    console.print()
    largest = sorted(simulated.modules, key=lambda name: -sum(simulated.modules[name].values()))[:MODULES]
    parts = table("GiB by part, at the peak", "all", "states", "activations", "rest")
    for name in largest:
        held = simulated.modules[name]
        states = sum(held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer states"))
        kept = held.get("activations", 0) + held.get("logits", 0)
        every = sum(held.values())
        parts.add_row(name or "(the loss)", *map(_gib, (every, states, kept, every - states - kept)))
    console.print(parts)
    if len(simulated.modules) > len(largest):
        smaller = len(simulated.modules) - len(largest)
        console.print(f"and {smaller} smaller; --json has all and the collectives in order")

    console.print()
    exchanged = table("collectives", "calls", "dtype", "ranks", "GiB", "GiB sent by this rank")
    sums: dict[tuple[str, str, int], list[int]] = {}
    for exchange in simulated.exchanges:
        summed = sums.setdefault((f"{exchange.phase}: {exchange.name}", exchange.dtype, exchange.ranks), [0, 0, 0])
        for place, value in enumerate((1, exchange.bytes, exchange.sent)):
            summed[place] += value
    for (name, dtype, ranks), (calls, size, sent) in sums.items():
        exchanged.add_row(name, str(calls), dtype, f"{ranks:,}", _gib(size), _gib(sent))
    console.print(exchanged)
    if compared:
        console.print()
        errors = table("GiB", "formula", "simulated", "error")
        for row in compared:
            errors.add_row(
                row.kind, _gib(row.formula), _gib(row.simulated), f"{row.error:+.1%}" if row.simulated else ""
            )
        console.print(errors)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f}"
