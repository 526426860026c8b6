"""Who is blamed, from states made by hand and from simulated runs; what a record keeps; whether a process works."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from course_lib.hangs import liveness
from course_lib.hangs.diagnosis import describe, diagnose, is_hang
from course_lib.hangs.flight_recorder import FlightRecorder
from course_lib.hangs.liveness import Activity, process_state, start_ticks
from course_lib.hangs.rank_state import (
    CALLS,
    ENDED,
    FAILED,
    ISSUED,
    LEFT,
    RUNNING,
    WAITED_FOR,
    Call,
    Flags,
    RankState,
    read_record,
    spans,
)
from course_lib.hangs.rank_state_exchange import Identity, RankStateExchange
from tests.hangs.snapshots import USUAL, rank
from tests.waiting import until

SECONDS = 5.0


def call(sequence, name="all_reduce", state=ENDED, **fields):
    place = {"serial": sequence, "sequence": sequence, "step": sequence, "at": float(sequence), "line": 10}
    return Call(**USUAL | place | fields, name=name, state=state, file="train.py")


def blamed(*snapshots):
    return [(v.rank, v.what, v.collective, v.sequence, v.line) for v in diagnose(snapshots)]


def test_a_rank_that_has_not_come_is_elsewhere_stopped_dead_or_has_left():
    waits = rank(0, call(1), call(2, state=WAITED_FOR, line=20))
    for life, what in (
        ("running", "elsewhere"),
        ("stopped", "stopped"),
        ("dead", "dead"),
        ("silent", "dead"),
        ("failed", "dead"),
        ("left", "behind"),
        ("unseen", "behind"),
    ):
        missing = rank(1, call(1), life=life)
        assert blamed(waits, missing) == [(1, what, "all_reduce", 2, 71)], life
        sentence = diagnose([waits, missing])[0].sentence
        assert "rank 0 waits for it in all_reduce #2 of float32 (4,) at train.py:20" in sentence
    error = rank(1, call(1), life="failed", words={"error": "ValueError: bad row at data.py:3"})
    assert "has left the training with ValueError: bad row at data.py:3" in diagnose([waits, error])[0].sentence


def test_where_it_was_is_the_main_threads_place_unless_a_call_is_younger():
    waits, missing = rank(0, call(1), call(2, state=WAITED_FOR)), rank(1, call(1, line=33), life="stopped")
    assert diagnose([waits, missing])[0].line == 71
    assert diagnose([waits, dataclasses.replace(missing, placed_at=0.5)])[0].line == 33


def test_a_dead_rank_is_blamed_for_a_collective_that_ended_with_an_error_and_not_before_a_stopped_one():
    lost, stopped = rank(0, call(1, ranks=(0, 1, 2)), call(2, ranks=(0, 1, 2))), rank(2, life="stopped")
    assert blamed(lost, rank(1, call(1), life="dead"), stopped) == [(1, "dead", "all_reduce", 2, 71)]


def test_the_others_wait_in_what_a_dead_rank_never_came_to_and_not_in_what_it_had_left():
    """Its peer may not have woken up yet from the call before."""
    world = {"ranks": (0, 1, 2)}
    lost, wakes = rank(0, call(1, **world), call(2, **world)), rank(2, call(1, state=WAITED_FOR, **world))
    assert blamed(lost, rank(1, call(1, **world), life="dead"), wakes) == [(1, "dead", "all_reduce", 2, 71)]
    died_within = rank(1, call(1, state=WAITED_FOR, **world), life="dead")
    assert blamed(rank(0, call(1, **world)), died_within, wakes) == [(1, "dead", "all_reduce", 1, 71)]
    sent = rank(1, p2p("send", 1, 0, state=ENDED), life="dead")
    assert blamed(rank(0, p2p("recv", 1, 0), p2p("recv", 1, 0, 2)), sent) == [(1, "dead", "recv", 2, 71)]


def test_the_rank_that_differs_from_the_others_is_mismatched():
    for odd in (call(2, name="broadcast", root=0), call(2, shape=(5,)), call(2, dtype="float64")):
        others = [call(1), call(2, state=WAITED_FOR, line=20)]
        odd = dataclasses.replace(odd, line=66)
        found = diagnose([rank(0, *others), rank(1, call(1), odd), rank(2, *others)])
        assert [(v.rank, v.what, v.collective, v.line) for v in found] == [(1, "mismatched", odd.name, 66)]
        assert "where ranks 0, 2 all_reduce #2 of float32 (4,) at train.py:20" in found[0].sentence


def test_of_two_ranks_the_one_that_left_the_pattern_is_mismatched():
    def history(*lines, waits=True):
        return [
            call(i, line=line, shape=(line,), state=WAITED_FOR if waits and i == len(lines) else ENDED)
            for i, line in enumerate(lines, start=1)
        ]

    assert blamed(rank(0, *history(10, 20, 10, 20)), rank(1, *history(10, 20, 10, 10))) == [
        (1, "mismatched", "all_reduce", 4, 10)
    ]
    assert blamed(rank(0, *history(10, 20, 10, 30)), rank(1, *history(10, 20, 10, 20))) == [
        (0, "mismatched", "all_reduce", 4, 30)
    ]
    assert [v[0] for v in blamed(rank(0, *history(10)), rank(1, *history(20)))] == [0, 1], "nothing tells who is right"


def test_root_and_group_are_told_where_they_are_all_that_differs():
    (one, other) = diagnose(
        [rank(0, call(1, "broadcast", WAITED_FOR, root=0)), rank(1, call(1, "broadcast", WAITED_FOR, root=1))]
    )
    assert "issued broadcast #1 from rank 0 of float32 (4,)" in one.sentence
    assert "where rank 1 broadcast #1 from rank 1 of float32 (4,)" in one.sentence and other.rank == 1
    groups = [dataclasses.replace(call(1, state=WAITED_FOR, stream=name), axis=f"group {name}") for name in "ab"]
    told = diagnose([rank(0, groups[0]), rank(1, groups[1])])
    assert [verdict.sentence for verdict in told] == [
        "rank 0 waits for rank 1 in all_reduce #1 over group a (ranks 0, 1) of float32 (4,) at train.py:10",
        "rank 1 waits for rank 0 in all_reduce #1 over group b (ranks 0, 1) of float32 (4,) at train.py:10",
    ]
    assert describe(call(1, "reduce", root=3)) == "reduce #1 to rank 3 of float32 (4,)"
    many = dataclasses.replace(call(1, ranks=tuple(range(64))), axis="dp")
    assert describe(many) == "all_reduce #1 over dp (64 ranks from 0 to 63) of float32 (4,)"


def test_of_two_ranks_whose_histories_speak_for_each_both_are_named():
    def history(*lines):
        return [
            call(i, line=line, shape=(line,), state=WAITED_FOR if i == len(lines) else ENDED)
            for i, line in enumerate(lines, start=1)
        ]

    # Either may follow 10: here 20 did, there 30.
    found = diagnose([rank(0, *history(10, 20, 10, 20)), rank(1, *history(10, 30, 10, 30))])
    assert [verdict.rank for verdict in found] == [0, 1]


def test_where_nobody_waits_in_a_call_nobody_is_blamed_early():
    """As before the first one, where all import and build; ten times as long is too long there too."""

    def both(stalled):
        return [rank(number, call(1), stalled=stalled) for number in range(2)]

    assert not is_hang(both(2 * SECONDS), 0, SECONDS) and is_hang(both(10 * SECONDS), 0, SECONDS)
    dies = [rank(0, call(1), stalled=SECONDS), rank(1, call(1), life="dead")]
    assert is_hang(dies, 0, SECONDS)


def test_a_rank_that_a_mismatch_killed_is_not_just_dead():
    found = diagnose(
        [
            rank(0, call(1), call(2, state=WAITED_FOR)),
            rank(1, call(1), call(2, shape=(9,)), life="dead"),
            rank(2, call(1), call(2, state=WAITED_FOR)),
        ]
    )
    assert [(v.rank, v.what) for v in found] == [(1, "mismatched")] and "has died of it" in found[0].sentence


def test_uneven_collectives_and_what_has_ended_on_all_are_no_mismatch():
    uneven = [rank(n, call(1, name="all_to_all", shape=(n + 1,)), call(2, state=WAITED_FOR)) for n in range(2)]
    ended = [rank(n, call(1, shape=(n + 1,)), call(2, state=WAITED_FOR)) for n in range(2)]
    assert diagnose(uneven) == diagnose(ended) == ()


def p2p(kind, source, target, sequence=1, state=WAITED_FOR, line=10):
    peer = target if kind == "send" else source
    return call(sequence, name=kind, stream=f"0:{source}>{target}:{kind}", peer=peer, state=state, line=line)


def test_a_receive_waits_for_its_send():
    assert blamed(rank(0, p2p("recv", 1, 0)), rank(1)) == [(1, "elsewhere", "recv", 1, 71)]
    sent = rank(1, p2p("send", 1, 0, state=ENDED), call(1, stream="1", ranks=(1, 2), state=WAITED_FOR))
    assert blamed(rank(0, p2p("recv", 1, 0, 1, ENDED), p2p("recv", 1, 0, 2)), sent, rank(2)) == [
        (2, "elsewhere", "all_reduce", 1, 72)
    ], "through rank 1, which waits itself"


def test_ranks_that_wait_in_a_circle_are_all_named():
    circle = [rank(n, p2p("recv", (n + 1) % 3, n, line=30 + n)) for n in range(3)]
    assert blamed(*circle) == [(n, "behind", "recv", 1, 30 + n) for n in range(3)]
    sentence = diagnose(circle)[0].sentence
    assert "rank 0 waits for rank 1 in recv #1 from rank 1 of float32 (4,) at train.py:30" in sentence
    bystander = rank(3, p2p("recv", 0, 3))
    assert [v[0] for v in blamed(*circle, bystander)] == [0, 1, 2]


def test_a_receive_posted_ahead_holds_nobody_up():
    ahead = rank(1, p2p("recv", 0, 1, state=ISSUED))
    assert blamed(rank(0, p2p("recv", 1, 0)), ahead) == [(1, "elsewhere", "recv", 1, 71)]


def test_in_a_circle_of_groups_the_rank_that_no_wait_holds_up_is_the_one():
    prefetched = rank(1, call(1, stream="1", state=ISSUED))
    assert blamed(rank(0, call(1, stream="2", state=WAITED_FOR)), prefetched) == [(1, "elsewhere", "all_reduce", 1, 71)]


def test_nobody_is_blamed_where_all_have_come():
    assert diagnose([rank(n, call(1, state=WAITED_FOR)) for n in range(2)]) == ()
    assert blamed(rank(0, call(1)), rank(1, call(1))) == [
        (0, "elsewhere", "all_reduce", 1, 70),
        (1, "elsewhere", "all_reduce", 1, 71),
    ]


def test_a_hang_is_one_when_those_to_blame_have_stood_still_too():
    waits = rank(0, call(1), call(2, state=WAITED_FOR))
    assert is_hang([waits, rank(1, call(1), stalled=SECONDS)], 0, SECONDS)
    assert not is_hang([waits, rank(1, call(1), stalled=SECONDS - 1)], 0, SECONDS), "it works, or did just now"
    assert is_hang([waits, rank(1, call(1), stalled=0.0, life="stopped")], 0, SECONDS)
    assert not is_hang([waits, rank(1, call(1), life="late")], 0, SECONDS), "its machine has not posted for a moment"
    assert not is_hang([waits, rank(1, life="unseen")], 0, SECONDS)
    assert is_hang([dataclasses.replace(waits, stalled=10 * SECONDS), rank(1, life="unseen")], 0, SECONDS)


class Simulation:
    """Ranks that compute, reduce, pass on and evaluate for as long as they like; one may stop for ever."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 3, 4, 8])
        self.now, self.calls = 0.0, [[] for _ in range(self.size)]
        self.until = [0.0] * self.size  # when a rank's work is over
        self.progressed = [0.0] * self.size
        self.waiting = [False] * self.size
        self.slow = self.random.randrange(self.size)
        self.frozen = None

    def work(self, number):
        """Seconds of the next stretch: mostly short, sometimes an evaluation much longer than SECONDS."""
        factor = 4 if number == self.slow else 1
        long = self.random.random() < 0.03
        return self.random.uniform(0.1, 0.8) * factor if not long else self.random.uniform(1, 4) * SECONDS

    def tick(self):
        self.now += 0.2
        for number in range(self.size):
            if number == self.frozen:
                continue
            if self.waiting[number]:
                last = self.calls[number][-1]
                if all(len(self.calls[each]) >= last.sequence for each in range(self.size)):
                    self.calls[number][-1] = dataclasses.replace(last, state=ENDED)
                    self.waiting[number], self.until[number] = False, self.now + self.work(number)
                    self.progressed[number] = self.now
            elif self.now >= self.until[number]:
                self.calls[number].append(
                    call(len(self.calls[number]) + 1, state=WAITED_FOR, at=self.now, ranks=tuple(range(self.size)))
                )
                self.waiting[number], self.progressed[number] = True, self.now
            else:
                self.progressed[number] = self.now  # busy

    def hang(self):
        snapshots = [rank(n, *self.calls[n][-4:], stalled=self.now - self.progressed[n]) for n in range(self.size)]
        stalled = [each for each in snapshots if each.stalled >= SECONDS]
        return bool(stalled) and is_hang(snapshots, stalled[0].rank, SECONDS), snapshots


