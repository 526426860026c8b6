"""``course plan``: how to train a model on some GPUs: what fits, what is fastest, why, and how to start it."""

import argparse
import re
from typing import TYPE_CHECKING, Any

from course_lib.errors import ConfigError

if TYPE_CHECKING:  # what --help need not load
    from course_lib.planning.plan import Plan
    from course_lib.planning.strategy import Candidate, Search

NAME = "plan"
HELP = "plan a training: the layouts that fit on some GPUs, ranked, explained, with memory, hours and cost"

COLUMNS = ("strategy", "micro-batch", "accumulation", "GiB a GPU", "tokens/s", "MFU")
COLOURS = {"parameters": "blue", "gradients": "cyan", "optimizer": "magenta", "activations": "yellow",
           "logits": "red", "buffers": "green", "runtime": "white"}
BAR = 60
"""Characters of the memory bar."""
SUFFIX = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def tokens(text: str) -> float:
    """A number of tokens: 3e9, 500M, 100B, 1.5T."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?(?:[eE]\d{1,2})?)([KMBT]?)", text.strip().upper())
    if not match or float(match[1]) <= 0:
        raise ValueError(text)
    return float(match[1]) * SUFFIX[match[2]]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", required=True, metavar="NAME",
                        help="a bundled name (facebook/opt-6.7b), a folder or config.json, or a name on the Hub")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all [one node]")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="A100-80, H100, T4 ..., or a SageMaker instance")
    parser.add_argument("--max_memory_gb", type=float, metavar="GIB", help="plan with no more memory a GPU than this")
    parser.add_argument("--global_batch", type=int, metavar="N", help="sequences of one step [about 1M tokens]")
    parser.add_argument("--sequence_length", type=int, metavar="N", help="tokens [what the model takes, at most 2048]")
    parser.add_argument("--tokens", type=tokens, metavar="N", help="to train on, as 100B: adds hours and cost")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Search, and print what was found."""
    from course_lib.planning import hardware, models, strategy

    for name in ("gpus", "global_batch", "sequence_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}", "give a whole number from 1 on")
    model = models.load(args.model)
    cluster = hardware.cluster(args.gpu, args.gpus, memory_gb=args.max_memory_gb)
    length = min(2048, model.context or 2048) if args.sequence_length is None else args.sequence_length
    found = strategy.search(model, cluster, length, args.global_batch)
    if args.json:
        import json

        print(json.dumps(as_json(found, args.tokens), indent=2))
    else:
        _show(found, args.tokens)
    return 0


