"""A log of JSON lines: whole after every line, and cut where a run goes on; the part of a page that a tool makes."""

import json

import pytest

from course_lib.writing import JsonLines, write_part


def test_a_log_is_cut_at_the_step_from_which_a_run_goes_on(tmp_path):
    lines = JsonLines(tmp_path / "log.jsonl")
    lines.cut(3)
    assert not lines.path.exists()
    for entry in ({"kind": "run"}, {"step": 2, "text": "ä"}, {"step": 4}):
        lines.append(entry)
    with lines.path.open("a") as out:
        out.write('{"step": 3, "los')  # where the machine went down
    lines.cut(3)
    lines.append({"step": 4})
    assert [json.loads(line) for line in lines.path.read_text(encoding="utf-8").splitlines()] == [
        {"kind": "run"},
        {"step": 2, "text": "ä"},
        {"step": 4},
    ]


def test_a_part_of_a_page_is_made_anew_and_nothing_around_it(tmp_path):
    page = tmp_path / "page.md"
    text = "before\n<!-- sums -->\nold\n<!-- end -->\nafter\n"
    page.write_text(text)
    write_part(page, "<!-- sums -->", "<!-- end -->", "new")
    assert page.read_text() == text.replace("old", "new")
    for broken in ("", text.replace("<!-- end -->", ""), text * 2, "<!-- end --><!-- sums -->"):
        page.write_text(broken)
        with pytest.raises(ValueError, match=r"page.md needs one <!-- sums -->"):
            write_part(page, "<!-- sums -->", "<!-- end -->", "new")
        assert page.read_text() == broken
