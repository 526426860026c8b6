"""Errors of the planner where it was compared with published and measured runs (benchmarks/planner.md)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Margin:
    """Absolute errors of a prediction, predicted by measured less one, as shares.

    Attributes:
        rows: runs compared.
        median: half of them are off by less.
        ninth: nine in ten are off by less.
    """

    rows: int
    median: float
    ninth: float


THROUGHPUT = Margin(226, 0.068, 0.273)
"""Of tokens/s per GPU."""
MEMORY = Margin(58, 0.052, 0.221)
"""Of GiB per GPU."""


def said() -> str:
    """Both medians in a sentence; how far a number may lie off is said by its interval."""
    return (
        f"Of {THROUGHPUT.rows} measured runs half were within {THROUGHPUT.median:.1%} of the planned tokens/s, "
        f"of {MEMORY.rows} half within {MEMORY.median:.1%} of the planned memory."
    )
