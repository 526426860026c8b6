"""The watchdog on real ranks: it names who, which collective and where, ends them all, and accuses nobody who works."""

import json
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from course_lib.errors import EXIT_HUNG, CourseError
from course_lib.hangs import diagnosis, flight_recorder, rank_state_exchange, watchdog
from course_lib.hangs.flight_recorder import FlightRecorder
from course_lib.hangs.rank_state import ENDED, RankState, read_record
from course_lib.hangs.watchdog import ANSWER_SECONDS, LOOK_SECONDS, Watchdog, read_reports
from course_lib.launching.launch import RankError, launch
from course_lib.metering.meter import Meter
from tests.hangs.test_silent_phases import DO
from tests.ranks import on_ranks

SECONDS, LONG_SECONDS = 1.0, 3600.0
STEPS, FAULTY, CULPRIT = 6, 3, 1
HERE = os.path.relpath(__file__)


def line_of(mark):
    """The number of the line of this file that ends with a mark."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# {mark}"))


class Stuck(torch.utils.data.Dataset):
    """Data whose third row never comes, on the culprit."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if index == FAULTY and os.environ["RANK"] == str(CULPRIT):
            time.sleep(600)
        return torch.ones(4)


def train(fault, folder):
    """A few steps; the culprit's go wrong in the fourth. Each rank notes who it is."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    loader = torch.utils.data.DataLoader(Stuck(), batch_size=None, num_workers=1) if fault == "loader" else range(STEPS)
    rows = torch.ones(4)
    with Watchdog(LONG_SECONDS if fault == "dead" else SECONDS, folder / "hang") as dog:
        batches = iter(loader)
        for step in range(STEPS):
            next(batches)  # loader
            if step == FAULTY and rank == CULPRIT:
                if fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif fault == "dead":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif fault == "elsewhere":
                    time.sleep(600)  # elsewhere
            if fault == "recv" and step == FAULTY and rank == 0:
                dist.recv(rows, CULPRIT)  # recv
            if not (fault == "skips" and step == FAULTY and rank == CULPRIT):
                dist.all_reduce(rows)  # reduces
            dist.barrier()  # waits
            dog.beat(step)
            time.sleep(0.02)


EXPECTED = {  # what, collective, sequence, where
    "dead": ("dead", "all_reduce", 7, None),
    "stopped": ("stopped", "all_reduce", 7, None),
    "elsewhere": ("elsewhere", "all_reduce", 7, "elsewhere"),
    "loader": ("elsewhere", "all_reduce", 7, "loader"),
    "skips": ("mismatched", "barrier", 7, "waits"),
}


def after(fault, folder, ranks=3, stream=False):
    """The reports; a hang that nobody reports ends the launch with another error."""
    with pytest.raises(RankError):
        launch(train, fault, folder, num_processes=ranks, timeout=400, stream=stream)
    for rank in range(ranks):
        assert not psutil.pid_exists(int((folder / f"pid{rank}").read_text()))
    return read_reports(folder / "hang")


@pytest.fixture
def work_may_take_for_ever(monkeypatch):
    """What counted as work would never be reported."""
    monkeypatch.setattr(watchdog, "BUSY_FACTOR", 10**6)
    monkeypatch.setattr(diagnosis, "BUSY_FACTOR", 10**6)


@pytest.mark.usefixtures("work_may_take_for_ever")
@pytest.mark.parametrize("fault", EXPECTED)
def test_the_culprit_its_collective_and_its_place_are_named(fault, tmp_path, monkeypatch, capsys):
    if fault == "elsewhere":
        monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")  # gloo keeps a record of its own, too
        monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 60.0)  # else a busy machine may have two ranks tell
    reports = after(fault, tmp_path, stream=fault == "elsewhere")
    what, collective, sequence, mark = EXPECTED[fault]
    died = {CULPRIT} if fault in ("dead", "stopped") else set()
    assert {report.rank for report in reports} == {0, 1, 2} - died
    for report in reports:
        (verdict,) = report.verdicts
        named = verdict.rank, verdict.what, verdict.collective, verdict.sequence, verdict.file
        assert named == (CULPRIT, what, collective, sequence, HERE)
        assert mark is None or verdict.line == line_of(mark)
        assert [state.rank for state in report.states] == [0, 1, 2]
        first = report.states[0]
        waits = first.collective, first.sequence, first.shape, first.line, first.step, first.group
        assert waits == ("all_reduce", 7, (4,), line_of("reduces"), FAULTY - 1, (0, 1, 2))
        assert f"line {line_of('reduces')}, in train" in report.stacks
        assert report.states[CULPRIT].alive == (fault != "dead")
        text = (tmp_path / "hang" / f"hang-rank{report.rank}.txt").read_text()
        assert verdict.sentence in text and report.stacks in text
    if fault == "elsewhere":
        assert capsys.readouterr().out.count("watchdog: rank 1 ") == 1, "one rank tells for all"
        assert f"line {line_of('elsewhere')}, in train" in reports[0].stacks, "rank 1's stack stands in rank 0's report"
        backend = json.loads((tmp_path / "hang" / "hang-rank0.json").read_text())["backend"]
        assert backend["entries"][-1]["profiling_name"] == "gloo:all_reduce" and not backend["entries"][-1]["retired"]


@pytest.mark.usefixtures("work_may_take_for_ever")
def test_a_receive_whose_send_never_comes(tmp_path):
    """Rank 0 waits for rank 1's send, and rank 1 for rank 0's all-reduce: a circle, of which both are named."""
    reports = after("recv", tmp_path, ranks=2)
    assert {report.rank for report in reports} == {0, 1}
    for report in reports:
        circle = [(verdict.rank, verdict.collective, verdict.line) for verdict in report.verdicts]
        assert circle == [(0, "recv", line_of("recv")), (1, "all_reduce", line_of("reduces"))]
        assert "rank 0 waits for rank 1 in recv #1 from rank 1" in report.verdicts[0].sentence


@pytest.mark.parametrize("kind", ["evaluation", "compile", "saving"])
@on_ranks(2)
def test_no_accusation_of_ranks_that_work(kind, tmp_path):
    """In each of the ways that a watchdog could take for a hang and that keep a rank busy."""
    torch.set_num_threads(1)
    with Watchdog(SECONDS, tmp_path / "hang", ends=False):
        if dist.get_rank() == 0:
            DO[kind](2 * SECONDS, 0, tmp_path)
        dist.barrier()
    assert read_reports(tmp_path / "hang") == []
    assert threading.active_count() == 1, "a watchdog leaves no thread behind"


class SharedClock:
    """Both ranks' ``time.monotonic``: it goes on only while a rank waits, by so much that no look falls out."""

    def __init__(self):
        self.memory = mmap.mmap(-1, 8)
        self.write(1000.0)

    def write(self, now):
        self.memory[:] = struct.pack("d", now)

    def monotonic(self):
        return struct.unpack("d", self.memory[:])[0]

    def wait(self, dog, seconds):
        """A rank's main thread does nothing for so long, and its watchdog looks all the while."""
        for _ in range(round(seconds / LOOK_SECONDS)):
            self.write(now := self.monotonic() + LOOK_SECONDS)
            while dog._looked < now and not dog._declared:  # which looks no more
                time.sleep(LOOK_SECONDS / 5)
        while dog._declared and not all(peer.reported for peer in dog._exchange.snapshots()):
            time.sleep(LOOK_SECONDS / 5)  # it stays where the reports find it


