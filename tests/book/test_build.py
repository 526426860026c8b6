"""Building the book: what an interrupted build left is not built upon."""

import pytest

from book import build


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_build_begins_anew_after_one_that_did_not_end(tmp_path, monkeypatch, interrupted):
    found = []

    def sphinx(options):
        found.append((tmp_path / "site" / "old.html").is_file())
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "old.html").touch()
        (tmp_path / "doctrees").mkdir(exist_ok=True)
        return code

    monkeypatch.setattr(build, "DOCTREES", tmp_path / "doctrees")
    monkeypatch.setattr(build, "OUT", tmp_path / "site")
    monkeypatch.setattr(build, "assemble", lambda source: None)
    monkeypatch.setattr(build, "sphinx", sphinx)
    code = 2 if interrupted else 0
    assert build.build() == code and build.build() == code
    assert found == [False, not interrupted]
