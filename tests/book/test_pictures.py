"""Twelve pages as they look, beside the pictures of them that are kept; ``BOOK_PICTURES=renew`` keeps new ones.

The pictures are half as wide as the pages. The typefaces come with the book, so that they are the same everywhere; what
a tolerance is for is how another Chromium smooths their edges.
"""

import base64
import io
import os

import numpy as np
import pytest
from PIL import Image

from book.build import ROOT
from tests.browsing import NARROW, WIDE, needs_a_browser, open_, resize

pytestmark = [pytest.mark.long, needs_a_browser]
PICTURES = ROOT / "tests" / "book" / "pictures"
PAGES = {
    "front": ("index.html", "", WIDE, "light"),
    "front-dark": ("index.html", "", WIDE, "dark"),
    "front-narrow": ("index.html", "", NARROW, "light"),
    "lesson": ("notebooks/05_zero_stages.html", "", WIDE, "light"),
    "code": ("notebooks/05_zero_stages.html", "#stage-1-by-hand", WIDE, "light"),
    "code-narrow": ("notebooks/05_zero_stages.html", "#stage-1-by-hand", NARROW, "dark"),
    "figure": ("notebooks/05_zero_stages.html", "#the-bill-stage-by-stage", WIDE, "dark"),
    "formulas": ("notebooks/09_plan_and_simulate.html", "#memory", WIDE, "light"),
    "exercise": ("exercises/02_data_parallel.html", "", WIDE, "light"),
    "command": ("command-line/train.html", "", WIDE, "dark"),
    "table": ("benchmarks/planner.html", "", WIDE, "light"),
    "textbook": ("textbook/course_lib.parallel.zero.html", "", NARROW, "light"),
}
TILE = 20
"""Pixels of a kept picture that are looked at together."""
APART = 40
"""Of 255, by which a tile's mean differs where something else stands there."""
SHARE = 0.02
"""Of the tiles, that may differ: a line that breaks elsewhere moves what is below it."""


def look(browser, address, page, anchor, size, theme):
    resize(browser, size)
    browser.get("about:blank")  # so that an anchor of the same page is gone to as well
    open_(browser, address + page)
    browser.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
    browser.execute_async_script("document.fonts.ready.then(arguments[0])")
    browser.execute_script("document.querySelector(arguments[0])?.scrollIntoView()", anchor or "body")
    taken = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    picture = Image.open(io.BytesIO(taken)).convert("RGB")
    return picture.resize((size[0] // 2, size[1] // 2), Image.Resampling.BOX)


def differing(some, others):
    """Share of the tiles whose means differ."""

    def means(picture):
        cells = np.asarray(picture.convert("RGB"), float)
        rows, columns = (length // TILE for length in cells.shape[:2])
        return cells[: rows * TILE, : columns * TILE].reshape(rows, TILE, columns, TILE, 3).mean((1, 3))

    return float((np.abs(means(some) - means(others)).max(-1) > APART).mean())


@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_it_did(address, browser, name):
    now = look(browser, address, *PAGES[name])
    kept = PICTURES / f"{name}.png"
    if os.environ.get("BOOK_PICTURES") == "renew":
        PICTURES.mkdir(exist_ok=True)
        now.quantize(32, dither=Image.Dither.NONE).save(kept, optimize=True)
    share = differing(now, Image.open(kept))
    if share > SHARE:
        now.save(kept.with_suffix(".now.png"))
    assert share <= SHARE, f"{share:.0%} of {name} looks otherwise: look at {kept.stem}.now.png beside it"


def test_a_page_of_another_look_is_told_apart():
    light, dark = (Image.open(PICTURES / f"{name}.png") for name in ("front", "front-dark"))
    assert differing(light, dark) > 0.9 and differing(light, light) == 0
    moved = Image.new("RGB", light.size, "white")
    moved.paste(light.convert("RGB"), (0, 30))
    assert differing(light, moved) > SHARE
