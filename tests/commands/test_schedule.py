"""``course schedule``: what it prints and writes, and one line for each mistake."""

import json
import re

import pytest

from course_lib.cli import main
from course_lib.commands import schedule_report
from course_lib.parallel.pipeline import csv_form
from course_lib.parallel.pipeline.fitted.search import FITTED
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import simulate
from course_lib.parallel.pipeline.validation import check


@pytest.fixture
def course(capsys, monkeypatch):
    """Run a command line; its exit code, and what it printed."""
    monkeypatch.setenv("COLUMNS", "120")

    def run(line):
        code = main(["schedule", *line.split()])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_schedule_is_printed_with_its_figures(course):
    code, out, err = course("--schedule 1f1b --ranks 4 --microbatches 8 --memory-limit 3")
    assert code == 0 and err == ""
    table = [line.split()[2:] for line in out.splitlines() if line.startswith("rank ")][:4]
    assert table == [[str(action) for action in row] for row in make("1f1b", 4, 8).rows]
    assert "27.27% of all ranks' time (3/11)" in out and "a rank waits 9 in a step" in out
    assert "4, 3, 2, 1 by rank" in out and "3: rank 0 holds more" in out
    assert "33 from the first start to the last end" in out


def test_a_lane_shows_when_a_rank_waits(course):
    _, out, _ = course("--schedule gpipe --ranks 2 --microbatches 2")
    lanes = [line[8:] for line in out.splitlines() if re.match(r"rank  \d", line)][-2:]
    timeline = simulate(make("gpipe", 2, 2))
    for lane, row in zip(lanes, timeline.rows, strict=True):
        assert len(lane) == 112
        busy = sum(span.end - span.start for span in row) / timeline.makespan
        assert abs(lane.count("·") / 112 - (1 - busy)) < 0.02


LINE = "--ranks 4 --microbatches 8"


@pytest.mark.parametrize("name", [*KINDS, *FITTED])
def test_every_schedule_is_written_as_csv(course, tmp_path, name):
    code, out, _ = course(f"--schedule {name} --ranks 2 --microbatches 4 --csv {tmp_path}/table.csv")
    assert code == 0 and "free of deadlock" in out
    table = csv_form.read(tmp_path / "table.csv")
    check(table)
    assert table.ranks == 2 and table.microbatches == 4
    if name in KINDS:
        assert table.rows == make(name, 2, 4).rows


