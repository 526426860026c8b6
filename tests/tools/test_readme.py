"""README.md: short, and no figure in it that a table does not have."""

import re
from pathlib import Path

import pytest

from tools import readme

ROOT = Path(__file__).resolve().parents[2]
TEXT = readme.README.read_text(encoding="utf-8")


def test_its_figures_are_those_of_the_tables():
    before, rest = TEXT.split(readme.BEGIN)
    block, after = rest.split(readme.END)
    assert block.strip() == readme.block(), "run `python tools/readme.py`"
    outside = re.sub(r"(?s)```.*?```|^\|.*?$|`[^`]*`|\[[^\]]*\]\([^)]*\)", "", before + after, flags=re.MULTILINE)
    # A version, a count that tests/grading holds, a lesson, a licence and a year.
    assert set(re.findall(r"\d+[.,\d]*\d|\d+ ?%", outside)) <= {"3.11", "92", "00", "2.0", "2014"}, "where is it from?"


def test_a_figure_that_no_table_has_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    table = tmp_path / "benchmarks" / "speeds.md"
    table.write_text("# Speeds\n\n| engine | stage | speed |\n|---|---|---|\n| ours | 1 | 1.25 (1.1–1.3) |\n")
    assert readme.ratio("speeds", "ours | 1", "speed") == "1.25 ×" and readme.cell("speeds", "ours", "stage") == "1"
    with pytest.raises(ValueError, match="has 0 rows"):
        readme.cell("speeds", "ours | 2", "speed")
    with pytest.raises(ValueError, match="no column 'seconds'"):
        readme.cell("speeds", "ours | 1", "seconds")
    table.write_text(table.read_text() + "| ours | 1 | 9.99 |\n")
    with pytest.raises(ValueError, match="has 2 rows"):
        readme.cell("speeds", "ours | 1", "speed")


def test_every_page_it_names_is_there_and_every_page_of_docs_is_named():
    linked = set(re.findall(r"\]\(((?!http)[^)#]+)", TEXT))
    assert not [link for link in linked if not (ROOT / link).exists()]
    for page in ROOT.glob("docs/*.md"):
        links = [page.parent / link for link in re.findall(r"\]\((?!http|#)([^)#\s]+)", page.read_text("utf-8"))]
        assert not [link for link in links if not link.exists()], page
    reachable = {
        link
        for name in linked
        if name.endswith(".md")
        for link in re.findall(r"(?:docs/)?([\w-]+\.md)", (ROOT / name).read_text("utf-8"))
    }
    assert {path.name for path in ROOT.glob("docs/*.md")} <= reachable | {Path(link).name for link in linked}
