"""Put the table of combinations into docs/strategies.md, between the marks.

python tools/combinations.py
"""

from pathlib import Path

from course_lib.config.axes import Refusal
from course_lib.config.combinations import PLAIN, default_engine, table
from course_lib.config.refusals import REFUSALS
from course_lib.writing import write_part

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"
BEGIN, END = "<!-- combinations: made by tools/combinations.py -->", "<!-- end of combinations -->"


def page() -> str:
    """The table of pairs, and every refusal with its reason."""
    head, *rows = table()
    pairs = [head, ["---"] * len(head), *rows]
    refused = [["not together", "why", "instead"], ["---"] * 3, *map(_told, REFUSALS)]
    return "\n\n".join("\n".join(f"| {' | '.join(cells)} |" for cells in lines) for lines in (pairs, refused))


def _told(row: Refusal) -> list[str]:
    """A refusal for reading: its axes, and its line for the first run that it is about."""
    run = {**PLAIN, **next(row.examples())}
    error = row.error(run | {"engine": run["engine"] or default_engine(run)})
    return [" + ".join(axis.replace("|", ", ") for axis in row.axes), error.what, error.instead]


if __name__ == "__main__":
    write_part(PAGE, BEGIN, END, page())
