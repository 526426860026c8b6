"""The page of ``course plan``: the answer in a sentence, the command that starts it, tables, and all of it as JSON."""

import shlex
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from course_lib.commands import tables

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.strategy import Candidate, Search

COLUMNS = ("strategy", "micro-\nbatch", "accumu-\nlation", "GiB per\nGPU", "chance\nto fit", "tokens/s", "MFU")
COLOURS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "activations": "yellow",
    "logits": "red",
    "buffers": "green",
    "runtime": "white",
}
BAR = 60
"""Characters of the memory bar, where the terminal has them."""
BESIDE = 28
"""Characters beside it."""
STAND_IN = "pydocs"
"""Data of the printed command where none are named: text that every machine has."""


def as_json(result: "Search", budget: float | None, dataset: str | None = None) -> dict[str, Any]:
    """Everything that the page says, with bytes and seconds."""
    from course_lib.planning import margins, strategy, to_launchers

    return {
        "model": result.model.name,
        "parameters": result.model.parameters,
        "gpu": result.cluster.accelerator.name,
        "gpus": result.cluster.gpus,
        "gpu_memory_bytes": result.cluster.accelerator.memory,
        "layouts_tried": result.considered,
        "layouts_that_fit": len(result.candidates),
        "plans": [
            _candidate(candidate, budget)
            | _sure(result, candidate)
            | {"why_not_here": to_launchers.why_not(candidate.plan, result.model)}
            for candidate in result.best_of_each()
        ],
        "failed": [
            {"family": f.family, "plan": f.plan.strategy, "needs_bytes": strategy.needed(f.memory), "remedy": f.remedy}
            for f in result.failed
        ],
        "answer": answer(result),
        "explanation": strategy.explain(result),
        "error": {"tokens_per_second": asdict(margins.THROUGHPUT), "memory": asdict(margins.MEMORY)},
        "launch": to_launchers.launch_line(
            result.best.plan, result.cluster.gpus_per_node, result.model, dataset=dataset, tokens=budget
        )
        if to_launchers.runs_here(result.best.plan, result.model)
        else None,
    }


def _candidate(candidate: "Candidate", budget: float | None) -> dict[str, Any]:
    time: dict[str, float | None] = {
        "tokens_per_second": candidate.cost.tokens_per_second,
        "step_seconds": candidate.cost.step,
        "mfu": candidate.cost.mfu,
    }
    if budget:
        time |= {"hours": candidate.cost.hours(budget), "dollars": candidate.cost.dollars(budget)}
    return {
        "strategy": candidate.plan.strategy,
        "plan": asdict(candidate.plan),
        "memory_bytes": candidate.memory.at_peak(),
        "host_bytes": candidate.memory.host,
        **time,
    }


def _sure(result: "Search", candidate: "Candidate") -> dict[str, Any]:
    """The interval of a plan's speed, and the chance that it fits."""
    from course_lib.planning import intervals

    regime = intervals.regime_of(result.model, candidate.plan)
    between = intervals.interval("tokens/s/GPU", candidate.cost.tokens_per_second, regime)
    return {
        "tokens_per_second_interval": [between.low, between.high],
        "interval_share": intervals.SHARE,
        "chance_that_it_fits": candidate.chance,
    }


def show(result: "Search", budget: float | None, dataset: str) -> None:
    """The answer, the command, the alternatives, and what the answer hangs on."""
    from rich.console import Console

    from course_lib.planning import margins, strategy, to_launchers

    console, model = Console(), result.model
    console.print(answer(result), highlight=False)
    if budget:
        console.print(bill(result, budget), highlight=False)
    for line in command(result, budget, dataset, console.width):
        console.print(line, highlight=False, markup=False, soft_wrap=line.startswith(" "))
    console.print()
    rows = [cells(row(candidate, budget)) for candidate in result.best_of_each()]
    console.print(tables.plain(columns(budget), rows))
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
    return (
        f"Train {model.name} ({model.parameters:,} parameters) on {result.cluster.gpus} x {chip.name} with "
        f"{plan.strategy}, {micro} at a time, {plan.global_batch} x {plan.sequence_length:,} tokens per step: "
        f"about {speed:,.0f} tokens/s ({intervals.SHARE:.0%} of such plans: {between.low:,.0f} to "
        f"{between.high:,.0f}), {held / 2**30:.1f} of {chip.memory / 2**30:.1f} GiB, which fits with a chance of "
        f"{result.best.chance:.0%}."
    )


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
    start = (
        f"Start it with{data}:"
        if ours is best
        else (
            f"The next that it runs is {ours.plan.strategy}, at "
            f"{ours.cost.tokens_per_second / best.cost.tokens_per_second:.0%} of that speed, which fits with a chance "
            f"of {ours.chance:.0%}{data}:"
        )
    )
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
    together = " ".join(option.replace(" ", "\0") for option in options)
    *lines, last = textwrap.wrap(
        together, width - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [part.replace("\0", " ") for part in (*(f"{part} \\" for part in lines), last)]


def columns(budget: float | None) -> list[str]:
    """Heads of the table of plans; hours where tokens are given."""
    return [*COLUMNS, *(["hours"] if budget else [])]


def row(candidate: "Candidate", budget: float | None) -> dict[str, Any]:
    """A plan's row under :func:`columns`, as JSON."""
    cost = candidate.cost
    return {
        "strategy": candidate.plan.strategy,
        "micro_batch": candidate.plan.micro_batch,
        "accumulation": candidate.plan.accumulation,
        "bytes": candidate.memory.total,
        "chance_that_it_fits": candidate.chance,
        "tokens_per_second": cost.tokens_per_second,
        "mfu": cost.mfu,
    } | ({"hours": cost.hours(budget), "dollars": cost.dollars(budget)} if budget else {})


def cells(row: dict[str, Any]) -> list[str]:
    """The text of a :func:`row`."""
    return [
        row["strategy"],
        str(row["micro_batch"]),
        str(row["accumulation"]),
        f"{row['bytes'] / 2**30:.1f}",
        f"{row['chance_that_it_fits']:.0%}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['mfu']:.1%}",
        *([f"{row['hours']:,.1f}"] if "hours" in row else []),
    ]


def bill(result: "Search", budget: float) -> str:
    """Time and price of so many tokens."""
    from course_lib.planning import intervals

    hours, dollars = result.best.cost.hours(budget), result.best.cost.dollars(budget)
    between = intervals.of_hours(result.model, result.best.plan, hours)
    whose = f"of {result.cluster.instance}" if result.cluster.instance else "of the cheapest SageMaker instance with it"
    price = (
        f"${dollars:,.0f} at the list price {whose}"
        if dollars
        else "no price is known: SageMaker has no instance with it"
    )
    return (
        f"{budget:,.0f} tokens take {hours:,.1f} hours ({intervals.SHARE:.0%} of such plans: {between.low:,.1f} to "
        f"{between.high:,.1f}); {price}."
    )


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
    legend = Text("  ").join(
        Text(f"{kind[0].upper()} {kind} {size / 2**30:.1f}".replace(" ", "\u00a0"), COLOURS[kind])
        for kind, size in parts.items()
    )
    legend.append("\u00a0besides")
    if held.host:
        legend.append(f"  and {held.host / 2**30:.1f} GiB of host memory for each GPU")
    console.print(Padding(legend, (0, 0, 0, 8)))
    console.print()
