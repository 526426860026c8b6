"""What a stored page says is true of the numbers that it shows, and a page of which that is not so is not stored."""

from pathlib import Path

import nbformat
import pytest

from course_lib.lessons.notebook import MIME
from tests.notebooks.conftest import NOTEBOOKS
from tests.notebooks.test_all_lessons import LESSONS
from tools import claims, notebooks


@pytest.mark.parametrize("name", LESSONS)
def test_the_stored_page_bears_out_its_words(name):
    assert claims.untrue(NOTEBOOKS / f"{name}.ipynb") == []


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A function (words, claim, gain) -> path of an executed notebook that says the words and recorded the gain."""

    def write(words, claim, gain=0.84):
        entry = {MIME: {"name": "gain", "value": gain}, "text/plain": ""}
        cells = [
            nbformat.v4.new_code_cell("ranks = 2", metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell("ranks = 3", metadata={"tags": ["injected-parameters"]}),
            nbformat.v4.new_markdown_cell(words),
            nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", entry)]),
        ]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "lesson.ipynb")
        (tmp_path / "lesson.yaml").write_text(claim, encoding="utf-8")
        monkeypatch.setattr(claims, "FOLDER", tmp_path)
        return tmp_path / "lesson.ipynb"

    return write


WORDS = "Buckets of a *middling*\nsize win."


def test_words_that_their_number_refutes_are_named_with_it(page):
    claim = "- {says: of a middling size win, holds: gain > 1.1 and ranks == 3}"
    assert claims.untrue(page(WORDS, claim, gain=1.3)) == [], "by the parameters of the run"
    assert claims.untrue(page(WORDS, claim)) == [
        "the page says “of a middling size win”, and `gain > 1.1 and ranks == 3` does not hold: gain = 0.84, ranks = 3"
    ]


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ("- {says: one bucket wins, holds: gain < 1}", "no cell says “one bucket wins”"),
        ("- {says: size win, holds: gains > 1}", "gains, which no cell records"),
    ],
)
def test_a_claim_that_has_lost_its_words_or_its_number_is_named(page, claim, why):
    assert why in claims.untrue(page(WORDS, claim))[0]


def test_what_rests_on_seconds_binds_the_stored_page_alone(page):
    path = page(WORDS, "- {says: size win, holds: gain > 1.1, timed: true}")
    assert claims.untrue(path) and claims.untrue(path, counted_only=True) == []


def test_a_run_that_refutes_its_page_is_not_stored(page, monkeypatch, tmp_path):
    path = page(WORDS, "- {says: size win, holds: gain > 1.1}")
    run = path.read_text(encoding="utf-8")
    stored = tmp_path / "notebooks" / path.name
    stored.parent.mkdir()
    stored.write_text("as it was", encoding="utf-8")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(
        notebooks.papermill, "execute_notebook", lambda source, done, **_: Path(done).write_text(run, encoding="utf-8")
    )
    with pytest.raises(SystemExit, match=r"lesson.ipynb is not stored .*\n.*“size win”.*gain = 0.84"):
        notebooks.refresh(stored)
    assert stored.read_text(encoding="utf-8") == "as it was"
    assert (tmp_path / "build" / path.name).exists(), "the run, to look at"
