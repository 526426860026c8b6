"""The watchdog on real ranks: it names who, which collective and where, ends them all, and accuses nobody who works."""

import json
import mmap
import os
import signal
import struct
import subprocess
import sys
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
    rank, world = dist.get_rank(), dist.get_world_size()
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
                elif fault == "name":
                    dist.broadcast(rows, CULPRIT)  # name
                elif fault == "shape":
                    dist.all_reduce(torch.ones(4, 2))  # shape
            if fault == "recv" and step == FAULTY and rank == 0:
                dist.recv(rows, CULPRIT)  # recv
            if not (fault == "skips" and step == FAULTY and rank == CULPRIT):
                dist.all_reduce(rows)  # reduces
            dist.barrier()  # waits
            dog.beat(step)
            time.sleep(0.02)
    return world


EXPECTED = {  # what, collective, sequence, where
    "dead": ("dead", "all_reduce", 7, None),
    "stopped": ("stopped", "all_reduce", 7, None),
    "elsewhere": ("elsewhere", "all_reduce", 7, "elsewhere"),
    "loader": ("elsewhere", "all_reduce", 7, "loader"),
    "skips": ("mismatched", "barrier", 7, "waits"),
    "name": ("mismatched", "broadcast", 7, "name"),
    "shape": ("mismatched", "all_reduce", 7, "shape"),
}


def after(fault, folder, ranks=3, stream=False):
    """The reports, and what the launch says; a hang that nobody reports ends the launch with another error."""
    with pytest.raises(RankError) as error:
        launch(train, fault, folder, num_processes=ranks, timeout=400, stream=stream)
    for rank in range(ranks):
        assert not psutil.pid_exists(int((folder / f"pid{rank}").read_text()))
    return read_reports(folder / "hang"), str(error.value)


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
    reports, error = after(fault, tmp_path, stream=fault == "elsewhere")
    what, collective, sequence, mark = EXPECTED[fault]
    died = {"dead": {CULPRIT}, "stopped": {CULPRIT}}.get(fault, set())
    writers = {report.rank for report in reports}
    if fault == "shape":  # gloo may abort a rank that receives more than it asked for
        assert writers, error
    else:
        assert writers == {0, 1, 2} - died
    for report in reports:
        (verdict,) = report.verdicts
        assert (verdict.rank, verdict.what, verdict.collective, verdict.sequence) == (
            CULPRIT,
            what,
            collective,
            sequence,
        ), report
        assert verdict.file == HERE and (mark is None or verdict.line == line_of(mark))
        assert [state.rank for state in report.states] == [0, 1, 2]
        waiting = report.states[0]
        if fault != "shape":
            assert (waiting.collective, waiting.sequence, waiting.shape, waiting.line) == (
                "all_reduce",
                7,
                (4,),
                line_of("reduces"),
            )
            assert waiting.step == FAULTY - 1 and waiting.group == (0, 1, 2)
            assert f"line {line_of('reduces')}, in train" in report.stacks
        assert report.states[CULPRIT].alive == (fault != "dead") or fault == "shape"
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
    reports, _ = after("recv", tmp_path, ranks=2)
    assert {report.rank for report in reports} == {0, 1}
    for report in reports:
        first, second = report.verdicts
        assert (first.rank, first.collective, first.line) == (0, "recv", line_of("recv"))
        assert (second.rank, second.collective, second.line) == (1, "all_reduce", line_of("reduces"))
        assert "rank 0 waits for rank 1 in recv #1 from rank 1" in first.sentence


