"""What is stored of a lesson's run: figures in few colours, tables without a style; and cells made from files."""

import ast
import io
from pathlib import Path

import nbformat
import numpy as np
from PIL import Image

from course_lib.figures.style import SERIES, canvas
from tools import cells
from tools.notebooks import clean, smaller

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_shortest_forms_are_the_cells_of_lessons():
    """A cell is what the file of course_lib/parallel/minimal has, and no definition there is shown nowhere."""
    shown = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            if names := cell.metadata.get(cells.KEY):
                assert cell.source == cells.source_of(names), f"{path.name}: python tools/notebooks.py --listings"
                shown += names
    minimal = ROOT / "course_lib" / "parallel" / "minimal"
    defined = [
        f"{path.stem}.{node.name}"
        for path in minimal.glob("[!_]*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]
    assert sorted(shown) == sorted(defined)


def test_a_cell_has_neither_types_nor_docstrings_but_every_comment():
    source = '''
class Pair(dict):
    """Two.

    More.
    """

    @staticmethod
    def both(left: "list[int]", /, *more: Any, right: int | None = None) -> tuple[int, None]:  # why
        """Says."""
        total: int = 0  # a start
        return total, None  # ä
'''
    assert cells.lean(source.lstrip()) == (
        "class Pair(dict):\n"
        "    @staticmethod\n"
        "    def both(left, /, *more, right=None):  # why\n"
        "        total = 0  # a start\n"
        "        return total, None  # ä"
    )
