"""Loss curves at several world sizes: what is drawn is what is said beside it."""

import pytest

from course_lib.lessons.accelerate import figures as curves

FIRST = [1.10, 0.90, 0.80, 0.70]


def test_a_series_on_two_levels_is_not_named_at_one_of_them():
    """Each series has points on "equal" and at the rounding: its name, with its dot, is between and to the right."""
    apart = {1: FIRST, 2: [FIRST[0], FIRST[1] + 1.2e-7, *FIRST[2:]], 4: [*FIRST[:3], FIRST[3] + 1.2e-7]}
    figure = curves.world_sizes(apart, [2**-23 * step for step in range(1, 5)], [1.1, 0.6], "batch 64")
    _, gaps = figure.axes
    named = {text.get_text(): text.get_position() for text in gaps.texts}
    for name in ("● 2 ranks", "● 4 ranks"):
        x, y = named[name]
        assert x > 4 and 2 * curves.EQUAL < y < curves.BETWEEN < 1.2e-7
    assert named["● 2 ranks"] != named["● 4 ranks"] and "2 ranks" not in named
    assert curves.worst_difference(apart) == pytest.approx(1.2e-7)