def works(folder):
    """Ranks of which one is slow, in each of the ways that a watchdog could take for a hang and that keep it busy."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, done = dist.get_rank(), []

    def evaluates():
        end = time.monotonic() + 2 * SECONDS
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)

    def compiles():
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import time; end = time.monotonic() + {2 * SECONDS}\nwhile time.monotonic() < end: pass",
            ],
            check=True,
        )

    def saves():
        end, block = time.monotonic() + 2 * SECONDS, os.urandom(1 << 20)
        with (folder / "checkpoint").open("wb") as out:
            while time.monotonic() < end:
                out.seek(0)
                out.write(block)
                out.flush()
                time.sleep(0.05)

    for slow in (evaluates, compiles, saves):
        with Watchdog(SECONDS, folder / "hang", ends=False):
            if rank == 0:
                slow()
            dist.barrier()
        done.append(slow.__name__)
    return done, len(threading.enumerate())


def test_no_accusation_of_ranks_that_work(tmp_path):
    for done, threads in launch(works, tmp_path, num_processes=2, timeout=320, stream=False):
        assert done == ["evaluates", "compiles", "saves"]
        assert threads == 1, "a watchdog leaves no thread behind"
    assert read_reports(tmp_path / "hang") == []


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
    dist.init_process_group("gloo")
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
    return clock.monotonic()


@pytest.mark.parametrize("beats", [False, True])
def test_ranks_that_wait_are_accused_unless_they_beat(tmp_path, beats):
    """Slow steps, and ranks that wait for each other in turns, are no hang; the same time without a beat is one."""
    ended = launch(waits, tmp_path, SharedClock(), beats, num_processes=2, timeout=320, stream=False)
    assert ended[0] == pytest.approx(1000 + SECONDS * (2 + 3 * beats))
    accused = {verdict.rank for report in read_reports(tmp_path) for verdict in report.verdicts}
    assert accused == (set() if beats else {0})


def test_work_without_end_is_accused(tmp_path):
    """Work counts as progress for 2 x SECONDS; SECONDS later it is a hang."""
    launch(waits, tmp_path, SharedClock(), False, 2, num_processes=2, timeout=320, stream=False)
    reports = read_reports(tmp_path)
    assert {verdict.rank for report in reports for verdict in report.verdicts} == {0} and len(reports) == 2
    waiting = next(report for report in reports if report.rank == 1)
    assert 2 * SECONDS < waiting.seconds < 4 * SECONDS


def calls_of(record):
    return [
        (call.name, call.line, call.state == ENDED)
        for call in read_record(record.memory[:], 0, 1, "", "running", 0.0).calls
    ]


def seen():
    """What the recorder notes of each engine, with and without a meter."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}

    def recorded(function):
        record = RankState()
        recorder = FlightRecorder(record)
        recorder.start()
        function()
        while not all(ended for _, _, ended in calls_of(record)):  # or until the launch ends it
            recorder.look()  # gloo's threads say it a little later than they have done it
        recorder.stop()
        return calls_of(record)

    replicated = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    found["DDP"] = recorded(lambda: replicated(torch.ones(2, 4)).sum().backward())  # DDP
    sharded = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    found["FSDP2"] = recorded(lambda: sharded(torch.ones(2, 4)).sum().backward())  # FSDP2
    stage = PipelineStage(nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    batch = (torch.ones(4, 4),) if rank == 0 else ()
    target = {"target": torch.ones(4, 4)} if rank == 1 else {}
    schedule.step(*batch, **target)
    found["pipeline"] = recorded(lambda: schedule.step(*batch, **target))  # pipeline

    recorder, record = FlightRecorder(first := RankState()), RankState()
    later, reduced = FlightRecorder(record), torch.ones(4)
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
    found["both"] = len(inside.collectives), len(calls_of(first)), len(calls_of(record))
    return found


def test_every_engine_is_seen_and_a_meter_may_run_at_the_same_time():
    for found in launch(seen, num_processes=2, timeout=200, stream=False):
        assert found["DDP"] == [("all_reduce", line_of("DDP"), True)]
        assert {name for name, _, _ in found["FSDP2"]} == {"all_gather", "reduce_scatter"}
        assert {name for name, _, _ in found["pipeline"]} == {"send", "recv"}
        for engine in ("FSDP2", "pipeline"):
            assert {line for _, line, _ in found[engine]} == {line_of(engine)}, engine
            assert len(found[engine]) >= 2 and all(ended for _, _, ended in found[engine])
        assert found["both"] == (3, 2, 3)


def ends_on_request(holds, folder):
    dist.init_process_group("gloo")
    with Watchdog(30, folder / "hang", holds_sigterm=holds):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            (folder / "still there").touch()
        time.sleep(300)


@pytest.mark.parametrize("holds", [False, True])
def test_sigterm_is_held_back_for_the_report_and_no_longer(holds, tmp_path):
    with pytest.raises(RankError) as error:
        launch(ends_on_request, holds, tmp_path, num_processes=2, timeout=200, stream=False)
    assert error.value.rank == 1 and (tmp_path / "still there").exists() == holds
    assert error.value.failure.summary == (
        "exited with code 143 before the function returned" if holds else "was killed by SIGTERM"
    )


def hangs_alone(folder, ends):
    with Watchdog(SECONDS, folder, ends=ends):
        while not (folder / "hang-rank0.txt").exists():  # or until the launch ends it
            threading.Event().wait(1)
    return read_reports(folder)


def test_one_process_without_a_group_is_watched_too(tmp_path):
    (tmp_path / "hang-rank3.json").write_text(json.dumps({"left by": "an earlier run with more ranks"}))
    os.utime(tmp_path / "hang-rank3.json", (1, 1))
    (report,) = launch(hangs_alone, tmp_path, False, num_processes=1, timeout=480, stream=False)[0]
    (verdict,) = report.verdicts
    assert (verdict.rank, verdict.what, verdict.file) == (0, "elsewhere", HERE)
    with pytest.raises(RankError) as error:
        launch(hangs_alone, tmp_path / "ended", True, num_processes=1, timeout=480, stream=False)
    assert f"exited with code {EXIT_HUNG}" in str(error.value)


def answers_late(folder):
    """Rank 1's watchdog has no core for a while, just as it is to say where its rank is."""
    dist.init_process_group("gloo")
    stacks = Watchdog._stacks

    def late(dog):
        time.sleep(2.5 * ANSWER_SECONDS)
        return stacks(dog)

    if dist.get_rank() == 1:
        Watchdog._stacks = late
    with Watchdog(SECONDS, folder):
        time.sleep(600)


def test_a_rank_that_only_answers_late_is_left_to_report_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "LATE_SECONDS", 40.0)  # however late a busy machine lets it answer
    with pytest.raises(RankError) as error:
        launch(answers_late, tmp_path, num_processes=2, timeout=400, stream=False)
    assert f"rank {error.value.rank} exited with code {EXIT_HUNG}" in str(error.value)
    first, second = read_reports(tmp_path)
    assert (first.rank, second.rank) == (0, 1) and "in answers_late" in second.stacks


def test_no_watchdog_without_seconds(tmp_path):
    with pytest.raises(CourseError, match="more than 0"):
        Watchdog(0, tmp_path)