def waits(folder, clock, beats, busy_factor=None):
    """Ranks of which one waits for longer than the watchdog's seconds in all, but never at one time.

    With a busy factor it works all the while, and for longer than such work may take.
    """
    for module in (watchdog, rank_state_exchange, flight_recorder):
        module.time = SimpleNamespace(monotonic=clock.monotonic, time=time.time, sleep=time.sleep)
    watchdog.BUSY_FACTOR = busy_factor or watchdog.BUSY_FACTOR
    works = busy_factor is not None
    watchdog.Activity = lambda watchers, peers: SimpleNamespace(is_busy=lambda spins: works, main_spins=False)
    rank = dist.get_rank()
    with Watchdog(SECONDS, folder, ends=False) as dog:
        while rank == 0 and not dog._exchange.snapshots()[1].calls:
            time.sleep(LOOK_SECONDS / 5)  # it is not in its barrier yet
        for step in range(4 * (busy_factor or 1)):
            if rank == 0:
                clock.wait(dog, SECONDS / 2)
                if beats:
                    dog.beat(step)
        dist.barrier()
    for turn in range(2 * beats):
        with Watchdog(SECONDS, folder, ends=False) as dog:
            for step in range(3):
                if turn == rank:
                    clock.wait(dog, SECONDS / 2)
                dist.all_reduce(torch.ones(8))
                dog.beat(step)


def accused(folder):
    return {verdict.rank for report in read_reports(folder) for verdict in report.verdicts}


@pytest.mark.parametrize("beats", [False, True])
def test_ranks_that_wait_are_accused_unless_they_beat(ranks, tmp_path, beats):
    """Slow steps, and ranks that wait for each other in turns, are no hang; the same time without a beat is one."""
    clock = SharedClock()
    ranks(2, join=True)(waits, tmp_path, clock, beats)
    assert clock.monotonic() == pytest.approx(1000 + SECONDS * (2 + 3 * beats))
    assert accused(tmp_path) == (set() if beats else {0})