def test_no_accusation_in_200_slow_but_healthy_runs_and_the_culprit_in_200_that_hang():
    waited = 0
    for seed in range(200):
        run = Simulation(seed)
        for _ in range(60):
            run.tick()
            accused, snapshots = run.hang()
            assert not accused, seed
            waited += any(each.stalled >= SECONDS for each in snapshots)
        run.frozen, frozen_at = run.random.randrange(run.size), run.now
        while not accused:
            run.tick()
            accused, snapshots = run.hang()
            assert run.now < frozen_at + 5 * SECONDS * 4 + SECONDS + 2, seed  # after the longest evaluation under way
        if not run.waiting[run.frozen]:
            assert [each.rank for each in diagnose(snapshots)] == [run.frozen], seed
            others_arrive = [run.until[number] for number in range(run.size) if number != run.frozen]
            assert run.now <= max([frozen_at, *others_arrive]) + SECONDS + 2
    assert waited > 500, "some ranks had waited for longer than the watchdog's time"


def record_of(*steps):
    record = RankState()
    for serial, (stream, sequence) in enumerate(steps, start=1):
        text = {
            "stream": stream,
            "name": "all_reduce",
            "shape": [2, 3],
            "dtype": "float32",
            "tensors": 1,
            "peer": None,
            "root": None,
            "file": "a.py",
            "line": serial,
            "ranks": spans(tuple(range(0, 64, 8))),
        }
        record.write_call(serial, sequence, float(serial), serial - 1, stream, json.dumps(text).encode())
    return record


