"""The picture of a step's memory: the peaks that its title names can be seen."""

from course_lib.lessons.basic_loop import figures as steps
from course_lib.lessons.basic_loop.lab import Moment

MB = 10**6


HELD = ("parameters", "optimizer states", "gradients", "activations")
TWO_STEPS = [
    Moment(seconds, phase, dict(zip(HELD, [90 * MB, optimizer * MB, gradients * MB, activations * MB], strict=True)))
    for seconds, phase, optimizer, gradients, activations in (
        (0.0, "forward", 0, 0, 0),
        (0.3, "forward", 0, 0, 230),
        (0.3, "backward", 0, 0, 230),
        (0.9, "backward", 0, 90, 0),
        (0.9, "optimizer", 0, 90, 0),
        (1.1, "optimizer", 180, 90, 0),
        (1.1, "optimizer", 180, 0, 0),
        (1.1, "forward", 180, 0, 0),
        (1.4, "forward", 180, 0, 230),
        (1.4, "backward", 180, 0, 230),
        (2.0, "backward", 180, 90, 0),
        (2.0, "optimizer", 180, 90, 0),
        (2.1, "optimizer", 180, 0, 0),
    )
]


def test_a_peak_in_the_update_has_a_width_a_dot_and_its_number():
    figure = steps.memory_over_steps(TWO_STEPS)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Held at most: 360 MB in step 1, 500 MB in step 2"
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert dots == {(0.9, 360), (1.4, 500)}, "from the moment at which the update begins"
    heights = [y for area in axes.collections for path in area.get_paths() for x, y in path.vertices if x == 1.1]
    assert 360 in heights, "what the update made is drawn up to its end"


def test_a_slow_machines_milliseconds_are_read_at_once():
    figure = steps.time_by_phase({"forward": 1420.0, "backward": 61.84}, {"forward": 568.0})
    words = {text.get_text().strip() for axes in figure.axes for text in axes.texts}
    assert words == {"1,420 ms", "61.8 ms", "predicted 568 ms"}