def test_work_without_end_is_accused(ranks, tmp_path):
    """Work counts as progress for 2 x SECONDS; SECONDS later it is a hang."""
    ranks(2, join=True)(waits, tmp_path, SharedClock(), False, busy_factor=2)
    assert accused(tmp_path) == {0}
    working, waiting = read_reports(tmp_path)
    assert (working.rank, waiting.rank) == (0, 1)
    assert 2 * SECONDS < waiting.seconds < 4 * SECONDS


def calls_of(record):
    calls = read_record(record.memory[:], 0, 1, "", "running", 0.0).calls
    return [(call.name, call.line, call.state == ENDED) for call in calls]


def recorded(function):
    recorder = FlightRecorder(record := RankState())
    recorder.start()
    function()
    while not all(ended for *_, ended in calls_of(record)):  # or until the launch ends it
        recorder.look()  # gloo's threads say it a little later than they have done it
    recorder.stop()
    return calls_of(record)


@on_ranks(2)
def test_every_engine_is_seen():
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    seen = recorded(lambda: replicated(torch.ones(2, 4)).sum().backward())  # DDP
    assert seen == [("all_reduce", line_of("DDP"), True)]
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    seen = recorded(lambda: sharded(torch.ones(2, 4)).sum().backward())  # FSDP2
    assert set(seen) == {(name, line_of("FSDP2"), True) for name in ("all_gather", "reduce_scatter")}
    stage = PipelineStage(nn.Linear(4, 4), dist.get_rank(), 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    batch = (torch.ones(4, 4),) if stage.is_first else ()
    target = {"target": torch.ones(4, 4)} if stage.is_last else {}
    schedule.step(*batch, **target)
    seen = recorded(lambda: schedule.step(*batch, **target))  # pipeline
    assert set(seen) == {(name, line_of("pipeline"), True) for name in ("send", "recv")}


@on_ranks(2)
def test_a_meter_and_another_recorder_may_run_at_the_same_time():
    reduced = torch.ones(4)
    recorder, later = FlightRecorder(first := RankState()), FlightRecorder(second := RankState())
    recorder.start()
    with Meter() as inside:  # the meter within the recorder
        dist.all_reduce(reduced)
        later.start()
        dist.all_reduce(reduced)
        recorder.stop()
        dist.all_reduce(reduced)
    dist.all_reduce(reduced)  # and the recorder beyond the meter
    later.stop()
    dist.all_reduce(reduced)
    assert (len(inside.collectives), len(calls_of(first)), len(calls_of(second))) == (3, 2, 3)


def ends_on_request(holds, folder):
    with Watchdog(30, folder / "hang", holds_sigterm=holds):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            (folder / "still there").touch()
        time.sleep(300)


ENDED_BY = {False: "was killed by SIGTERM", True: "exited with code 143 before the function returned"}


@pytest.mark.parametrize("holds", [False, True])
def test_sigterm_is_held_back_for_the_report_and_no_longer(holds, ranks, tmp_path):
    with pytest.raises(RankError) as error:
        ranks(2, join=True)(ends_on_request, holds, tmp_path)
    assert error.value.rank == 1 and (tmp_path / "still there").exists() == holds
    assert error.value.failure.summary == ENDED_BY[holds]


def hangs_alone(folder, ends):
    with Watchdog(SECONDS, folder, ends=ends):
        while not (folder / "hang-rank0.txt").exists():  # or until the launch ends it
            threading.Event().wait(1)
    return read_reports(folder)


def test_one_process_without_a_group_is_watched_too(ranks, tmp_path):
    (tmp_path / "hang-rank3.json").write_text(json.dumps({"left by": "an earlier run with more ranks"}))
    os.utime(tmp_path / "hang-rank3.json", (1, 1))
    ((report,),) = ranks(1)(hangs_alone, tmp_path, False)
    (verdict,) = report.verdicts
    assert (verdict.rank, verdict.what, verdict.file) == (0, "elsewhere", HERE)
    with pytest.raises(RankError, match=f"exited with code {EXIT_HUNG}"):
        ranks(1)(hangs_alone, tmp_path / "ended", True)


def answers_late(folder):
    """Rank 1's watchdog has no core for a while, just as it is to say where its rank is."""
    stacks = Watchdog._stacks

    def late(dog):
        time.sleep(2.5 * ANSWER_SECONDS)
        return stacks(dog)

    if dist.get_rank() == 1:
        Watchdog._stacks = late
    with Watchdog(SECONDS, folder):
        time.sleep(600)


def test_a_rank_that_only_answers_late_is_left_to_report_for_itself(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 40.0)  # however late a busy machine lets it answer
    with pytest.raises(RankError, match=f"exited with code {EXIT_HUNG}"):
        ranks(2, join=True)(answers_late, tmp_path)
    first, second = read_reports(tmp_path)
    assert (first.rank, second.rank) == (0, 1) and "in answers_late" in second.stacks


def test_no_watchdog_without_seconds(tmp_path):
    with pytest.raises(CourseError, match="more than 0"):
        Watchdog(0, tmp_path)
