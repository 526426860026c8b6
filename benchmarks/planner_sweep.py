"""The planner beside two sweeps that others made: which layouts ran out of memory, and how fast the rest ran.

    git clone https://github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts layouts
    git clone https://github.com/VIA-Research/vTrain vtrain
    pip install openpyxl                            # reads the first one's spreadsheets; nothing else needs it
    python -m benchmarks.planner_sweep layouts/data vtrain/data/ground_truth_single.csv   # writes planner-sweep.md

Sources: arXiv 2311.05610: Llamas of 13, 30 and 65 B parameters with a vocabulary of 128,000 on 32 to 256 A100-80,
ZeRO-1, 2,048 sequences of 2,048 tokens per step or 512 of 8,192. arXiv 2312.12391: GPTs of 0.2 to 1.3 B on one node of
A100, Megatron-DeepSpeed, 1,024 tokens, attention written out, whole blocks recomputed.
"""

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from benchmarks.planner_rows import gpt
from course_lib.planning import cost, hardware, intervals, memory, models, strategy
from course_lib.planning.intervals import chance_that_it_fits, regime_of
from course_lib.planning.plan import Plan
from course_lib.writing import write_text

PAGE = Path(__file__).with_name("planner-sweep.md")
SIZES = {"13B": (40, 40, 5120, 13824), "30B": (60, 52, 6656, 17920), "65B": (80, 64, 8192, 22016)}
"""Blocks, heads, hidden and MLP sizes of the Llamas (arXiv 2302.13971)."""


@dataclass(frozen=True)
class Run:
    """One run of the sweep, and what the planner says of it."""

    regime: str
    chance: float
    """Told that it fits."""
    measured: float | None
    """Tokens/s per GPU; None: it ran out of memory."""
    predicted: float


@functools.cache
def model_of(size: str) -> models.Model:
    """The Llama of a size."""
    layers, heads, hidden, ffn = SIZES[size]
    return models.from_config(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": ffn,
            "vocab_size": 128_000,
        }
    )


def read(name: str, row: dict[str, Any]) -> Run | None:
    """A spreadsheet's row; None where attention is not FlashAttention, or a run ended by anything but memory.

    Args:
        name: the file's, which has the size and whether sequences are of 8,192 tokens.
        row: by the columns' titles.
    """
    ended = row["Average Step Time"]
    if "flash" not in row["kernel"] or ended in ("Kernel not available", "Other Error"):
        return None
    sequence, batch = (8192, 512) if "8k" in name else (2048, 2048)
    tensor, pipeline, micro = (
        int(row[key]) for key in ("model_parallel_size", "pipe_parallel_size", "micro_batch_size")
    )
    data = int(row["World Size"]) // (tensor * pipeline)
    if not data or batch % (data * micro):
        return None
    model = model_of(name.split("_")[1])
    plan = Plan(
        sequence,
        "megatron",
        1,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        micro_batch=micro,
        accumulation=batch // data // micro,
        compiled="RMS" in row["kernel"],
        head="gathered",
        recipe="mixed",
        checkpointing="full" if row["activation_checkpointing_type"] == "every_layer" else "none",
        sequence_parallel=row.get("sequence_parallel") is True,
    )
    cluster, regime = hardware.cluster("A100-80", plan.gpus), regime_of(model, plan)
    return Run(
        regime,
        chance_that_it_fits(memory.estimate(model, plan).total, cluster.accelerator.memory),
        None if ended == "OOM Error" else batch * sequence / float(ended) / plan.gpus,
        cost.estimate(model, plan, cluster).tokens_per_second / plan.gpus,
    )


def runs(folder: Path) -> list[Run]:
    """Every run in the spreadsheets of a folder."""
    files = sorted(folder.rglob("*.xlsx"))
    if not files:
        raise SystemExit(f"no spreadsheet in {folder}: clone the repository that the module's docstring names")
    rows = [
        (file.name, row)
        for file in files
        for row in pandas.read_excel(file, header=1).dropna(subset=["kernel"]).to_dict("records")
    ]
    return [run for name, row in rows if (run := read(name, row))]