def test_a_table_of_ones_own_is_proved_and_simulated(course, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    code, out, _ = course(f"--table {path} --cost-w 0")
    assert code == 0 and "rank 0  0F0 0F1 0B1 0B0" in out and "2 ranks, 2 stages, 2 micro-batches" in out
    path.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B1\n")
    code, out, err = course(f"--table {path}")
    assert (code, out, err) == (2, "", "course: rank 1 of mine.csv has 1B1 twice: take one away\n")


def test_costs_are_exact_and_for_all_the_stages_of_a_rank(course):
    _, out, _ = course(
        "--schedule interleaved --ranks 4 --microbatches 8 --virtual 2 --cost-f 0.1 --cost-b 1/10 --cost-w .1 --bytes 3"
    )
    assert "2.85 from the first start" in out and "(3/19)" in out and "16.5, 13.5, 10.5, 7.5 by rank" in out
    _, out, _ = course("--schedule zb_h2 --ranks 4 --microbatches 8 --cost-comm 0.5")
    assert "between a rank's own first and last action" in out and "a rank waits" not in out


def test_compare_ranks_what_fits_and_says_why_the_rest_does_not(course):
    code, out, _ = course("--compare --ranks 4 --microbatches 8 16 --memory-limit 4")
    assert code == 0 and "Best of those that fit: interleaved_zero_bubble with 16 micro-batches (limit 4)" in out
    rows = [line.split() for line in out.splitlines() if re.search(r"fits$|> 4$", line.strip())]
    assert len(rows) == 26 and rows[0][:2] == ["1", "interleaved_zero_bubble"]
    assert sum(row[-1] == "fits" for row in rows) == 16
    assert any(row[0] == "gpipe" and " ".join(row[-6:]) == "rank 0 holds 16 > 4" for row in rows)
    _, out, _ = course("--compare --ranks 4 --microbatches 7")
    assert "it takes at least as many as stages, 8" in " ".join(out.split())
    assert "No schedule fits" in course("--compare --ranks 4 --microbatches 8 --memory-limit 1/2")[1]


@pytest.mark.parametrize(
    ("name", "ranks", "last", "numbered"),
    [("zbv", 4, 8, True), ("dualpipev", 8, 32, True), ("interleaved --virtual 4", 16, 64, False)],
)
def test_it_is_legible_at_80_columns(course, monkeypatch, name, ranks, last, numbered):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = course(f"--schedule {name} --ranks {ranks} --microbatches {last}")
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    lanes = [text[8:] for text in lines if re.match(r"rank [ \d]\d ", text)]
    assert lanes and len(lanes) % ranks == 0
    written = {int(number) for lane in lanes for number in re.findall(r"\d+", lane.replace("F", " "))}
    assert (set(range(last)) <= written) == numbered
    assert not any(re.search(r" {9}", lane) for lane in lanes), "a block without a number says its kind"
    compared = course("--compare --ranks 4 --microbatches 8 16 --memory-limit 4")[1].splitlines()
    assert max(map(len, compared)) <= 80


def test_json_has_every_action_with_its_times(course):
    code, out, _ = course("--schedule 1f1b --ranks 4 --microbatches 8 --json")
    read = json.loads(out)
    assert code == 0 and (read["makespan"], read["peak_activations"]) == (33, [4, 3, 2, 1])
    assert read["bubble"] == pytest.approx(3 / 11)
    assert [[action["action"] for action in row] for row in read["rows"]] == [
        [str(action) for action in row] for row in make("1f1b", 4, 8).rows
    ]
    assert read["rows"][3][0] == {"action": "3F0", "start": 3, "end": 4}
    code, out, _ = course("--compare --ranks 4 --microbatches 8 --memory-limit 4 --json")
    rows = json.loads(out)
    assert rows[0]["problem"] is None and rows[0]["bubble"] < rows[1]["bubble"] + 1 and rows[-1]["problem"]


def test_large_tables_are_counted_rather_than_printed(course, monkeypatch):
    monkeypatch.setattr(schedule_report, "PRINTED", 10)
    _, out, _ = course("--schedule 1f1b --ranks 4 --microbatches 8")
    assert "The table has 64 actions; write it with --csv FILE." in out and "0F0 0F1" not in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "given: none of --schedule, --table and --compare: give one of --schedule NAME, --table FILE and"),
        (f"--schedule 1f1b --compare {LINE}", "given: --schedule and --compare"),
        ("--schedule 1f1b", "--ranks is missing: say how many, as in --ranks 4"),
        ("--schedule 1f1b --ranks 4", "--microbatches is missing"),
        (f"--schedule gpip {LINE}", "unknown schedule `gpip`: did you mean `gpipe`?"),
        ("--schedule 1f1b --ranks 0 --microbatches 8", "0 ranks: take at least 1"),
        (f"--schedule 1f1b {LINE} 16", "2 values of --microbatches: give one, or --compare them"),
        (f"--schedule 1f1b {LINE} --virtual 2", "1f1b with 2 stages per rank: it takes exactly 1"),
        (f"--schedule interleaved {LINE} --virtual 0", "0 stages per rank: take at least 1"),
        ("--schedule interleaved --ranks 4 --microbatches 9", "on 4 ranks: they must divide into 2 equal"),
        (f"--schedule 1f1b {LINE} --cost-f x", "argument --cost_f: invalid number value: 'x'"),
        (f"--schedule 1f1b {LINE} --cost-f 1/0", "invalid number value: '1/0'"),
        (f"--schedule 1f1b {LINE} --cost-f=-1", "invalid number value: '-1'"),
        (f"--schedule 1f1b {LINE} --cost-f 1e999999999", "invalid number value: '1e999999999'"),
        (f"--schedule 1f1b {LINE} --cost-f 0 --cost-b 0 --cost-w 0", "all costs are 0"),
        (f"--schedule 1f1b {LINE} --bytes 2 --bytes-w 3", "`kept` is 3: it is a part of `activation`"),
        (f"--schedule zb_auto {LINE} --memory-limit 1/2", "rank 0 cannot hold another activation"),
        ("--schedule 1f1b --ranks 40000 --microbatches 40000", "a table of up to 9600000000 actions: take fewer"),
        (f"--schedule 1f1b {LINE} --csv /no/such/x.csv", "cannot write /no/such/x.csv"),
        (f"--compare {LINE} --csv x.csv", "--csv with --compare: write one table, with --schedule NAME"),
        ("--table /no/such.csv", "cannot read the table /no/such.csv"),
        ("--schedule 1f1b --rank 4 --microbatches 8", "unknown option `--rank`: did you mean `--ranks`?"),
    ],
)
def test_a_mistake_is_one_line(course, line, message):
    code, _, err = course(line)
    assert code == 2 and err.startswith("course: ") and err.count("\n") == 1 and message in err
