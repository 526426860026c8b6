"""A figure says its finding to readers who cannot see it."""

from types import SimpleNamespace

from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats
from matplotlib.patches import Patch

from course_lib.figures import timelines
from course_lib.figures.style import COLOURS, PREDICTED, alternative, canvas
from course_lib.lessons.pipeline import explorer
from course_lib.lessons.start import figures as start
from course_lib.lessons.tracking.figures import confusion
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import simulate


def shown(thing):
    """What a notebook keeps of a thing that a cell ends with."""
    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    select_figure_formats(shell, {"png"})  # as a notebook's kernel does
    return shell.display_formatter.format(thing)


def test_the_title_is_the_alternative_text_of_the_picture_in_the_notebook():
    with canvas("Two ranks\nare faster") as (figure, _):
        pass
    data, metadata = shown(figure)
    assert set(data) == {"image/png", "text/plain"} and len(data["image/png"]) > 1000
    assert metadata["image/png"]["alt"] == alternative(figure) == "Two ranks are faster"


def test_a_drawing_with_sliders_has_the_title_and_numbers_of_its_still_picture():
    live = explorer.explorer(name="zb_h1")
    live.controls["ranks"].value = 2
    data, metadata = live._repr_mimebundle_()
    assert "image/png" in data and metadata["image/png"]["alt"] == "zb_h1 on 4 ranks, 8 micro-batches: 11.1% idle"
    (table,) = metadata["image/png"]["numbers"]
    assert {row.split("\t")[0] for row in table["rows"]} == {f"rank {rank}" for rank in range(4)}


def test_a_figures_numbers_stand_beside_it_as_tables():
    with canvas("Bytes", ncols=2) as (figure, (bars, lines)):
        bars.bar([0, 1], [3, 4.00004], color=COLOURS["parameters"], label="parameters")
        bars.bar([0, 1], [3, 4], edgecolor=COLOURS["gradients"], **PREDICTED)
        bars.legend(handles=[Patch(color=COLOURS["gradients"], label="gradients")])
        bars.set_xticks([0, 1], ["plain", "stage 1"])
        bars.set_ylabel("GB")
        lines.plot(range(100), range(100), label="loss")
        lines.plot(range(100), range(1, 101), label="loss of the other")
        lines.axhline(7)
        lines.set(xlabel="step", title="Losses")
    of_bars, of_lines = shown(figure)[1]["image/png"]["numbers"]
    assert of_bars == {
        "caption": "GB",
        "columns": ["bar", "of", "GB"],
        "rows": [
            "plain\tparameters\t3",
            "stage 1\tparameters\t4",
            "plain\tgradients predicted\t3",
            "stage 1\tgradients predicted\t4",
        ],
    }
    assert of_lines["columns"] == ["step", "loss", "loss of the other"] and len(of_lines["rows"]) == 26
    assert of_lines["caption"] == "Losses, one of every 4 rows, and the last"
    assert (of_lines["rows"][1], of_lines["rows"][-1]) == ("4\t4\t5", "99\t99\t100")


def test_bars_that_lie_points_and_cells_are_tables_too():
    with canvas("Who computes", ncols=3) as (figure, (bars, points, cells)):
        bars.barh([0, 1], [2, 3], left=[1, 0])
        bars.broken_barh([(0, 2), (3, 1)], (1.6, 0.8))
        bars.set_yticks([0, 1, 2], ["rank 0", "rank 1", "rank 2"])
        points.scatter([1, 2], [3, 4])
        cells.imshow([[1, 2], [3, 4]])
    of_bars, of_points, of_cells = shown(figure)[1]["image/png"]["numbers"]
    assert of_bars["columns"] == ["bar", "from", "to"]
    assert of_bars["rows"] == ["rank 0\t1\t3", "rank 1\t0\t3", "rank 2\t0\t2", "rank 2\t3\t4"]
    assert of_points["rows"] == ["1\t3", "2\t4"] and of_cells["rows"] == ["0\t1\t2", "1\t3\t4"]


def test_numbered_blocks_have_a_row_for_each_kind_in_each_lane_too():
    figure = timelines.gantt({"": simulate(make("1f1b", 4, 8))}, "One table")
    (table,) = shown(figure)[1]["image/png"]["numbers"]
    assert len(table["rows"]) == 4 * 2
    assert table["rows"][0].startswith("rank 0\tforward\t0: 0–1, 1: 1–2, ")


def test_numbers_on_a_logarithmic_axis_have_no_neighbours_name():
    with canvas("Equal or not") as (figure, axes):
        axes.plot([1, 2, 4], [1e-9, 0.2, 0.7], label="apart")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([1, 2, 4], ["1 rank", "2", "4"])
        axes.set_yticks([1e-9, 1], ["equal", "$10^{0}$"])
    (table,) = shown(figure)[1]["image/png"]["numbers"]
    assert table["rows"] == ["1 rank\tequal", "2\t0.2", "4\t0.7"]


def test_panels_that_share_an_axis_share_its_unit():
    with canvas("Two runs", ncols=2, sharey=True) as (figure, (left, right)):
        left.bar(0, 3, label="computing")
        left.set_ylabel("ms per step")
        right.plot([1], [4], "o", label="limit")
        right.axhline(2, label="floor")
    of_bar, of_point = shown(figure)[1]["image/png"]["numbers"]
    assert of_bar["columns"][-1] == of_point["columns"][-1] == "ms per step"
    assert of_point["rows"] == ["1\tlimit\t4", "everywhere\tfloor\t2"]


def test_figures_of_words_and_of_cells_tell_their_tables():
    checks = {"fork": ("ok", "4 ranks in 0.1 s", ""), "GPU": ("cannot", "no device", "rent one")}
    (table,) = shown(start.capabilities(checks))[1]["image/png"]["numbers"]
    assert table["columns"] == ["check", "state", "found", "what to do"]
    assert table["rows"] == ["fork\tok\t4 ranks in 0.1 s\t", "GPU\tcannot\tno device\trent one"]


def test_a_line_over_some_of_anothers_places_is_a_column_of_its_table():
    with canvas("Losses") as (figure, axes):
        axes.plot([1, 2, 3], [9, 8, 7], label="whole")
        axes.plot([2, 3], [8, 6], label="resumed")
        axes.plot([1, 4], [5, 5], label="elsewhere")
        axes.set(title="a job", xlabel="step (dots: every try)", ylabel="nats\n(logarithmic)")
    both, other = shown(figure)[1]["image/png"]["numbers"]
    assert both == {
        "caption": "a job: nats",
        "columns": ["step", "whole", "resumed"],
        "rows": ["1\t9\t", "2\t8\t8", "3\t7\t6"],
    }
    assert other["columns"] == ["step", "elsewhere"]


def test_cells_say_what_is_written_in_them():
    (table,) = shown(confusion(["no", "yes"], [[3, 1], [2, 2]]))[1]["image/png"]["numbers"]
    assert table == {
        "caption": "actual (rows) by predicted (columns)",
        "columns": ["actual", "no", "yes"],
        "rows": ["no\t3\t1", "yes\t2\t2"],
    }
