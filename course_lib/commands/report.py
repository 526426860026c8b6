"""The tables that commands end with."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from course_lib.config import Config
from course_lib.training.checkpoints.model_folder import load_line

NAMES = {"majority_class": "majority class", "tfidf_logistic_regression": "TF-IDF + logistic regression"}


def print_summary(config: Config, summary: dict[str, Any]) -> None:
    """Print what a run reached, beside the baselines, what it cost, and how to load its model."""
    console = Console()
    console.print(scores_table(config, summary))
    peaks = enumerate(summary["memory"]["peak_bytes"])
    memory = ", ".join(f"rank {rank}: {size / 2**30:.2f} GiB" for rank, size in peaks)
    facts = Table(show_header=False, box=None)
    train = summary["train"]
    kernels = ", fast CPU kernels" if summary["cpu_kernels"] == "fast" else ""
    facts.add_row(
        "processes", f"{summary['world_size']} ({summary['device']}, precision {summary['mixed_precision']}{kernels})"
    )
    if pipeline := summary.get("pipeline"):
        facts.add_row(
            "pipeline",
            f"{pipeline['schedule']}, {pipeline['stages']} stages on "
            f"{pipeline['pipeline_parallel_size']} ranks × {pipeline['data_parallel_size']}, "
            f"{pipeline['pipeline_chunks']} micro-batches, "
            f"{pipeline['predicted_bubble']:.0%} idle by the simulator",
        )
        facts.add_row("", pipeline["split"][-1])
    mfu = f", MFU {train['mfu']:.1%} {train['mfu_note']}" if train["mfu"] is not None else ""
    facts.add_row(
        "training",
        f"{train['steps']} steps, {train['seconds']:.0f} s, "
        f"{train['samples_per_second']:.0f} samples/s, "
        f"{train['tokens_per_second']:,.0f} tokens/s{mfu}",
    )
    facts.add_row("peak memory", memory)
    facts.add_row("model", summary["model_dir"])
    console.print(facts)
    console.print("load it with", style="dim")
    console.print(load_line(config), soft_wrap=True, highlight=False, markup=False)


def scores_table(config: Config, summary: dict[str, Any]) -> Table:
    """Scores of the baselines and of the trained model on the held-out split."""
    scores = summary["eval"]
    table = Table(title=f"{summary['data']['name']}, {scores['split']} split, {scores['rows']} rows")
    table.add_column("system")
    columns = ("accuracy", "macro_f1") if "accuracy" in scores else ("loss", "perplexity")
    for column in columns:
        table.add_column(column, justify="right")
    for name, values in summary["baselines"].items():
        table.add_row(NAMES[name], *(with_interval(values, column) for column in columns))
    table.add_row(
        f"{config.model.model}, fine-tuned", *(with_interval(scores, column) for column in columns), style="bold"
    )
    table.caption = "in brackets: 95 % interval over such rows"
    return table


def with_interval(scores: Mapping[str, Any], name: str) -> str:
    """``0.829 [0.821, 0.837]``: a score and its 95 % interval."""
    ends = scores["interval95"].get(name)
    return f"{scores[name]:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def print_scores(scores: dict[str, Any]) -> None:
    """One row per figure."""
    table = Table(title=f"{scores['model']} on {scores['dataset']}, {scores['split']} split", show_header=False)
    for name, value in scores.items():
        if name not in ("model", "dataset", "split", "interval95", "notes"):
            low, high = scores["interval95"].get(name, (None, None))
            table.add_row(
                name,
                f"{value:.6f}" if isinstance(value, float) else str(value),
                "" if low is None else f"{low:.3f} to {high:.3f}",
            )
    table.caption = "third column: 95 % interval over such rows"
    console = Console()
    console.print(table)
    for note in scores["notes"]:
        console.print(note, soft_wrap=True, highlight=False, markup=False)
