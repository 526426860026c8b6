"""A log of JSON lines: whole after every line, and cut where a run goes on."""

import json

from course_lib.writing import JsonLines


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
        {"kind": "run"}, {"step": 2, "text": "ä"}, {"step": 4}]
