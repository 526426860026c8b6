"""Figures of expert parallelism: waiting is what is missing to the busiest rank, and names keep their distance."""

from course_lib.lessons.experts import figures as experts


def test_grey_is_what_each_rank_lacks_to_the_busiest_one():
    figure = experts.worked({"first step": [30, 10], "last step": [22, 18]})
    bars = [(bar.get_x(), bar.get_width()) for axes in figure.axes for bar in axes.patches]
    assert bars == [(0, 30), (30, 0), (0, 10), (10, 20), (0, 22), (22, 0), (0, 18), (18, 4)]
    assert figure.get_suptitle() == "In the first step the ranks wait for 33% of the layer, counted in copies"


def test_names_of_curves_that_end_at_the_same_height_do_not_lie_on_each_other():
    ends = {"nothing": 3.0, "auxiliary loss": 1.3, "bias": 1.31, "z-loss": 1.3}
    figure = experts.imbalance({name: [2.0, end] for name, end in ends.items()})
    heights = sorted(text.xy[1] for text in figure.axes[0].texts)
    assert len(heights) == 4 and min(b - a for a, b in zip(heights, heights[1:], strict=False)) > 0.2
    assert figure.get_suptitle() == (
        "In the last 10 steps the busiest expert has 2.5 times its share, 1.6 with the auxiliary loss"
    )
