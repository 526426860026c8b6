"""A figure says its finding to readers who cannot see it."""

from types import SimpleNamespace

from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats

from course_lib.figures import explorer
from course_lib.figures.style import alternative, canvas


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


def test_a_drawing_with_sliders_has_its_title_too():
    data, metadata = explorer.explorer(name="zb_h1")._repr_mimebundle_()
    assert "image/png" in data and metadata["image/png"]["alt"] == "zb_h1 on 4 ranks, 8 micro-batches: 11.1% idle"
