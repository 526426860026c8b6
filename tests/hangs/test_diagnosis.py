"""Who is blamed, from states made by hand and from simulated runs; what a record keeps; whether a process works."""

import dataclasses
import functools
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
    KEPT,
    LEFT,
    RUNNING,
    WAITED_FOR,
    Flags,
    RankState,
    read_record,
    spans,
)
from course_lib.hangs.rank_state_exchange import Identity, RankStateExchange
from tests.hangs.snapshots import blamed, call, p2p, rank
from tests.waiting import until

SECONDS = 5.0
WORLD = {"ranks": (0, 1, 2)}
WAITS = rank(0, call(1), call(2, state=WAITED_FOR, line=20))
SENT = p2p("send", 1, 0, state=ENDED)


def both(stalled):
    """Two ranks that have left their first call."""
    return [rank(number, call(1), stalled=stalled) for number in range(2)]


def history(*lines):
    """Calls of their own lines and shapes, of which the last is waited for."""
    ended = [call(number, line=line, shape=(line,)) for number, line in enumerate(lines, start=1)]
    return [*ended[:-1], dataclasses.replace(ended[-1], state=WAITED_FOR)]


# --- who is to blame ---


LIVES = {"running": "elsewhere", "stopped": "stopped", "dead": "dead", "silent": "dead", "failed": "dead"}
LIVES |= {"left": "behind", "unseen": "behind"}


@pytest.mark.parametrize(("life", "what"), LIVES.items())
def test_a_rank_that_has_not_come_is_elsewhere_stopped_dead_or_has_left(life, what):
    missing = rank(1, call(1), life=life)
    assert blamed(WAITS, missing) == [(1, what, "all_reduce", 2, 71)]
    sentence = diagnose([WAITS, missing])[0].sentence
    assert "rank 0 waits for it in all_reduce #2 of float32 (4,) at train.py:20" in sentence


def test_a_rank_that_left_by_an_error_is_told_with_it():
    error = rank(1, call(1), life="failed", words={"error": "ValueError: bad row at data.py:3"})
    assert "has left the training with ValueError: bad row at data.py:3" in diagnose([WAITS, error])[0].sentence


def test_where_it_was_is_the_main_threads_place_unless_a_call_is_younger():
    assert blamed(WAITS, rank(1, call(1, line=33))) == [(1, "elsewhere", "all_reduce", 2, 71)]
    assert blamed(WAITS, rank(1, call(1, line=33), placed_at=0.5)) == [(1, "elsewhere", "all_reduce", 2, 33)]


def test_a_dead_rank_is_blamed_for_what_it_never_came_to_and_not_for_what_it_had_left():
    first, second, within = call(1, **WORLD), call(2, **WORLD), call(1, state=WAITED_FOR, **WORLD)
    lost, dead, wakes = rank(0, first, second), rank(1, first, life="dead"), rank(2, within)
    assert blamed(lost, dead, wakes) == [(1, "dead", "all_reduce", 2, 71)], "rank 2 has not woken up yet"
    assert blamed(lost, dead, rank(2, life="stopped")) == [(1, "dead", "all_reduce", 2, 71)]
    assert blamed(rank(0, first), rank(1, within, life="dead"), wakes) == [(1, "dead", "all_reduce", 1, 71)]
    receives = rank(0, p2p("recv", 1, 0), p2p("recv", 1, 0, 2))
    assert blamed(receives, rank(1, SENT, life="dead")) == [(1, "dead", "recv", 2, 71)]


def test_a_receive_waits_for_its_send_and_one_posted_ahead_holds_nobody_up():
    waits, ahead = rank(0, p2p("recv", 1, 0)), rank(1, p2p("recv", 0, 1, state=ISSUED))
    assert blamed(waits, rank(1)) == blamed(waits, ahead) == [(1, "elsewhere", "recv", 1, 71)]
    waits_too = rank(1, SENT, call(1, stream="1", ranks=(1, 2), state=WAITED_FOR))
    second = rank(0, p2p("recv", 1, 0, 1, ENDED), p2p("recv", 1, 0, 2))
    assert blamed(second, waits_too, rank(2)) == [(2, "elsewhere", "all_reduce", 1, 72)]


def test_in_a_circle_of_groups_the_rank_that_no_wait_holds_up_is_the_one():
    prefetched = rank(1, call(1, stream="1", state=ISSUED))
    assert blamed(rank(0, call(1, stream="2", state=WAITED_FOR)), prefetched) == [(1, "elsewhere", "all_reduce", 1, 71)]


