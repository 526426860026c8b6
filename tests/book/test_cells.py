"""What a page folds of a lesson's cells, and what it puts in the page's own colours."""

import io
import re

import nbformat
import numpy as np
import pytest
from PIL import Image
from pygments.lexers import PythonLexer

from book import assemble, cells, dark_figures
from book.hanging_lines import highlighted

PRINTED = [nbformat.v4.new_output("stream", text="a")]


def parts(source, outputs=PRINTED):
    return [
        (part.source, part.metadata.get("tags", []), bool(part.outputs))
        for part in cells.parts(nbformat.v4.new_code_cell(source, outputs=outputs))
    ]


@pytest.mark.parametrize(
    ("source", "folded"),
    [
        ("import os\nimport sys\nfrom a import b\nx = 1", ["hide-input"]),
        ("import os\nx = train()", []),
        ("takeaway(f'{x}')", ["hide-input"]),
        ("worst = max(errors)\nrecord('worst', worst)\npd.DataFrame({'a': worst})", ["hide-input"]),
        ("figures.memory(bill)", ["hide-input"]),
        ("source(Zero1.step)", ["remove-input"]),
        ("losses = on_ranks(train)", []),
        ("def reduce():\n    record('a', 1)", []),
        ("%matplotlib inline\ntakeaway('a')", []),
    ],
)
def test_a_cell_is_folded_where_it_only_shows_what_is_known(source, folded):
    assert parts(source) == [(source, folded, True)]


def test_the_end_of_a_cell_that_only_shows_is_folded_and_the_result_stays_below():
    said = parts("losses = on_ranks(train)\n\nrecord('fell', losses[0] - losses[-1])\ntakeaway(f'{losses}')")
    assert said == [
        ("losses = on_ranks(train)", [], False),
        ("record('fell', losses[0] - losses[-1])\ntakeaway(f'{losses}')", ["hide-input"], True),
    ]
    assert parts("check('zero.stage1', mine)", outputs=[]) == [("check('zero.stage1', mine)", [], False)]


def test_imports_that_stand_before_other_code_are_folded_alone():
    source = "import functools\nimport os\n\nimport torch\n\nranks = launch(train)\nrecord('ranks', ranks)"
    assert [(text, folded) for text, folded, _ in parts(source)] == [
        ("import functools\nimport os\n\nimport torch", ["hide-input"]),
        ("ranks = launch(train)", []),
        ("record('ranks', ranks)", ["hide-input"]),
    ]
    decorated = "import functools\nimport os\nimport sys\n\n@functools.cache\ndef f():\n    return 1\n\nf()"
    assert [text for text, *_ in parts(decorated)][1].startswith("@functools.cache")


def test_no_page_shows_code_that_only_prints_a_takeaway():
    texts, _, _ = assemble.sources()
    for name in (name for name in texts if name.startswith("notebooks/")):
        for cell in nbformat.reads(texts[name], 4).cells:
            if cell.cell_type == "code" and cell.source.startswith("takeaway("):
                assert "hide-input" in cell.metadata["tags"], cell.source
            assert "ui-monospace" not in str(cell.get("outputs")), f"{name}: a listing in colours of its own"


def test_boxes_and_listings_take_the_pages_colours():
    box = "<div style='border-left:6px solid #2e7d4f;padding:.4em'><b>Takeaway.</b> &lt;a&gt;</div>"
    assert cells.in_the_pages_colours(box) == "<div class='box box-takeaway'><b>Takeaway.</b> &lt;a&gt;</div>"
    listing = "<pre style=\"font-family:ui-monospace;x\"><span style='color:red'>if</span> a &lt; b:\n    pass</pre>"
    html = cells.in_the_pages_colours(listing)
    assert "color" not in html and re.sub(r"<[^>]*>", "", html).strip() == "if a &lt; b:\n    pass"


def test_a_line_says_how_far_its_code_is_indented_and_is_copied_as_it_is():
    html = highlighted("def f(a):\n    '''Two\n    lines.'''\n", PythonLexer())
    assert re.findall(r'class="line" style="--in:(\d)"', html) == ["0", "4", "4"]
    assert re.sub(r"<[^>]*>", "", html).strip() == "def f(a):\n    '''Two\n    lines.'''"
    for line in html.split('<span class="line"')[1:]:
        assert line.count("<span") + 1 == line.count("</span>"), "no element goes on over the end of a line"


def test_a_figures_numbers_are_a_table_that_is_folded():
    output = nbformat.v4.new_output(
        "display_data",
        metadata={"image/png": {"numbers": [{"caption": "a < b", "columns": ["x"], "rows": ["1", "2"]}]}},
    )
    html = cells.numbers(output)
    assert html.startswith("<details") and "a &lt; b" in html and html.count("<td>") == 2
    assert cells.numbers(nbformat.v4.new_output("display_data")) == ""


# --- dark figures


def luminance(colours):
    share = np.asarray(colours) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(colours, ground):
    a, b = luminance(colours) + 0.05, luminance(ground) + 0.05
    return np.maximum(a / b, b / a)


def test_paper_becomes_the_page_ink_is_read_and_colours_stay_apart():
    paper, ink = dark_figures.on_dark(np.array([[255, 255, 255], [0, 0, 0]]))
    assert np.array_equal(paper, dark_figures.DARK) and contrast(ink, dark_figures.DARK) > 12
    okabe_ito = np.array([[0, 114, 178], [230, 159, 0], [0, 158, 115], [204, 121, 167], [213, 94, 0], [86, 180, 233]])
    drawn = dark_figures.on_dark(okabe_ito)
    assert (contrast(drawn, dark_figures.DARK) > 3).all()
    assert (drawn.argmax(1) == okabe_ito.argmax(1)).all() and (np.abs(drawn.astype(int) - okabe_ito) < 60).all()


def test_a_png_and_an_svg_are_drawn_anew():
    data = io.BytesIO()
    pixels = np.full((8, 8, 4), 255, np.uint8)
    pixels[0, :, :3], pixels[1, :, 3] = 0, 0
    Image.fromarray(pixels).save(data, "PNG")
    drawn = np.asarray(Image.open(io.BytesIO(dark_figures.png(data.getvalue()))).convert("RGB"))
    assert drawn.shape == (8, 8, 3) and (drawn[1:] == dark_figures.DARK).all() and (drawn[0] > 200).all()
    drawing = "<svg><rect fill='#ffffff'/><path style='stroke:#000;fill:white'/><use href='#abc123x'/></svg>"
    svg = dark_figures.svg(drawing)
    ground = "#" + bytes(dark_figures.DARK.astype(np.uint8)).hex()
    assert svg.count(ground) == 2 and "#000" not in svg and "href='#abc123x'" in svg