def read(record, life="running"):
    return read_record(record.memory[:], 3, 7, "here", life, 100.0)


def test_a_page_keeps_the_last_calls_and_every_streams_number():
    record = record_of(("rare", 5), *(("often", n) for n in range(1, CALLS + 40)))
    record.mark(1, ENDED)  # overwritten long ago
    record.mark(CALLS + 40, WAITED_FOR)
    record.fields.steps = 12
    record.fields.looked_at, record.fields.progressed_at, record.fields.placed_at = 99.0, 90.0, 98.0
    record.write_words({"file": "a.py", "line": 5, "stacks": "x" * 50_000})
    seen = read(record)
    assert len(seen.calls) == CALLS and [each.line for each in seen.calls] == list(range(41, CALLS + 41))
    assert seen.calls[-1].state == WAITED_FOR and seen.calls[-2].state == ISSUED
    assert seen.calls[0].ranks == (0, 8, 16, 24, 32, 40, 48, 56) and seen.calls[0].shape == (2, 3)
    assert seen.has_issued("rare", 5) and not seen.has_issued("rare", 6) and not seen.has_issued("never", 1)
    assert (seen.step, seen.silent, seen.placed_at) == (11, 1.0, 98.0)
    assert seen.stalled == 100.0 - (CALLS + 40), "a call is progress, also where the watchdog's thread doesn't run"
    assert 5_000 < len(seen.words["stacks"]) < 20_000


