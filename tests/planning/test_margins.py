"""The planner's margins are those of benchmarks/planner.md."""

import re
from pathlib import Path

import pytest

from course_lib.planning import margins

PAGE = (Path(__file__).parents[2] / "benchmarks" / "planner.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "margin"), [("tokens/s/GPU", margins.THROUGHPUT), ("GiB", margins.MEMORY)])
def test_they_are_the_page_s(name, margin):
    row = re.search(rf"\*\*all, {re.escape(name)}\*\* \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|", PAGE)
    assert (margin.rows, margin.median, margin.ninth) == (
        int(row[1]),
        pytest.approx(float(row[2]) / 100),
        pytest.approx(float(row[3]) / 100),
    )