def launch_line(plan: "Plan", gpus_per_node: int, model: str) -> str:
    """The command that starts such a run on every node; layouts beyond ours name what has to carry them out."""
    if plan.tensor > 1 or plan.pipeline > 1:
        return (f"Megatron-LM or torchtitan: tensor {plan.tensor}, pipeline {plan.pipeline} ({plan.schedule}, "
                f"{plan.virtual} stages a rank), data {plan.data}; `course train` has no such layout")
    nodes = -(-plan.gpus // gpus_per_node)
    strategy = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": f"zero{plan.stage}"}[plan.engine]
    processes = f"--nproc_per_node {min(gpus_per_node, plan.gpus)}"
    where = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint HOST:29500" if nodes > 1 else "--standalone"
    options = [f"--model {model}", "--task causal_lm", f"--strategy {strategy}", f"--batch_size {plan.micro_batch}",
               f"--gradient_accumulation_steps {plan.accumulation}", f"--max_length {plan.sequence_length}",
               f"--mixed_precision {plan.precision if plan.precision in ('bf16', 'fp16') else 'no'}"]
    if plan.checkpointing == "full":
        options.append("--activation_checkpointing true")
    if plan.offload != "none":
        options.append(f"--offload {plan.offload}")
    if plan.compiled and plan.engine != "deepspeed":
        options.append("--torch_compile true")
    return f"torchrun {where} {processes} -m course_lib.cli train " + " ".join(options)


def as_json(found: "Search", budget: float | None) -> dict[str, Any]:
    """Everything that the page says, with bytes and seconds."""
    from course_lib.planning import strategy

    return {
        "model": found.model.name, "parameters": found.model.parameters,
        "gpu": found.cluster.accelerator.name, "gpus": found.cluster.gpus,
        "gpu_memory_bytes": found.cluster.accelerator.memory, "layouts_tried": found.considered,
        "layouts_that_fit": len(found.candidates),
        "plans": [_candidate(each, budget) for each in found.best_of_each()],
        "failed": [{"family": each.family, "plan": each.plan.strategy, "needs_bytes": strategy.needed(each.memory),
                    "remedy": each.remedy} for each in found.failed],
        "explanation": strategy.explain(found),
        "launch": launch_line(found.best.plan, found.cluster.gpus_per_node, found.model.name)}


def _candidate(each: "Candidate", budget: float | None) -> dict[str, Any]:
    from dataclasses import asdict

    from course_lib.planning import strategy

    time: dict[str, float | None] = {"tokens_per_second": each.cost.tokens_per_second,
                                     "step_seconds": each.cost.step, "mfu": each.cost.mfu}
    if budget:
        time |= {"hours": each.cost.hours(budget), "dollars": each.cost.dollars(budget)}
    return {"strategy": each.plan.strategy, "plan": asdict(each.plan), "memory_bytes": strategy.kinds(each.memory),
            "host_bytes": each.memory.host, **time}


def _show(found: "Search", budget: float | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from course_lib.planning import strategy

    console, chip = Console(), found.cluster.accelerator
    plan = found.best.plan
    console.print(f"{found.model.name} ({found.model.parameters:,} parameters) on {found.cluster.gpus} x {chip.name}, "
                  f"{plan.global_batch} x {plan.sequence_length:,} tokens a step\n", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in (*COLUMNS, *(("hours",) if budget else ())):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for each in found.best_of_each():
        cells = [each.plan.strategy, str(each.plan.micro_batch), str(each.plan.accumulation),
                 f"{each.memory.total / 2**30:.1f}", f"{each.cost.tokens_per_second:,.0f}", f"{each.cost.mfu:.1%}"]
        table.add_row(*cells, *((f"{each.cost.hours(budget):,.1f}",) if budget else ()))
    console.print(table)
    console.print()
    _bar(console, found)
    for line in strategy.explain(found):
        console.print(line, highlight=False)
    if budget:
        dollars = found.best.cost.dollars(budget)
        price = f", ${dollars:,.0f} at list price" if dollars else "; no price is known: name a SageMaker instance"
        console.print(f"{budget:,.0f} tokens take {found.best.cost.hours(budget):,.1f} hours{price}.", highlight=False)
    console.print(f"\nStart it with:\n  {launch_line(plan, found.cluster.gpus_per_node, found.model.name)}",
                  highlight=False, soft_wrap=True)


def _bar(console: Any, found: "Search") -> None:
    """Memory of one rank of the best plan as a bar over the GPU's whole memory."""
    from rich.text import Text

    from course_lib.planning import strategy
    from course_lib.planning.memory import RUNTIME

    whole = found.cluster.accelerator.memory
    parts = {**strategy.kinds(found.best.memory), "runtime": float(RUNTIME)}
    bar, filled, drawn = Text("a rank  ["), 0.0, 0
    for kind, size in parts.items():
        filled += size
        upto = round(filled / whole * BAR)
        bar.append(kind[0].upper() * (upto - drawn), style=COLOURS[kind])
        drawn = upto
    bar.append("." * (BAR - drawn) + f"] {filled / 2**30:.1f} of {whole / 2**30:.1f} GiB\n        ")
    for kind, size in parts.items():
        bar.append(f"{kind[0].upper()} {kind} {size / 2**30:.1f}  ", style=COLOURS[kind])
    if found.best.memory.host:
        bar.append(f"\n        and {found.best.memory.host / 2**30:.1f} GiB of host memory for each GPU")
    console.print(bar, soft_wrap=True)
    console.print()