def test_nobody_is_blamed_where_all_have_come_and_all_where_nobody_waits():
    assert blamed(*(rank(number, call(1, state=WAITED_FOR)) for number in range(2))) == []
    assert blamed(*both(9.0)) == [(number, "elsewhere", "all_reduce", 1, 70 + number) for number in range(2)]


def test_of_two_ranks_the_one_that_left_the_pattern_is_mismatched_else_both():
    pattern = rank(1, *history(10, 20, 10, 20))
    assert blamed(rank(0, *history(10, 20, 10, 10)), pattern) == [(0, "mismatched", "all_reduce", 4, 10)]
    assert blamed(rank(0, *history(10, 20, 10, 30)), pattern) == [(0, "mismatched", "all_reduce", 4, 30)]
    assert [each[0] for each in blamed(rank(0, *history(10)), rank(1, *history(20)))] == [0, 1]
    assert [each[0] for each in blamed(rank(0, *history(10, 30, 10, 30)), pattern)] == [0, 1], "either may follow 10"


def test_uneven_collectives_and_what_has_ended_on_all_are_no_mismatch():
    for name in ("all_to_all", "all_reduce"):
        assert blamed(*(rank(n, call(1, name, shape=(n + 1,)), call(2, state=WAITED_FOR)) for n in range(2))) == []


@pytest.mark.parametrize(
    "odd", [call(2, "broadcast", root=0, line=66), call(2, shape=(5,), line=66), call(2, dtype="float64", line=66)]
)
def test_the_rank_that_differs_from_the_others_is_mismatched(odd):
    others = [call(1), call(2, state=WAITED_FOR, line=20)]
    ranks = [rank(0, *others), rank(1, call(1), odd), rank(2, *others)]
    assert blamed(*ranks) == [(1, "mismatched", odd.name, 2, 66)]
    sentence = diagnose(ranks)[0].sentence
    assert "where ranks 0, 2 all_reduce #2 of float32 (4,) at train.py:20" in sentence
    dies = dataclasses.replace(ranks[1], life="dead")
    assert diagnose([ranks[0], dies, ranks[2]])[0].sentence == f"{sentence}; rank 1 has died of it"


def test_root_and_group_are_told_where_they_are_all_that_differs():
    roots = diagnose([rank(number, call(1, "broadcast", WAITED_FOR, root=number)) for number in range(2)])
    assert "issued broadcast #1 from rank 0 of float32 (4,)" in roots[0].sentence
    assert "where rank 1 broadcast #1 from rank 1 of float32 (4,)" in roots[0].sentence and roots[1].rank == 1
    groups = [call(1, state=WAITED_FOR, stream=name, axis=f"group {name}") for name in "ab"]
    assert [verdict.sentence for verdict in diagnose([rank(0, groups[0]), rank(1, groups[1])])] == [
        "rank 0 waits for rank 1 in all_reduce #1 over group a (ranks 0, 1) of float32 (4,) at train.py:10",
        "rank 1 waits for rank 0 in all_reduce #1 over group b (ranks 0, 1) of float32 (4,) at train.py:10",
    ]


def test_calls_in_words():
    assert describe(call(1, "reduce", root=3)) == "reduce #1 to rank 3 of float32 (4,)"
    assert describe(call(3, axis="world")) == "all_reduce #3 of float32 (4,)"
    many = call(1, ranks=tuple(range(64)), axis="dp")
    assert describe(many) == "all_reduce #1 over dp (64 ranks from 0 to 63) of float32 (4,)"


def test_ranks_that_wait_in_a_circle_are_all_named_and_no_bystander():
    circle = [rank(n, p2p("recv", (n + 1) % 3, n, line=30 + n)) for n in range(3)]
    named = [(n, "behind", "recv", 1, 30 + n) for n in range(3)]
    assert blamed(*circle) == blamed(*circle, rank(3, p2p("recv", 0, 3))) == named
    sentence = diagnose(circle)[0].sentence
    assert "rank 0 waits for rank 1 in recv #1 from rank 1 of float32 (4,) at train.py:30" in sentence


