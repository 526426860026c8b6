"""Recordings of real ranks: every line and call once, a rank that hangs leaves its lane, nothing stays behind."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from course_lib.launching.launch import RankError
from course_lib.metering import collective_hooks, recording
from course_lib.metering.meter import Meter
from course_lib.metering.recorder import HeldBytes, RankRecorder, short

VALUES = (1.0, 2.0, 3.0)


def summed(values):
    total = torch.zeros(2)
    for value in values:
        total += value
        dist.all_reduce(total)
    return total


def passed_on():
    message = torch.full((4,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        dist.send(message, 1)
    else:
        dist.recv(message, 0)
    kept = message.sum()
    del message
    return kept


def leaves_early():
    for _ in range(2 - dist.get_rank()):
        dist.all_reduce(torch.zeros(1))


def does_not_fit():
    if dist.get_rank():
        raise ValueError("a batch that does not fit")
    dist.all_reduce(torch.zeros(1))


def lines(entry, rank):
    """How often a rank came to each line of the code, by the line's text."""
    texts = [
        entry["code"][place]["lines"][number - entry["code"][place]["first"]].strip()
        for _, place, number in entry["ranks"][rank]["lines"]
        if place >= 0
    ]
    return {text: texts.count(text) for text in texts}


def test_lines_calls_and_values_of_each_rank_are_those_that_there_were(tmp_path):
    def prepare():
        def play():
            with Meter() as meter:
                summed(VALUES)
            seen = [[call.name, call.bytes, list(call.ranks), call.sent] for call in meter.collectives]
            (tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps(seen))

        return play

    entry = recording.record(prepare, [summed], variables=["value", "total", "total.shape"], num_processes=2)
    for rank, lane in enumerate(entry["ranks"]):
        assert lines(entry, rank) == {
            "total = torch.zeros(2)": 1,
            "for value in values:": 4,
            "total += value": 3,
            "dist.all_reduce(total)": 3,
            "return total": 1,
        }
        metered = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [[call[2], call[3], call[5], call[6]] for call in lane["calls"]] == metered
        assert [call[2:4] for call in lane["calls"]] == [["all_reduce", 8]] * 3
        value, total, shape = ([text for _, at, text in lane["values"] if at == place] for place in range(3))
        assert (value, shape) == (["1", "2", "3"], ["[2]"])
        assert [text.split()[-1] for text in total] == ["0", "1", "2", "4", "8", "11", "22"]
        assert lane["end"]["how"] == "returned" and all(wait[1] is not None for wait in lane["waits"])
    assert entry["links"] == [{"of": [[0, place], [1, place]], "fits": True} for place in range(3)]


def test_all_times_are_on_one_clock_and_in_order():
    entry = recording.record(lambda: lambda: summed(VALUES), [summed], num_processes=3)
    for lane in entry["ranks"]:
        for kind in ("lines", "values", "held", "calls", "waits"):
            assert [event[0] for event in lane[kind]] == sorted(event[0] for event in lane[kind])
        assert all(0 <= call[0] <= call[1] <= entry["until"] for call in lane["calls"])
    for link in entry["links"]:  # nobody leaves a sum before all have come to it
        calls = [entry["ranks"][rank]["calls"][place] for rank, place in link["of"]]
        assert len(calls) == 3 and max(call[0] for call in calls) <= min(call[1] for call in calls)


def test_a_message_has_its_two_ends_and_memory_goes_up_and_down():
    entry = recording.record(lambda: passed_on, [passed_on], num_processes=2)
    assert entry["links"] == [{"of": [[0, 0], [1, 0]], "fits": True}]
    calls = [lane["calls"][0][2:6] for lane in entry["ranks"]]
    assert calls == [["send", 16, "float32", [0, 1]], ["recv", 16, "float32", [1, 0]]]
    for lane in entry["ranks"]:
        first, held = lane["held"][0][1], [size for _, size in lane["held"]]
        assert max(held) - first == 20 and held[-1] - first in (0, 4)


def test_a_rank_that_hangs_is_a_lane_that_stops():
    entry = recording.record(lambda: leaves_early, [leaves_early], num_processes=2, timeout=3)
    hung, left = entry["ranks"]
    assert left["end"]["how"] == "returned" and len(left["calls"]) == 1
    said = {"how": "never returned", "at": entry["until"], "said": "", "waits_for": [1], "in": "all_reduce"}
    assert hung["end"] == said
    assert [call[1] is None for call in hung["calls"]] == [False, True] and hung["waits"][-1][1] is None
    line = hung["lines"][-1][2] - entry["code"][0]["first"]
    assert "dist.all_reduce" in entry["code"][0]["lines"][line]
    assert entry["links"] == [{"of": [[0, 0], [1, 0]], "fits": True}]


def test_a_rank_that_raises_says_so_and_the_others_wait_for_it():
    entry = recording.record(lambda: does_not_fit, [does_not_fit], num_processes=2)
    waits, raised = entry["ranks"]
    assert raised["end"]["how"] == "raised" and raised["end"]["said"] == "ValueError: a batch that does not fit"
    assert waits["end"]["how"] == "never returned" and waits["end"]["waits_for"] == [1]


def test_what_fails_before_anything_is_recorded_is_an_error():
    def prepare():
        raise ValueError("no such model")

    with pytest.raises(RankError, match="no such model"):
        recording.record(prepare, [summed], num_processes=2)


def test_afterwards_nothing_is_traced_and_nothing_listened_to(tmp_path):
    before = sys.gettrace(), dist.Work.wait, torch.UntypedStorage.resize_
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with HeldBytes() as held:
            recorder = RankRecorder(tmp_path / "0.jsonl", [summed], [], held)
            with recorder:
                assert sys.gettrace() is not before[0] and dist.Work.wait is not before[1]
                summed(VALUES)
            size = (tmp_path / "0.jsonl").stat().st_size
            summed(VALUES)
        assert size > 500 and (tmp_path / "0.jsonl").stat().st_size == size
    finally:
        dist.destroy_process_group()
    assert (sys.gettrace(), dist.Work.wait, torch.UntypedStorage.resize_) == before
    assert collective_hooks._listeners == ()


def test_a_value_is_short_and_freed_memory_is_never_read():
    weights = torch.arange(6.0).view(2, 3)
    assert short(weights) == "f32 (2, 3): 0 1 2 …" and short(torch.tensor(0.12345)) == "f32 (): 0.123"
    weights.untyped_storage().resize_(0)
    assert short(weights) == "f32 (2, 3): freed"
    values = {"True": True, "None": None, "7": 7, "0.5": 0.5, "[1, 2]": [1, 2], "dict of 1": {"a": 1}}
    assert [short(value) for value in values.values()] == list(values) and short(object()) == "object"


def test_a_recording_too_large_for_a_page_is_not_written(tmp_path):
    entry = {"code": [], "ranks": [{"lines": [[0, 0, 1]] * 60_000}]}
    with pytest.raises(ValueError, match="record less"):
        recording.write(entry, tmp_path / "large.json")
    assert not list(tmp_path.iterdir())
    recording.write({"title": 'of ],"', "ranks": [{"lines": [], "end": {}}], "links": []}, tmp_path / "small.json")
    assert json.loads((tmp_path / "small.json").read_text())["title"] == 'of ],"'
