"""Figures of schedules: as many blocks as actions, predicted hatched, measured solid, and titles that count."""

from fractions import Fraction

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from course_lib.figures import timelines
from course_lib.figures.style import COLOURS
from course_lib.lessons.pipeline import figures
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Costs, Span, simulate


def rectangles(axes):
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def blocks(axes):
    """The rectangles of a panel without the grey lanes and the black feet."""
    other = (COLOURS["idle"], "#000000")
    return [patch for patch in rectangles(axes) if to_hex(patch.get_facecolor()).upper() not in other]


def test_a_gantt_has_a_block_for_each_action_at_its_time():
    simulated = {name: simulate(make(name, 4, 8)) for name in ("1f1b", "zbv")}
    figure = timelines.gantt(simulated, "two tables", "ms")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["1f1b: 27.3% idle", "zbv: 5.9% idle"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() and figure.axes[1].get_xlabel() == "time (ms)"
    for axes, timeline in zip(figure.axes, simulated.values(), strict=True):
        drawn = sorted((block.get_x(), block.get_width()) for block in blocks(axes))
        spans = [span for row in timeline.rows for span in row]
        assert drawn == sorted((float(span.start), float(span.end - span.start)) for span in spans)
        solid = {COLOURS["forward"], COLOURS["backward-input"], COLOURS["backward"], COLOURS["backward-weight"]}
        assert not {to_hex(block.get_facecolor()).upper() for block in blocks(axes)} & solid, "predicted: tinted"
        unnumbered = [block for block in blocks(axes) if block.get_hatch() == "////"]
        assert len(unnumbered) == len(spans) - len(axes.texts), "and hatched where there is no number"
    feet = [patch for patch in figure.axes[1].patches if to_hex(patch.get_facecolor()) == "#000000"]
    assert len(feet) == 4 * 8 * 3  # one for each F, I and W of the four ranks' second stages
    drawn = {to_hex(block.get_facecolor()) for axes in figure.axes for block in blocks(axes)}
    key = {to_hex(patch.get_facecolor()) for patch in figure.legends[0].get_patches()}
    assert drawn <= key <= drawn | {COLOURS["idle"].lower(), "#000000"}, "the key has the colours of the drawing"


def test_measured_is_solid_and_below_predicted():
    predicted = simulate(make("1f1b", 2, 4), Costs(20, 20, 20))
    measured = [[Span(span.action, 1.1 * span.start, 1.1 * span.end) for span in row] for row in predicted.rows]
    figure = figures.predicted_and_measured(predicted, measured, "both", "ms")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["predicted: 20.0% idle", "measured: 20.0% idle"]
    solid = blocks(figure.axes[1])
    assert len(solid) == 16 and {block.get_hatch() for block in solid} == {None}
    assert {to_hex(block.get_facecolor()).upper() for block in solid} == {COLOURS["forward"], COLOURS["backward"]}


def test_both_panels_number_the_same_blocks_however_long_each_took():
    """A stretched block in the measured panel has no number where its prediction is too narrow for one."""
    predicted = simulate(make("zbv", 4, 8), Costs(18, 18, 18))
    for stretch in (1, 2.5):  # of the axis, which both panels share
        measured = [
            [
                Span(action, stretch * start, stretch * (start + (end - start) * (1 + 0.3 * (turn % 2))))
                for turn, (action, start, end) in enumerate(row)
            ]
            for row in predicted.rows
        ]
        figure = figures.predicted_and_measured(predicted, measured, "both", "ms", "measured, median of 3 tries")
        said = [sorted(text.get_text() for text in axes.texts) for axes in figure.axes]
        assert said[0] == said[1] and len(said[0]) == {1: 4 * 48, 2.5: 0}[stretch]
        assert figure.axes[1].get_title(loc="left").startswith("measured, median of 3 tries: ")


def test_every_try_is_a_dot():
    tried = {"1f1b": [0.3, 0.28, 0.5], "zbv": [0.07, 0.09, 0.08]}
    figure = figures.every_try({"1f1b": 0.27, "zbv": 0.06}, tried, "all")
    dots = [sorted(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert dots == [pytest.approx([28, 30, 50]), pytest.approx([7, 8, 9])]
    middles = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "|"]
    assert middles == pytest.approx([30, 8])
    foreseen = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert foreseen == pytest.approx([27, 6])


def test_pairs_that_overlap_share_the_lane():
    table = make("dualpipev", 2, 4)
    together = timelines.gantt({"": simulate(table, Costs(pair=2))}, "pairs")
    heights = [round(block.get_height(), 3) for block in blocks(together.axes[0])]
    assert heights.count(timelines.LANE / 2) == 2 * len(table.overlapped) > 4
    apart = timelines.gantt({"": simulate(table)}, "one after the other")
    assert {round(block.get_height(), 3) for block in blocks(apart.axes[0])} == {timelines.LANE}


def test_idle_share_is_the_simulators():
    for name in ("gpipe", "zb_h2", "dualpipev"):
        timeline = simulate(make(name, 3, 6), Costs(2, 3, 1, Fraction(1, 2)))
        assert figures.idle_share(timeline.rows) == pytest.approx(float(timeline.bubble))


def test_bubbles_beside_memory():
    simulated = {name: simulate(make(name, 4, 16)) for name in ("gpipe", "1f1b")}
    figure = timelines.bubble_beside_memory(simulated, "memory", limit=5)
    idle, held = figure.axes
    assert [patch.get_width() for patch in rectangles(idle)] == pytest.approx([100 * 3 / 19] * 2)
    assert [patch.get_width() for patch in rectangles(held)] == [16, 4]
    assert [text.get_text() for text in held.texts] == ["16", "4", "limit"]
    assert [text.get_text() for text in idle.get_yticklabels()] == ["gpipe", "1f1b"]
    assert to_hex(held.patches[0].get_edgecolor()) == "#b5b5b5" != to_hex(held.patches[1].get_edgecolor())
