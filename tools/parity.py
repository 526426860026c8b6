"""Run the parity matrix and put its table into docs/strategies.md, between the markers.

python tools/parity.py
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from course_lib.lessons import parity
from course_lib.writing import write_part

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
BEGIN, END = "<!-- parity: made by tools/parity.py -->", "<!-- end of parity -->"


def table(cells: Iterable[parity.Cell]) -> str:
    """One row per strategy and engine, one column per world size: the largest differences of loss and weight."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for cell in cells:
        exact = cell.loss == cell.weight == 0
        shown = "equal to the bit" if exact else f"{cell.loss:.1e} / {cell.weight:.1e}"
        rows.setdefault((cell.strategy, cell.engine), {})[cell.world_size] = shown if cell.agrees else f"**{shown}**"
    head = "| layout | engine | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in parity.WORLD_SIZES) + " |"
    lines = [head, "|---" * (2 + len(parity.WORLD_SIZES)) + "|"]
    lines += [
        f"| {strategy} | {engine} | " + " | ".join(by_size.get(n, "–") for n in parity.WORLD_SIZES) + " |"
        for (strategy, engine), by_size in rows.items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure all cells and rewrite the page's table."""
    with tempfile.TemporaryDirectory() as folder:
        cells = parity.matrix(Path(folder))
    order = [*parity.ROWS]
    cells.sort(key=lambda cell: (order.index((cell.strategy, cell.engine)), cell.world_size))
    agreeing = sum(cell.agrees for cell in cells)
    made = f"{table(cells)}\n\n{agreeing} of {len(cells)} cells agree."
    write_part(PAGE, BEGIN, END, made)
    print(made)


if __name__ == "__main__":
    main()
