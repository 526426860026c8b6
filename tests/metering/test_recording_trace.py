"""A recording as a trace: every arrow has both ends, each within a slice; Perfetto's own reader has the same numbers."""

import json
from pathlib import Path

import pytest

from course_lib import cli
from course_lib.errors import ConfigError
from course_lib.metering.recording_trace import trace

ROOT = Path(__file__).parents[2]
RECORDINGS = sorted((ROOT / "book" / "recordings").glob("*.json"))


def counts(recording):
    """Slices and arrows that a trace of it has to have."""
    ranks = recording["ranks"]
    return (sum(line[1] >= 0 for lane in ranks for line in lane["lines"]) + sum(len(lane["calls"]) for lane in ranks),
            sum(len(link["of"]) - 1 for link in recording["links"]))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_each_end_of_each_arrow_lies_in_a_slice(path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    events = trace(recording)["traceEvents"]
    of = {kind: [event for event in events if event["ph"] == kind] for kind in "XsfC"}
    assert (len(of["X"]), len(of["s"])) == counts(recording)
    assert sorted(event["id"] for event in of["s"]) == sorted(event["id"] for event in of["f"])
    assert len({event["id"] for event in of["s"]}) == len(of["s"])
    calls = [event for event in of["X"] if event["cat"] == "call"]
    leaves = {event["id"]: event for event in of["s"]}
    for end in [*of["s"], *of["f"]]:
        (bound,) = [call for call in calls if (call["pid"], call["tid"]) == (end["pid"], end["tid"])
                    and call["ts"] <= end["ts"] <= call["ts"] + call["dur"]]
        assert bound["args"]["bytes"] >= 0
        assert leaves[end["id"]]["ts"] <= end["ts"] and end["bp"] == "e" if end["ph"] == "f" else True
    for rank, lane in enumerate(recording["ranks"]):
        assert sum(event["pid"] == rank for event in of["C"]) == len(lane["held"])


def test_slices_of_a_thread_do_not_overlap():
    for path in RECORDINGS:
        events = trace(json.loads(path.read_text(encoding="utf-8")))["traceEvents"]
        slices = sorted((event["pid"], event["tid"], event["ts"], event["ts"] + event["dur"])
                        for event in events if event["ph"] == "X")
        assert all(one[:2] != other[:2] or one[3] <= other[2]
                   for one, other in zip(slices, slices[1:], strict=False)), path.name


def test_the_command_writes_the_trace_and_says_what_it_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = next(path for path in RECORDINGS if path.name.startswith("07"))
    assert cli.main(["trace", str(path)]) == 0
    written = json.loads((tmp_path / f"{path.stem}.trace.json").read_text())
    slices, arrows = counts(json.loads(path.read_text(encoding="utf-8")))
    assert f"4 ranks, {slices} slices, {arrows} arrows: {path.stem}.trace.json" in capsys.readouterr().out
    assert written["traceEvents"]


@pytest.mark.parametrize(("content", "said"), [(None, "cannot read"), ("{", "is no JSON"), ("[]", "is no recording"),
                                               ('{"traceEvents": []}', "is no recording")])
def test_another_file_is_refused_in_a_line(tmp_path, content, said):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    args = cli.parse(["trace", str(path)])
    with pytest.raises(ConfigError, match=f"{said}.*book/recordings"):
        args.run(args)
