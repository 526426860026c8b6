"""Tables of commands, in their plain form: no lines, columns of numbers to the right."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what --help need not load
    from rich.table import Table


def plain(heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 0, title: str | None = None) -> "Table":
    """A table of text.

    Args:
        heads: of the columns.
        rows: each as long as ``heads``, or shorter.
        names: number of the column that stands to the left; the others are numbers.
        title: above it.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number == names else "right")
    for row in rows:
        table.add_row(*row)
    return table
