"""Fill in what README.md states in figures, from the tables that measured it.

python tools/readme.py
"""

import re
from pathlib import Path

from course_lib.writing import write_part

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by tools/readme.py -->", "<!-- end of figures -->"


def column(table: str, head: str) -> dict[str, str]:
    """One column of a table of benchmarks/.

    Args:
        table: the file's name without its suffix.
        head: the whole text of the column's head.

    Returns:
        By the text of the whole row, its cells separated by `` | ``, in the table's order.

    Raises:
        ValueError: no table of the file has such a column.
    """
    page = (ROOT / "benchmarks" / f"{table}.md").read_text(encoding="utf-8")
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        heads, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        if head in heads:
            return {" | ".join(row): row[heads.index(head)] for row in cells}
    raise ValueError(f"benchmarks/{table}.md has no column {head!r}, which README.md wants")


def cell(table: str, row: str, head: str) -> str:
    """One cell of it, by the cells that its row begins with.

    Raises:
        ValueError: no row begins so, or several do.
    """
    said = [text for whole, text in column(table, head).items() if whole.startswith(f"{row} | ")]
    if len(said) != 1:
        raise ValueError(f"benchmarks/{table}.md has {len(said)} rows {row!r}, and README.md wants one")
    return said[0]


def ratio(table: str, row: str, head: str) -> str:
    """The number that a cell begins with, as a multiple."""
    return f"{cell(table, row, head).split()[0]} ×"


def rows() -> list[tuple[str, str, str, str]]:
    """What is measured, beside what, ours as a multiple of it, and the table."""

    def speed(row: str) -> str:
        return ", ".join(
            ratio("trainers-speed", f"{trainer}, {row}", "ratio, median of pairs (min–max)")
            for trainer in ("BasicTrainer", "AcceleratedTrainer")
        )

    def strategy(*names: str) -> str:
        return ", ".join(ratio("data-parallel-cpu", f"{name} | scratch", "speed against the peer") for name in names)

    def attention(*names: str) -> str:
        return ", ".join(ratio("context", name, "speed against the peer (range)") for name in names)

    def mean(system: str) -> str:
        return cell("trainers-accuracy", "mean", system)

    schedules = [float(text) for text in column("pipeline-cpu", "ours / torch").values()]
    transformers = "Hugging Face Trainer"
    return [
        ("samples/s at identical settings: basic, accelerated", transformers, speed("identical"), "trainers-speed"),
        (
            "samples/s at the defaults of each, in bf16, fast kernels",
            transformers,
            speed("defaults, fast kernels"),
            "trainers-speed",
        ),
        (
            "held-out accuracy at these defaults, three seeds",
            f"{transformers}: {mean(transformers)}",
            mean("AcceleratedTrainer, defaults (fast kernels)"),
            "trainers-accuracy",
        ),
        (
            "speed of data parallelism from scratch",
            "torch's DistributedDataParallel",
            strategy("ddp"),
            "data-parallel-cpu",
        ),
        ("speed of ZeRO-1, 2, 3 from scratch", "DeepSpeed", strategy("zero1", "zero2", "zero3"), "data-parallel-cpu"),
        ("speed of FSDP from scratch", "torch's FSDP2", strategy("fsdp"), "data-parallel-cpu"),
        (
            f"step time of the pipeline executor, {len(schedules)} schedules",
            "torch's schedule runtime",
            f"{min(schedules):.2f} to {max(schedules):.2f} ×",
            "pipeline-cpu",
        ),
        (
            "speed of ring attention, contiguous and zigzag",
            "torch's ring, flash kernel",
            attention("ring", "ring, zigzag"),
            "context",
        ),
        ("speed of Ulysses", "DeepSpeed's", attention("Ulysses"), "context"),
    ]


def block() -> str:
    """The table between the markers."""
    lines = ["| what, on two cores | beside | ours |", "|---|---|---|"]
    lines += [f"| {what} | {peer} | [{ours}](benchmarks/{table}.md) |" for what, peer, ours, table in rows()]
    return "\n".join(lines)


if __name__ == "__main__":
    write_part(README, BEGIN, END, block())
