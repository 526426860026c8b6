"""Fill in what README.md states in figures, from the tables that measured it.

    python tools/readme.py
"""

from pathlib import Path

from course_lib.writing import write_text

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by tools/readme.py -->", "<!-- end of figures -->"
STRATEGIES = "speed against the peer"
SPEED = "ratio, median of pairs (min–max)"


def cell(table: str, row: str, column: str) -> str:
    """One cell of a table of benchmarks/.

    Args:
        table: the file's name without its suffix.
        row: the cells that the row begins with, separated by `` | ``.
        column: the whole text of the column's head.

    Raises:
        ValueError: the file has no such row or column, or several.
    """
    heads: list[str] = []
    said = []
    for line in (ROOT / "benchmarks" / f"{table}.md").read_text(encoding="utf-8").splitlines():
        cells = [text.strip() for text in line.strip("|").split("|")] if line.startswith("|") else []
        heads = heads if cells and heads else cells
        if column in heads and " | ".join(cells).startswith(f"{row} | "):
            said.append(cells[heads.index(column)])
    if len(said) != 1:
        raise ValueError(f"benchmarks/{table}.md has {len(said)} rows {row!r} under {column!r}: README.md wants one")
    return said[0]


def first(text: str) -> str:
    """The number that a cell begins with."""
    return text.split()[0]


def ratio(table: str, row: str, column: str) -> str:
    """The same as a multiple."""
    return f"{first(cell(table, row, column))} ×"


def rows() -> list[tuple[str, str, str, str]]:
    """What is measured, beside what, ours as a multiple of it, and the table."""
    def speed(row: str) -> str:
        return ", ".join(ratio("trainers-speed", f"{trainer}, {row}", SPEED)
                         for trainer in ("BasicTrainer", "AcceleratedTrainer"))

    def strategy(*names: str) -> str:
        return ", ".join(ratio("data-parallel-cpu", f"{name} | scratch", STRATEGIES) for name in names)

    def mean(system: str) -> str:
        return cell("trainers-accuracy", "mean", system)

    schedules = [float(cell("pipeline-cpu", name, "ours / torch")) for name in (
        "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv", "dualpipev")]
    transformers = "Hugging Face Trainer"
    return [
        ("samples/s at identical settings: basic, accelerated", transformers, speed("identical"), "trainers-speed"),
        ("samples/s at the defaults of each, in bf16, fast kernels", transformers, speed("defaults, fast kernels"),
         "trainers-speed"),
        ("held-out accuracy at these defaults, three seeds", f"{transformers}: {mean(transformers)}",
         mean("AcceleratedTrainer, defaults (fast kernels)"), "trainers-accuracy"),
        ("speed of data parallelism from scratch", "torch's DistributedDataParallel", strategy("ddp"),
         "data-parallel-cpu"),
        ("speed of ZeRO-1, 2, 3 from scratch", "DeepSpeed", strategy("zero1", "zero2", "zero3"), "data-parallel-cpu"),
        ("speed of FSDP from scratch", "torch's FSDP2", strategy("fsdp"), "data-parallel-cpu"),
        (f"step time of the pipeline executor, {len(schedules)} schedules", "torch's schedule runtime",
         f"{min(schedules):.2f} to {max(schedules):.2f} ×", "pipeline-cpu"),
        ("speed of ring attention, contiguous and zigzag", "torch's ring, flash kernel",
         ", ".join(ratio("context", row, "speed against the peer (range)") for row in ("ring", "ring, zigzag")),
         "context"),
        ("speed of Ulysses", "DeepSpeed's", ratio("context", "Ulysses", "speed against the peer (range)"), "context"),
    ]


def block() -> str:
    """The table between the markers."""
    lines = ["| what, on two cores | beside | ours |", "|---|---|---|"]
    lines += [f"| {what} | {peer} | [{ours}](benchmarks/{table}.md) |" for what, peer, ours, table in rows()]
    return "\n".join(lines)


def filled(text: str) -> str:
    """README.md with its figures as the tables have them."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    write_text(README, filled(README.read_text(encoding="utf-8")))