def test_a_hang_is_one_when_those_to_blame_have_stood_still_too():
    assert is_hang([WAITS, rank(1, call(1), stalled=SECONDS)], 0, SECONDS)
    assert not is_hang([WAITS, rank(1, call(1), stalled=SECONDS - 1)], 0, SECONDS), "it works, or did just now"
    assert is_hang([WAITS, rank(1, call(1), stalled=0.0, life="stopped")], 0, SECONDS)
    assert not is_hang([WAITS, rank(1, call(1), life="late")], 0, SECONDS), "its machine has not posted for a moment"
    assert not is_hang([WAITS, rank(1, life="unseen")], 0, SECONDS)
    assert is_hang([dataclasses.replace(WAITS, stalled=10 * SECONDS), rank(1, life="unseen")], 0, SECONDS)
    assert is_hang([rank(0, call(1), stalled=SECONDS), rank(1, call(1), life="dead")], 0, SECONDS)
    assert not is_hang(both(2 * SECONDS), 0, SECONDS), "nobody waits, as before the first call, where all build"
    assert is_hang(both(10 * SECONDS), 0, SECONDS)


class Simulation:
    """Ranks that compute, reduce, pass on and evaluate for as long as they like; one may stop for ever."""

    def __init__(self, seed):
        self.random, self.now, self.frozen = random.Random(seed), 0.0, None
        self.ranks = tuple(range(self.random.choice([2, 3, 4, 8])))
        self.calls = [[] for _ in self.ranks]
        self.until = [0.0 for _ in self.ranks]  # when a rank's work is over
        self.progressed = [0.0 for _ in self.ranks]
        self.slow = self.random.choice(self.ranks)

    def waits(self, number):
        return bool(self.calls[number]) and not self.calls[number][-1].ended

    def work(self, number):
        """Seconds of the next stretch: mostly short, sometimes an evaluation much longer than SECONDS."""
        factor = 4 if number == self.slow else 1
        long = self.random.random() < 0.03
        return self.random.uniform(0.1, 0.8) * factor if not long else self.random.uniform(1, 4) * SECONDS

    def tick(self):
        self.now += 0.2
        for number in self.ranks:
            calls = self.calls[number]
            held_up = self.waits(number) and any(len(others) < len(calls) for others in self.calls)
            if number == self.frozen or held_up:
                continue
            if self.waits(number):
                calls[-1] = dataclasses.replace(calls[-1], state=ENDED)
                self.until[number] = self.now + self.work(number)
            elif self.now >= self.until[number]:
                calls.append(call(len(calls) + 1, state=WAITED_FOR, at=self.now, ranks=self.ranks))
            self.progressed[number] = self.now

    def hang(self):
        snapshots = [rank(n, *self.calls[n][-4:], stalled=self.now - self.progressed[n]) for n in self.ranks]
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
        run.frozen, frozen_at = run.random.choice(run.ranks), run.now
        while not accused:
            run.tick()
            accused, snapshots = run.hang()
            assert run.now < frozen_at + 5 * SECONDS * 4 + SECONDS + 2, seed  # after the longest evaluation under way
        if not run.waits(run.frozen):
            assert [each.rank for each in diagnose(snapshots)] == [run.frozen], seed
            others_arrive = [run.until[number] for number in run.ranks if number != run.frozen]
            assert run.now <= max([frozen_at, *others_arrive]) + SECONDS + 2
    assert waited > 500, "some ranks had waited for longer than the watchdog's time"


# --- what a record keeps ---


def text_of(**fields):
    """A call as a recorder writes it."""
    usual = {"name": "all_reduce", "tensors": 1, "peer": None, "root": None, "file": "a.py", "dtype": "float32"}
    return json.dumps(usual | fields).encode()


def record_of(*steps):
    record, ranks = RankState(), spans(tuple(range(0, 64, 8)))
    for serial, (stream, sequence) in enumerate(steps, start=1):
        text = text_of(stream=stream, shape=[2, 3], line=serial, ranks=ranks)
        record.write_call(serial, sequence, float(serial), serial - 1, stream, text)
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
    assert [each.line for each in seen.calls] == list(range(41, CALLS + 41))
    assert [each.state for each in seen.calls[-2:]] == [ISSUED, WAITED_FOR]
    assert seen.calls[0].ranks == (0, 8, 16, 24, 32, 40, 48, 56) and seen.calls[0].shape == (2, 3)
    assert seen.has_issued("rare", 5) and not seen.has_issued("rare", 6) and not seen.has_issued("never", 1)
    assert (seen.step, seen.silent, seen.placed_at) == (11, 1.0, 98.0)
    assert seen.stalled == 100.0 - (CALLS + 40), "a call is progress, also where the watchdog's thread doesn't run"
    assert 5_000 < len(seen.words["stacks"]) < 20_000


