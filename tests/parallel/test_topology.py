"""The rank grid as a value; its process groups are in tests/parallel/test_tensor.py."""

import pytest

from course_lib.errors import ConfigError
from course_lib.parallel.topology import AXES, Coordinates, RankGrid

CUBE = RankGrid(dp=2, pp=2, tp=2)


def test_neighbouring_ranks_share_a_layer():
    assert CUBE.ranks.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert RankGrid(dp=3, pp=1, tp=2).ranks.tolist() == [[[0, 1]], [[2, 3]], [[4, 5]]]


@pytest.mark.parametrize(
    ("axes", "lines"),
    [
        (("tp",), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("pp",), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (("dp",), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (("pp", "tp"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (("dp", "tp"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ((), [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
)
def test_lines_differ_along_the_given_axes_alone(axes, lines):
    assert CUBE.lines(*axes) == lines


@pytest.mark.parametrize("grid", [RankGrid(), CUBE, RankGrid(2, 3, 4)])
def test_coordinates_and_ranks_are_each_others_reverse(grid):
    places = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert [int(grid.ranks[place[:3]]) for place in places] == list(range(grid.dp * grid.pp * grid.tp))
    assert places == sorted(places) and len(set(places)) == grid.world_size
    for axis in AXES:
        assert sorted(rank for line in grid.lines(axis) for rank in line) == list(range(grid.world_size))
        for line in grid.lines(axis):
            assert [getattr(grid.coordinates(rank), axis) for rank in line] == list(range(getattr(grid, axis)))


def test_data_parallelism_takes_what_is_left():
    assert RankGrid.over(16, pp=2, tp=4) == RankGrid(dp=2, pp=2, tp=4)
    assert RankGrid.over(1, pp=1, tp=1) == RankGrid() and RankGrid.over(6, pp=1, tp=1).dp == 6


def test_context_parallelism_lies_around_tensor_parallelism_and_is_no_axis_of_one_rank():
    grid = RankGrid.over(8, pp=1, cp=2, tp=2)
    assert grid == RankGrid(dp=2, tp=2, cp=2) and grid.axes == ("dp", "pp", "cp", "tp")
    assert grid.ranks.tolist() == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]
    assert grid.lines("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]] and grid.lines("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.lines("dp", "cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert grid.coordinates(6) == Coordinates(dp=1, pp=0, tp=0, cp=1)
    assert CUBE.axes == ("dp", "pp", "tp") and CUBE.coordinates(5).cp == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: RankGrid(tp=0), "tp size is 0: each of dp, pp, cp and tp is at least 1"),
        (lambda: RankGrid.over(8, pp=0, tp=1), "pp size is 0"),
        (lambda: RankGrid.over(8, pp=3, tp=1), "3 pipeline stages x 1 tensor-parallel ranks do not divide 8 ranks"),
        (lambda: RankGrid.over(2, pp=1, tp=4), "do not divide 2 ranks"),
        (lambda: RankGrid.over(8, pp=1, cp=3, tp=1), "x 3 context-parallel ranks x 1 tensor-parallel ranks do not"),
        (lambda: CUBE.coordinates(8), "rank 8 is not in a grid of 8"),
        (lambda: CUBE.coordinates(-1), "rank -1 is not in a grid of 8"),
        (lambda: CUBE.lines("cp"), "no axis 'cp': choose from dp, pp, tp"),
    ],
)
def test_what_is_no_grid_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        wrong()