def test_with_more_streams_than_a_page_has_room_for_nobody_is_accused_of_missing_one():
    seen = read(record_of(*((f"stream {n}", 1) for n in range(80))))
    assert seen.has_issued("stream 79", 1) and not seen.has_issued("stream 3", 2)


def test_what_was_cut_short_is_left_out():
    record = record_of(("0", 1), ("0", 2))
    record.write_words({"file": "a.py"})
    whole = read(record)
    record.write_call(3, 3, 3.0, 2, "0", b'{"stream": "0", "na')
    words = record.memory.find(b'"a.py"')
    record.memory[words : words + 6] = b'"b.py,'  # copied while its writer was at it
    cut = read(record)
    assert (len(whole.calls), whole.words) == (2, {"file": "a.py"}) and (len(cut.calls), cut.words) == (2, {})


@pytest.mark.parametrize(
    ("path", "ranks"),
    [
        ("train.py", (0, 1)),
        ("/home/проект/" * 60 + "train.py", (0, 1)),
        ("train.py", (*range(200), 999)),
        ("/home/проект/" * 60 + "train.py", (*range(200), 999)),
    ],
)
def test_a_call_fits_into_its_place_by_the_end_of_its_path_and_then_without_its_ranks(path, ranks, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1000)
    record, group = (
        RankState(),
        SimpleNamespace(rank=lambda: 0, size=lambda: len(ranks), group_desc="mesh_" + "x" * 100, group_name="1"),
    )
    recorder = FlightRecorder(record)
    recorder._groups["0"] = ranks
    key = "allreduce_", (2, 3), torch.float32, 1, "0", None, None, False, 0, 7
    text, stream, _ = recorder._text(key, group, compile("", path, "exec"))
    record.write_call(1, 1, 1.0, 0, stream, text)
    record.write_call(2, 2, 1.0, 0, stream, text)
    for call in read(record).calls:
        assert (call.name, call.shape, call.line, call.file) == ("all_reduce", (2, 3), 7, path[-40:])
        assert call.axis == "x" * 32
        assert call.ranks == (ranks if len(ranks) == 2 else ())
    assert len(read(record).calls) == 2


