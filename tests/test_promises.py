"""Each promise has a test that `make test` runs: the table of tests/README.md names files that are there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in (TESTS / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]


def named(row):
    return re.findall(r"`([\w/.]+(?:\.py|/))`", row[1])


def test_the_table_has_rows_and_every_room():
    assert len(ROWS) > 30
    rooms = {name.split("/")[0] for row in ROWS for name in named(row) if "/" in name}
    here = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")}
    assert here - rooms - {"figures", "launching", "system"} == set(), "a room that no promise names"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_guards_it_is_there_and_runs(row):
    files = [
        file
        for name in named(row)
        for path in [TESTS / name]
        for file in (path.rglob("test_*.py") if path.is_dir() else [path])
    ]
    assert files and all(file.exists() for file in files)
    for name in named(row):
        texts = [file.read_text(encoding="utf-8") for file in files if str(TESTS / name).rstrip("/") in str(file)]
        assert any(
            re.search(r"^def test_", text, re.M) and not re.search(r"^pytestmark = .*\blong\b", text, re.M)
            for text in texts
        ), f"{name} has no test outside of `make long`"
