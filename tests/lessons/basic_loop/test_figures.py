"""The picture of a step's memory: the peaks that its title names can be seen."""

from dataclasses import replace

import pytest

from course_lib.lessons.basic_loop import figures as steps
from course_lib.lessons.basic_loop.lab import Moment

MB = 10**6


def moment(seconds, phase, optimizer, gradients, activations):
    return Moment(
        seconds,
        phase,
        {
            "parameters": 90 * MB,
            "optimizer states": optimizer * MB,
            "gradients": gradients * MB,
            "activations": activations * MB,
        },
    )


TWO_STEPS = [
    moment(0.0, "forward", 0, 0, 0),
    moment(0.3, "forward", 0, 0, 230),
    moment(0.3, "backward", 0, 0, 230),
    moment(0.9, "backward", 0, 90, 0),
    moment(0.9, "optimizer", 0, 90, 0),
    moment(1.1, "optimizer", 180, 90, 0),
    moment(1.1, "optimizer", 180, 0, 0),
    moment(1.1, "forward", 180, 0, 0),
    moment(1.4, "forward", 180, 0, 230),
    moment(1.4, "backward", 180, 0, 230),
    moment(2.0, "backward", 180, 90, 0),
    moment(2.0, "optimizer", 180, 90, 0),
    moment(2.1, "optimizer", 180, 90, 0),
    moment(2.1, "optimizer", 180, 0, 0),
]


def test_a_peak_in_the_update_has_a_width_a_dot_and_its_number():
    figure = steps.memory_over_steps(TWO_STEPS)
    (axes,) = figure.axes
    assert figure.get_suptitle() == "Held at most: 360 MB in step 1, 500 MB in step 2"
    dots = {(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"}
    assert dots == {(0.9, 360), (1.4, 500)}, "from the moment at which the update begins"
    words = [text.get_text() for text in axes.texts]
    assert {"360 MB", "500 MB"} <= set(words) and words.count("update") == words.count("forward") == 2
    heights = [y for area in axes.collections for path in area.get_paths() for x, y in path.vertices if x == 1.1]
    assert 360 in heights, "what the update made is drawn up to its end"


def test_a_name_within_an_area_is_in_the_middle_of_it():
    long_update = [replace(m, seconds=m.seconds + 0.7) if m.seconds >= 1.1 else m for m in TWO_STEPS]
    (axes,) = steps.memory_over_steps(long_update).figure.axes
    (name,) = [text for text in axes.texts if text.get_text() == "gradients"]
    assert name.get_position() == (pytest.approx((0.9 + 1.8) / 2), 90 + 180 + 45) and name.get_ha() == "center"


def test_what_was_measured_is_left_as_it_was():
    before = [dict(moment.held) for moment in TWO_STEPS]
    steps.memory_over_steps(TWO_STEPS)
    assert [moment.held for moment in TWO_STEPS] == before


def test_a_slow_machines_milliseconds_are_read_at_once():
    figure = steps.time_by_phase({"forward": 1420.0, "backward": 61.84}, {"forward": 568.0})
    words = {text.get_text().strip() for axes in figure.axes for text in axes.texts}
    assert words == {"1,420 ms", "61.8 ms", "predicted 568 ms"}