@pytest.mark.parametrize(
    ("state", "declared", "life", "shown"),
    [
        (RUNNING, False, "dead", "dead"),
        (LEFT, False, "dead", "left"),
        (FAILED, False, "running", "failed"),
        (FAILED, False, "dead", "dead"),
        (RUNNING, False, "stopped", "stopped"),
        (LEFT, False, "running", "left"),
        (RUNNING, True, "dead", "running"),
    ],
)
def test_who_left_or_was_ended_by_its_watchdog_did_not_die_in_training(state, declared, life, shown):
    record = record_of(("0", 1))
    record.fields.flags = Flags(state, declared)
    seen = read(record, life)
    assert (seen.life, seen.declared, seen.reported) == (shown, declared, False)


@pytest.mark.parametrize("machine", ["one", "two"])
def test_boards_on_one_machine_and_on_two(monkeypatch, machine):
    store, own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Identity.own
    monkeypatch.setattr("course_lib.hangs.rank_state_exchange.POST_SECONDS", 0.05)
    exchanges = []
    for number in range(2):

        def named(record, number=number):
            return dataclasses.replace(own(record), machine="one" if machine == "one" else f"machine {number}")

        monkeypatch.setattr(Identity, "own", named)
        exchanges.append(RankStateExchange(number, 2, store, "test"))
    exchanges[1].record.fields.steps = 4
    assert exchanges[0].snapshots()[1].life == "unseen"
    opening = threading.Thread(target=exchanges[0].open)
    opening.start()
    exchanges[1].open()
    opening.join()
    try:
        until(lambda: exchanges[0].snapshots()[1].step == 3)
        assert exchanges[0].is_local(1) == (machine == "one")
        exchanges[1].record.write_words({"dead": [0]})
        exchanges[1].record.fields.flags.declared = True
        until(exchanges[0].is_alarming)
        assert exchanges[0].snapshots()[0].life == "dead", "so says rank 1"
        exchanges[1].record.fields.flags = Flags(LEFT)
        exchanges.pop().close()
        until(lambda: exchanges[0].snapshots()[1].life == "left", what="its last word arrives")
        assert not exchanges[0].is_alarming()
    finally:
        for exchange in exchanges:
            exchange.close()


