"""Figures of less communication: titles say the finding, labels don't overlap."""

import pytest

from course_lib.lessons.communication import figures as communication


def test_the_bill_names_the_slowest_link():
    figure = communication.bill(0.02, {"fast": 0.005, "slow": 0.18})
    assert figure.get_suptitle() == "At slow a step waits 90% of its time"
    assert len(figure.axes[0].patches) == 4


def test_labels_are_apart_and_in_the_order_of_their_values():
    values = {"c": 3.0, "a": 1.0, "b": 1.01}
    heights = communication.apart(values, 0.1, (1.0, 3.0))
    assert list(heights) == ["c", "a", "b"] and heights["a"] == 0 and heights["c"] == 1
    assert heights["b"] == pytest.approx(0.1)


def test_a_panel_per_link_and_a_curve_per_way():
    curves = {link: {"one": [(1.0, 3.0), (2.0, 2.5)], "other": [(2.0, 3.0), (9.0, 2.4)]} for link in ("x", "y", "z")}
    figure = communication.loss_over_seconds(curves, "a finding")
    assert figure.get_suptitle() == "a finding" and [len(axes.lines) for axes in figure.axes] == [2, 2, 2]
    assert [text.get_text() for text in figure.axes[2].texts] == ["one", "other"]
