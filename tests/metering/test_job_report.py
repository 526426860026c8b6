"""All ranks on one clock: who waited for whom, and what becomes of logs that are not whole."""

import itertools
import json

import pytest

from course_lib.metering import job_report, traces


def write(folder, rank, lines, *, machine="a", world=2, attempt=0, pid=1, began=0.0, ended=True, extra=""):
    header = {"rank": rank, "world": world, "machine": machine, "host": machine, "attempt": attempt, "began": began}
    ends = [["end", 9.0, None]] if ended else []
    text = "".join(json.dumps(line) + "\n" for line in [["begin", header], *lines, *ends])
    (folder / f"rank{rank}-{pid}.jsonl").write_text(text + extra)


def calls(*spans, group=(0, "0", "world", (0, 1)), name="all_reduce"):
    return [["group", *group], *(["call", name, group[0], 8, "float32", start, end, 8] for start, end in spans)]


def test_who_comes_early_waits_for_who_comes_last(tmp_path):
    write(tmp_path, 0, calls((1.0, 3.1), (4.0, 4.1)))
    write(tmp_path, 1, calls((3.0, 3.1), (3.5, 4.1)))
    waits = job_report.waits(job_report.read(tmp_path))
    assert [(wait.rank, wait.last, wait.seconds) for wait in waits] == [(0, 1, 2.0), (1, 0, 0.5)]


def test_a_receive_waits_for_its_send_and_a_send_for_nobody(tmp_path):
    write(tmp_path, 0, calls((1.0, 1.1), group=(0, "0", "pp", (0, 1)), name="send"))
    write(tmp_path, 1, calls((0.25, 1.1), group=(0, "0", "pp", (1, 0)), name="recv"))
    (wait,) = job_report.waits(job_report.read(tmp_path))
    assert (wait.rank, wait.last, wait.seconds) == (1, 0, 0.75)
    write(tmp_path, 0, calls((0.1, 1.1), group=(0, "0", "pp", (0, 1)), name="send"))
    assert job_report.waits(job_report.read(tmp_path)) == []


def test_another_machine_is_brought_to_the_clock_of_rank_0(tmp_path):
    mine = [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)]
    theirs = [(begin + 100 - 0.5, end + 100) for begin, end in mine]
    theirs[1] = (theirs[1][0], theirs[1][1] + 0.3)  # one straggler
    for machine, early in (("a", 0), ("b", 3)):  # without the mechanism rank 1 would come a hundred seconds late
        write(tmp_path, 0, calls(*mine))
        write(tmp_path, 1, calls(*theirs), machine=machine)
        waits = job_report.waits(job_report.read(tmp_path))
        assert sum(wait.rank == 1 for wait in waits) == early
    assert [wait.seconds for wait in waits] == pytest.approx([0.5] * 3)


def test_a_killed_rank_leaves_what_it_had_and_only_the_last_attempt_counts(tmp_path):
    write(tmp_path, 0, calls((1.0, 2.0)), attempt=0, pid=1)
    write(tmp_path, 0, calls((1.0, 2.0), (3.0, None)), attempt=1, pid=2, ended=False, extra='["call","all_re')
    write(tmp_path, 1, calls((1.0, 2.0)), attempt=1, pid=3)
    first, second = job_report.read(tmp_path)
    assert len(first.calls) == 2 and not first.calls[1].ended and not first.ended and second.ended
    assert job_report.under_way(first.calls) == 1.0


def test_groups_without_a_name_are_called_by_their_form(tmp_path):
    regular, irregular = ((number, str(number), "", ranks) for number, ranks in enumerate([(0, 2), (0, 1, 4)]))
    write(tmp_path, 0, calls((1.0, 2.0), group=regular) + calls((1.0, 2.0), group=irregular), world=5)
    axes = {row["axis"]: row["groups"] for row in job_report.table(job_report.read(tmp_path))}
    assert axes == {"2 ranks, each 2th": [(0, 2)], "ranks 0, 1, 4": [(0, 1, 4)]}


def test_the_events_of_a_thread_of_the_trace_do_not_overlap(tmp_path):
    of_rank_0 = calls((1.0, 4.0), (2.0, 3.0), (4.0, 5.0), (4.5, None))
    write(tmp_path, 0, [*of_rank_0, ["wait", 1.5, 2.0], ["step", 1, 5.0, {"parameters": 8}]])
    write(tmp_path, 1, calls((1.0, 4.0), (2.0, 3.0)))
    events = json.loads(json.dumps(traces.of_job(job_report.read(tmp_path))))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 7 and {event["pid"] for event in spans} == {0, 1}
    by_thread = {}
    for event in spans:
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(by_thread) == 5
    for thread in by_thread.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(thread)))
    assert min(event["ts"] for event in spans) == 0.0 and "step 1" in {event["name"] for event in events}
