"""Figures of expert parallelism: waiting is what is missing to the busiest rank."""

from course_lib.lessons.experts import figures as experts


def test_grey_is_what_each_rank_lacks_to_the_busiest_one():
    figure = experts.worked({"first step": [30, 10], "last step": [22, 18]})
    bars = [(bar.get_x(), bar.get_width()) for axes in figure.axes for bar in axes.patches]
    assert bars == [(0, 30), (30, 0), (0, 10), (10, 20), (0, 22), (22, 0), (0, 18), (18, 4)]
    assert figure.get_suptitle() == "In the first step the ranks wait for 33% of the layer, counted in copies"
