"""What lesson 08 counts: the bytes of each axis of a grid."""

import pytest

from course_lib.lessons.tensor.lab import axis_of
from course_lib.parallel.topology import RankGrid


def test_a_pair_of_ranks_lies_along_one_axis():
    grid, pairs = RankGrid(dp=2, pp=2, tp=2), ((0, 4), (0, 2), (0, 1), (7, 5), (7, 6), (3, 7))
    assert [axis_of(grid, pair) for pair in pairs] == ["dp", "pp", "tp", "pp", "tp", "dp"]
    with pytest.raises(ValueError):
        axis_of(grid, (0, 3))
