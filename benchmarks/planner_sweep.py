"""The planner beside two sweeps that others made: which layouts ran out of memory, and how fast the rest ran.

    git clone https://github.com/Aleph-Alpha/NeurIPS-WANT-submission-efficient-parallelization-layouts layouts
    git clone https://github.com/VIA-Research/vTrain vtrain
    pip install openpyxl                            # reads the first one's spreadsheets; nothing else needs it
    python -m benchmarks.planner_sweep layouts/data vtrain/data/ground_truth_single.csv   # writes planner-sweep.md

Sources: arXiv 2311.05610: Llamas of 13, 30 and 65 B parameters with a vocabulary of 128,000 on 32 to 256 A100-80,
ZeRO-1, 2,048 sequences of 2,048 tokens per step or 512 of 8,192. arXiv 2312.12391: GPTs of 0.2 to 1.3 B on one node of
A100, Megatron-DeepSpeed, 1,024 tokens, attention written out, whole blocks recomputed.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas

from benchmarks.harness import options, publish, table
from benchmarks.planner_rows import gpt, llama
from course_lib.planning import cost, hardware, intervals, memory, models, strategy
from course_lib.planning.intervals import chance_that_it_fits, regime_of
from course_lib.planning.plan import Plan

SIZES = {"13B": (5120, 40, 40, 13824), "30B": (6656, 60, 52, 17920), "65B": (8192, 80, 64, 22016)}
"""Hidden size, blocks, heads and MLP sizes of the Llamas (arXiv 2302.13971)."""


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
    hidden, layers, heads, ffn = SIZES[size]
    return llama(hidden, layers, heads, heads, ffn, 128_000)


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
    yield "## Small models on one node"
    yield (
        f"{len(rows)} runs of arXiv 2312.12391, whose steps wait for the host. "
        "How long it needs for an operation (`hardware.LAUNCH`, `work.MEGATRON_OPERATIONS`) is from every second of "
        "them; the others were left out. Error of the step's time:"
    )
    of_all = (f"{median(abs(error) for _, error in half):.1%}" for half in halves)
    found = [("all, median of its absolute value", *of_all)]
    for what, name in (("micro_batch", "micro-batch"), ("tensor", "tensor ranks")):
        for size in (1, 2, 4, 8):
            errors = [[error for plan, error in half if getattr(plan, what) == size] for half in halves]
            found.append((f"{name} {size}, median", *(f"{median(half):+.0%}" if half else "" for half in errors)))
    yield table(" | chosen by | left out", found, right=(1, 2))


def report(found: list[Run]) -> Iterator[str]:
    """The page's part on the first sweep."""
    went = [run for run in found if run.measured is not None]
    yield (
        f"Written by `python -m benchmarks.planner_sweep`. "
        f"{len(found)} runs of arXiv 2311.05610 with FlashAttention, {len(found) - len(went)} of which ran out of "
        "memory. No constant, no formula and no error that intervals are made of is from them. One word of how they "
        "are read was chosen when it had been seen which ran out: their logits are read as gathered on every tensor "
        "rank, which the source does not say."
    )
    tenths: dict[int, list[bool]] = defaultdict(list)
    for run in found:
        tenths[min(int(run.chance * 10), 9)].append(run.measured is not None)
    yield "## Chance to fit"
    chances = [
        (f"{tenth * 10}% to {tenth * 10 + 10}%", len(ran), sum(ran), f"{sum(ran) / len(ran):.0%}")
        for tenth, ran in sorted(tenths.items())
    ]
    yield table("chance told | runs | ran | ", chances, right=(1, 2, 3))
    likely = [run for run in found if run.chance >= strategy.AT_LEAST]
    right, others = sum(run.measured is not None for run in likely), len(found) - len(likely)
    rest = len(went) - right
    yield (
        f"Of {len(likely)} that were told half a chance or more {right} ran, {right / len(likely):.0%}; of the "
        f"{others} others {rest}, {rest / others:.0%}."
    )
    yield "## Speed"
    yield table("regime | runs | median error | in the 80% interval", speeds(went), right=(1, 2, 3))


def speeds(went: list[Run]) -> Iterator[tuple]:
    """Rows by regime: the error, and how often the interval holds."""
    for regime in (*intervals.REGIMES, "all"):
        members = [run for run in went if regime in (run.regime, "all")]
        if members:
            spans = [intervals.interval("tokens/s/GPU", run.predicted, run.regime) for run in members]
            inside = sum(span.low <= (run.measured or 0) <= span.high for span, run in zip(spans, members, strict=True))
            middle = median(run.predicted / (run.measured or 1) - 1 for run in members)
            yield regime, len(members), f"{middle:+.1%}", f"{inside}, {inside / len(members):.0%}"


def main() -> None:
    """Read both, and write the page."""
    args = options(
        __doc__,
        layouts={"type": Path, "help": "folder with the first sweep's spreadsheets"},
        small={"type": Path, "help": "the second one's table"},
    )
    small = pandas.read_csv(args.small, encoding="utf-8-sig").to_dict("records")
    parts = [*report(runs(args.layouts)), *of_small_models(small)]
    publish("planner-sweep", "The planner beside sweeps that others made", (), *parts)


if __name__ == "__main__":
    main()