def test_with_more_streams_than_a_page_has_room_for_nobody_is_accused_of_missing_one():
    seen = read(record_of(*((f"stream {n}", 1) for n in range(80))))
    assert seen.has_issued("stream 79", 1) and not seen.has_issued("stream 3", 2)


def test_the_oldest_open_calls_are_kept_until_they_have_ended():
    record, total = RankState(), CALLS + KEPT + 5
    text = text_of(stream="0", shape=[], line=1, ranks=[0, 1], on_gpu=True)
    for serial in range(1, total + 1):
        if serial > CALLS:
            record.keep(serial - CALLS)
        record.write_call(serial, serial, float(serial), 0, "0", text, batch=serial % 3)
    record.mark(2, WAITED_FOR, 7)
    kept = read(record).calls
    assert [each.serial for each in kept] == [*range(1, KEPT + 1), *range(total - CALLS + 1, total + 1)]
    assert (kept[1].state, kept[1].waited, kept[1].batch, kept[1].on_gpu) == (WAITED_FOR, 7, 2, True)
    record.mark(2, ENDED)
    record.mark(KEPT + 2, ENDED)  # written over: there was no room
    assert [each.serial for each in read(record).calls] == [each.serial for each in kept if each.serial != 2]


def test_what_was_cut_short_is_left_out():
    record = record_of(("0", 1), ("0", 2))
    record.write_words({"file": "a.py"})
    whole = read(record)
    record.write_call(3, 3, 3.0, 2, "0", b'{"stream": "0", "na')
    words = record.memory.find(b'"a.py"')
    record.memory[words : words + 6] = b'"b.py,'  # copied while its writer was at it
    cut = read(record)
    assert (len(whole.calls), whole.words) == (2, {"file": "a.py"}) and (len(cut.calls), cut.words) == (2, {})


@pytest.mark.parametrize("ranks", [(0, 1), (*range(200), 999)], ids=["two ranks", "many ranks"])
@pytest.mark.parametrize("path", ["train.py", "/home/проект/" * 60 + "train.py"], ids=["short path", "long path"])
def test_a_call_fits_into_its_place_by_the_end_of_its_path_and_then_without_its_ranks(path, ranks, monkeypatch):
    monkeypatch.setattr(dist, "get_world_size", lambda: 1000)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: len(ranks), group_desc="mesh_" + "x" * 100, group_name="1")
    recorder = FlightRecorder(record := RankState())
    recorder._groups["0"] = ranks
    key = "allreduce_", (2, 3), torch.float32, 1, "0", None, None, False, 0, 7
    text, stream, _ = recorder._text(key, group, compile("", path, "exec"))
    for number in (1, 2):
        record.write_call(number, number, 1.0, 0, stream, text)
    expected = "all_reduce", (2, 3), 7, path[-40:], "x" * 32, ranks if len(ranks) == 2 else ()
    seen = [(each.name, each.shape, each.line, each.file, each.axis, each.ranks) for each in read(record).calls]
    assert seen == [expected] * 2


SHOWN = [(RUNNING, False, "dead", "dead"), (LEFT, False, "dead", "left"), (FAILED, False, "running", "failed")]
SHOWN += [(FAILED, False, "dead", "dead"), (RUNNING, False, "stopped", "stopped"), (RUNNING, True, "dead", "running")]


@pytest.mark.parametrize(("state", "declared", "life", "shown"), SHOWN)
def test_who_left_or_was_ended_by_its_watchdog_did_not_die_in_training(state, declared, life, shown):
    record = record_of(("0", 1))
    record.fields.flags = Flags(state, declared)
    seen = read(record, life)
    assert (seen.life, seen.declared, seen.reported) == (shown, declared, False)


@pytest.mark.parametrize("machines", [("one", "one"), ("one", "two")])
def test_records_on_one_machine_and_on_two(monkeypatch, machines):
    store, own = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Identity.own
    monkeypatch.setattr("course_lib.hangs.rank_state_exchange.POST_SECONDS", 0.05)
    exchanges = []
    for number, machine in enumerate(machines):
        named = functools.partial(lambda machine, record: dataclasses.replace(own(record), machine=machine), machine)
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
        assert exchanges[0].is_local(1) == (machines[0] == machines[1])
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