def test_a_stopped_process_is_told_from_a_dead_one():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = start_ticks(child.pid)
        assert process_state(child.pid, started) == "running"
        assert process_state(child.pid, started + 1) == "dead", "another process with its number"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert process_state(child.pid, started) == "stopped"
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(child.pid, started) == "dead", "although nobody has taken its exit code"
    child.wait()
    assert process_state(child.pid, started) == "dead"


def test_work_is_told_from_waiting():
    """Sooner or later: how much of a core a process gets within a given time is the system's affair."""
    activity = Activity([threading.current_thread()])

    def until_it_is(busy, spins):
        while activity.is_busy(spins) != busy:
            time.sleep(0.4)

    until_it_is(busy=False, spins=False)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # as a compiler would
    try:
        until_it_is(busy=True, spins=True)
    finally:
        child.kill()
        child.wait()
    until_it_is(busy=False, spins=False)


@pytest.mark.parametrize(
    ("own", "child", "moved", "busy", "spinning_busy"),
    [
        ((0.4, 0.0), 0.0, 0, False, False),
        ((0.6, 0.0), 0.0, 0, True, False),
        ((0.1, 0.5), 0.0, 0, True, False),
        ((0.01, 9.0), 0.0, 0, False, False),
        ((0.0, 0.0), 0.4, 0, False, False),
        ((0.0, 0.0), 0.6, 0, True, True),
        ((0.0, 0.0), 0.0, 9 << 20, False, False),
        ((0.0, 0.0), 0.0, 11 << 20, True, True),
    ],
)
def test_a_twentieth_of_the_time_or_a_mebibyte_a_second_is_work(monkeypatch, own, child, moved, busy, spinning_busy):
    """Of ten seconds: on a core, in the queue for one (ten times its time on it at most), bytes read and written."""
    for spins, wanted in ((False, busy), (True, spinning_busy)):
        figures = iter([(0.0, {1: (0.0, 0.0)}, {}, 0), (10.0, {1: own}, {2: (child, 0.0)}, moved)])
        monkeypatch.setattr(Activity, "_measure", lambda self, figures=figures: next(figures))
        assert Activity().is_busy(spins) == wanted


@pytest.mark.parametrize(
    ("state", "busy", "spinning_busy"), [("S", False, False), ("R", True, False), ("D", True, True)]
)
def test_a_main_thread_that_waits_for_a_core_or_a_disk_works_although_it_got_none(
    monkeypatch, state, busy, spinning_busy
):
    monkeypatch.setattr(liveness, "_stat", lambda pid: [state])
    monkeypatch.setattr(Activity, "_measure", lambda self: (time.monotonic(), {}, {}, 0))
    seen = {}

    def look():
        activity = Activity()
        seen.update({spins: activity.is_busy(spins) for spins in (False, True)})

    watcher = threading.Thread(target=look)
    watcher.start()
    watcher.join()
    assert seen == {False: busy, True: spinning_busy}
    assert not Activity().is_busy(spins=False), "who looks at itself runs"


@pytest.mark.parametrize(("shown", "seconds"), [("0:01.50", 1.5), ("00:02:03", 123), ("1-02:03:04", 93784)])
def test_the_times_of_ps(shown, seconds):
    """As macOS and Linux write them."""
    assert liveness._seconds(shown) == seconds


def test_where_proc_is_not_there_ps_tells_who_is_whose_child(monkeypatch):
    child = subprocess.Popen(["sleep", "60"])
    try:
        by_proc = liveness._processes()[child.pid]
        monkeypatch.setattr(liveness.Path, "exists", lambda _: False)
        assert liveness._processes()[child.pid][0] == by_proc[0] == os.getpid()
    finally:
        child.kill()
        child.wait()
