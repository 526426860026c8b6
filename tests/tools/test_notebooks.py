"""What is stored of a lesson's run: figures in few colours, tables without a style of their own."""

import io

import nbformat
import numpy as np
from PIL import Image

from course_lib.figures.style import SERIES, canvas
from tools.notebooks import clean, smaller


def colours(png: bytes) -> set[tuple[int, ...]]:
    pixels, counts = np.unique(
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).reshape(-1, 3), axis=0, return_counts=True
    )
    return set(map(tuple, pixels[counts > 500].tolist()))


def test_a_smaller_figure_keeps_the_colours_of_its_areas():
    drawn = io.BytesIO()
    with canvas("Bars and their names") as (figure, axes):
        for place, colour in enumerate(SERIES):
            axes.bar(place, place + 1, color=colour)
            axes.text(place, 0.5, "a name", color="white", rotation=30)
            axes.plot([0, 5], [place, 6 - place], color=colour, alpha=0.4)
    figure.savefig(drawn, format="png")
    small = smaller(drawn.getvalue())
    assert len(small) < 0.6 * len(drawn.getvalue())
    areas = {tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5)) for colour in SERIES}
    assert areas <= colours(drawn.getvalue()) and areas <= colours(small)


def test_a_stored_table_has_no_style_and_a_cell_no_empty_tags(tmp_path):
    html = "<div>\n<style scoped>\n  th {top}\n</style>\n<table></table></div>"
    output = nbformat.v4.new_output("execute_result", {"text/html": html, "text/plain": "x"}, execution_count=1)
    cells = [
        nbformat.v4.new_markdown_cell("words", metadata={"tags": []}),
        nbformat.v4.new_code_cell("1", outputs=[output], metadata={"tags": ["parameters"]}),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "run.ipynb")
    words, code = nbformat.reads(clean(tmp_path / "run.ipynb"), 4).cells
    assert words.metadata == {} and code.metadata == {"tags": ["parameters"]}
    assert code.outputs[0].data["text/html"] == "<div>\n<table></table></div>"