# --- whether a process works ---


@pytest.fixture
def child():
    """A function that starts a child, which is killed in the end."""
    started = []

    def start(*command):
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_stopped_process_is_told_from_a_dead_one(child):
    sleeps = child("sleep", "60")
    started = start_ticks(sleeps.pid)
    assert process_state(sleeps.pid, started) == "running"
    assert process_state(sleeps.pid, started + 1) == "dead", "another process with its number"
    os.kill(sleeps.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, sleeps.pid, os.WSTOPPED)
    assert process_state(sleeps.pid, started) == "stopped"
    sleeps.kill()
    os.waitid(os.P_PID, sleeps.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(sleeps.pid, started) == "dead", "although nobody has taken its exit code"
    sleeps.wait()
    assert process_state(sleeps.pid, started) == "dead"


def test_work_is_told_from_waiting(child):
    """Sooner or later: how much of a core a process gets within a given time is the system's affair."""
    activity = Activity([threading.current_thread()])

    def until_it_is(busy, spins):
        while activity.is_busy(spins) != busy:
            time.sleep(0.4)

    until_it_is(busy=False, spins=False)
    compiler = child(sys.executable, "-c", "while True: pass")
    until_it_is(busy=True, spins=True)
    compiler.kill()
    compiler.wait()
    until_it_is(busy=False, spins=False)


def test_who_stands_still_and_keeps_a_core_busy_spins():
    activity = Activity()
    torch.ones(2)
    while not activity.main_spins:
        for _ in range(2000):
            sum(range(1000))
        activity.is_busy(spins=False)
    while activity.main_spins:
        time.sleep(0.3)
        activity.is_busy(spins=False)


NEITHER, WORKING, BOTH = (False, False), (True, False), (True, True)
SHARES = [((0.4, 0.0), 0.0, 0, NEITHER), ((0.6, 0.0), 0.0, 0, WORKING), ((0.1, 0.5), 0.0, 0, WORKING)]
SHARES += [((0.01, 9.0), 0.0, 0, NEITHER), ((0.0, 0.0), 0.4, 0, NEITHER), ((0.0, 0.0), 0.6, 0, BOTH)]
SHARES += [((0.0, 0.0), 0.0, 9 << 20, NEITHER), ((0.0, 0.0), 0.0, 11 << 20, BOTH)]


@pytest.mark.parametrize(("own", "child", "moved", "busy"), SHARES)
def test_a_twentieth_of_the_time_or_a_mebibyte_a_second_is_work(monkeypatch, own, child, moved, busy):
    """Of ten seconds: on a core, in the queue for one (ten times its time on it at most), bytes read and written."""
    for spins, wanted in zip((False, True), busy, strict=True):
        figures = iter([(0.0, {1: (0.0, 0.0)}, {}, 0), (10.0, {1: own}, {2: (child, 0.0)}, moved)])
        monkeypatch.setattr(Activity, "_measure", lambda self, figures=figures: next(figures))
        assert Activity().is_busy(spins) == wanted


@pytest.mark.parametrize(("state", "busy"), [("S", NEITHER), ("R", WORKING), ("D", BOTH)])
def test_a_main_thread_that_waits_for_a_core_or_a_disk_works_although_it_got_none(monkeypatch, state, busy):
    monkeypatch.setattr(liveness, "_stat", lambda pid: [state])
    monkeypatch.setattr(Activity, "_measure", lambda self: (time.monotonic(), {}, {}, 0))
    seen = []
    watcher = threading.Thread(target=lambda: seen.extend(Activity().is_busy(spins) for spins in (False, True)))
    watcher.start()
    watcher.join()
    assert tuple(seen) == busy
    assert not Activity().is_busy(spins=False), "who looks at itself runs"


@pytest.mark.parametrize(("shown", "seconds"), [("0:01.50", 1.5), ("00:02:03", 123), ("1-02:03:04", 93784)])
def test_the_times_of_ps(shown, seconds):
    """As macOS and Linux write them."""
    assert liveness._seconds(shown) == seconds


def test_where_proc_is_not_there_ps_tells_who_is_whose_child(monkeypatch, child):
    pid = child("sleep", "60").pid
    by_proc = liveness._processes()[pid]
    monkeypatch.setattr(liveness.Path, "exists", lambda _: False)
    assert liveness._processes()[pid][0] == by_proc[0] == os.getpid()