def read_small(row: dict[str, Any]) -> tuple[Plan, float]:
    """A row of the second sweep: its plan, and the predicted over the measured step, minus 1."""
    data, micro = row["data parallelism"], row["micro batch"]
    model = gpt(row["hidden size"], row["# layers"], row["attention heads"], 50257, row["sequence length"])
    plan = Plan(
        row["sequence length"],
        "megatron",
        data=data,
        tensor=row["tensor parallelism"],
        pipeline=row["pipeline parallelism"],
        micro_batch=micro,
        accumulation=row["global batch"] // data // micro,
        checkpointing="full",
        flash=False,
        compiled=True,
        sequence_parallel=False,
        overlap=False,
        precision="fp16",
    )
    predicted = cost.estimate(model, plan, hardware.cluster("A100-80", plan.gpus)).step
    return plan, predicted / (row["iteration time (ms)"] / 1e3) - 1


def of_small_models(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The page's part on the second sweep."""
    halves = [[read_small(row) for row in rows[start::2]] for start in (0, 1)]
    yield (
        f"\n## Small models on one node\n\n{len(rows)} runs of arXiv 2312.12391, whose steps wait for the host. "
        "How long it needs for an operation (`hardware.LAUNCH`, `work.MEGATRON_OPERATIONS`) is from every second of "
        "them; the others were left out. Error of the step's time:\n\n"
        "| | chosen by | left out |\n| --- | ---: | ---: |"
    )
    kinds: list[tuple[str, Callable[[Plan], bool]]] = [("all, median of its absolute value", lambda plan: True)]
    for size in (1, 2, 4, 8):
        kinds.append((f"micro-batch {size}, median", lambda plan, size=size: plan.micro_batch == size))
    for size in (1, 2, 4, 8):
        kinds.append((f"tensor ranks {size}, median", lambda plan, size=size: plan.tensor == size))
    for name, chosen in kinds:
        errors = [[error for plan, error in half if chosen(plan)] for half in halves]
        cells = [
            f"{statistics.median(map(abs, half)):.1%}"
            if "absolute" in name
            else f"{statistics.median(half):+.0%}"
            if half
            else ""
            for half in errors
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def report(found: list[Run]) -> Iterator[str]:
    """The page's part on the first sweep."""
    went = [run for run in found if run.measured is not None]
    yield (
        "# The planner beside sweeps that others made\n\nWritten by `python -m benchmarks.planner_sweep`. "
        f"{len(found)} runs of arXiv 2311.05610 with FlashAttention, {len(found) - len(went)} of which ran out of "
        "memory. No constant, no formula and no error that intervals are made of is from them. One word of how they "
        "are read was chosen when it had been seen which ran out: their logits are read as gathered on every tensor "
        "rank, which the source does not say.\n\n"
        "## Chance to fit\n\n| chance told | runs | ran | |\n| --- | ---: | ---: | ---: |"
    )
    bins: dict[int, list[Run]] = defaultdict(list)
    for run in found:
        bins[min(int(run.chance * 10), 9)].append(run)
    for tenth, members in sorted(bins.items()):
        ran = sum(run.measured is not None for run in members)
        yield f"| {tenth * 10}% to {tenth * 10 + 10}% | {len(members)} | {ran} | {ran / len(members):.0%} |"
    likely = [run for run in found if run.chance >= strategy.AT_LEAST]
    right = sum(run.measured is not None for run in likely)
    rest = len(went) - right
    yield (
        f"\nOf {len(likely)} that were told half a chance or more {right} ran, {right / len(likely):.0%}; of the "
        f"{len(found) - len(likely)} others {rest}, {rest / (len(found) - len(likely)):.0%}.\n\n"
        "## Speed\n\n| regime | runs | median error | in the 80% interval |\n| --- | ---: | ---: | ---: |"
    )
    for regime in (*intervals.REGIMES, "all"):
        members = [run for run in went if regime in (run.regime, "all")]
        if members:
            spans = [intervals.interval("tokens/s/GPU", run.predicted, run.regime) for run in members]
            inside = sum(span.low <= (run.measured or 0) <= span.high for span, run in zip(spans, members, strict=True))
            middle = statistics.median(run.predicted / (run.measured or 1) - 1 for run in members)
            yield f"| {regime} | {len(members)} | {middle:+.1%} | {inside}, {inside / len(members):.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layouts", type=Path, help="folder with the first sweep's spreadsheets")
    parser.add_argument("small", type=Path, help="the second one's table")
    args = parser.parse_args()
    small = pandas.read_csv(args.small, encoding="utf-8-sig").to_dict("records")
    text = "\n".join([*report(runs(args.layouts)), *of_small_models(small)]) + "\n"
    write_text(PAGE, text)
    print(text)


if __name__ == "__main__":
    main()
