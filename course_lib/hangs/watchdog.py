"""A rank that hangs, says why, and ends: the watchdog.

A thread of each rank looks ten times a second. Progress is a collective issued or ended, a beat, or work: a main
thread that evaluates, compiles or saves for minutes without a collective keeps this process, its children or the disk
busy, where one that hangs leaves all three alone. Once the rank that all wait for has made none for long enough, or a
rank has died, every rank that can still answer writes the same report (:mod:`~course_lib.hangs.report`), with
the ranks to blame (:mod:`~course_lib.hangs.diagnosis`), and ends itself.

On GPUs it is the only one to say why. gloo raises an error on the ranks that were talking to one that dies, which
ends the watchdog's ``with``. NCCL raises nothing: within a machine its kernels wait for ever; where a socket to
another machine is lost, its own watchdog ends the process, which no Python code outlives (SIGABRT;
TORCH_NCCL_ASYNC_ERROR_HANDLING is 3 by default, tear down without clean-up). By default our report comes first:
ProcessGroupNCCL.cpp, Watchdog::runLoop, notes the error within a tenth of a second, and aborts only after 4 x
TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC = 60 s, which are for records to be written; ranks that are told of it by another
one wait for TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC = 480 s (HeartbeatMonitor::runLoop). A collective that takes longer than
its group's time-out, 10 minutes, ends in the same way. So our thread asks NCCL at each look whether it has noted an
error, and reports at once; who sets the first of these times to less than the few seconds that this takes may lose
the report. TORCH_NCCL_BLOCKING_WAIT, which lets waits raise, changes nothing here.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.errors import EXIT_HUNG, CourseError
from course_lib.hangs.backend_records import backend_error, backend_records
from course_lib.hangs.diagnosis import BUSY_FACTOR, Culprit, diagnose, is_hang
from course_lib.hangs.flight_recorder import FlightRecorder
from course_lib.hangs.liveness import Activity
from course_lib.hangs.rank_state import FAILED, LEFT, RUNNING, Flags, RankSnapshot
from course_lib.hangs.rank_state_exchange import RankStateExchange
from course_lib.hangs.report import HangReport, ReportedRank, read_reports
from course_lib.hangs.sigterm_delay import SigtermDelay
from course_lib.launching.rank_process import is_consequence

__all__ = ["Culprit", "HangReport", "ReportedRank", "Watchdog", "read_reports"]

LOOK_SECONDS = 0.1
JUDGE_SECONDS = 0.5  # between two looks at all ranks, while this one makes no progress
MEASURE_SECONDS = 1.0  # between two looks at how busy the process is, while it issues no collective
GAP_SECONDS = 2.0  # between two looks, or half the watchdog's: it was stopped or had no core, and those don't count
ANSWER_SECONDS = 1.0  # for the other ranks to write their stacks, and again for their reports
LATE_SECONDS = 5.0  # for those of this machine that have not: they may only have had no core; not after a death
HELD_BACK_SECONDS = 3.0  # before a rank ends after another's exception, which is for the launcher to see first


class Watchdog:
    """Watches this rank and the others while its ``with`` is open; every rank has to enter it.

    ```python
    with Watchdog(300, "runs/hang") as dog:
        for step, batch in enumerate(loader):
            train(batch)
            dog.beat(step)
    ```

    Args:
        seconds: without progress until the ranks report and end.
        folder: where ``hang-rank{R}.txt`` and ``.json`` are written.
        ends: end this process with EXIT_HUNG once the report stands, and ranks of this machine that are stopped; else
            the report is all, and no second one follows.
        holds_sigterm: a launcher ends the other ranks as soon as one has died; hold its SIGTERM back until the report
            stands. For callers that handle the signal themselves: False.
    Raises:
        CourseError: ``seconds`` is not positive.
    """

    _entered = 0

    def __init__(self, seconds: float, folder: str | Path, ends: bool = True, holds_sigterm: bool = True):
        if not seconds > 0:
            raise CourseError(f"the watchdog's seconds are {seconds:g}", "give it more than 0")
        self.seconds, self.folder, self.ends = seconds, Path(folder).absolute(), ends
        self._beats = 0
        self._leaving, self._lost_peer, self._reported = threading.Event(), threading.Event(), threading.Event()
        self._state, self._declared = RUNNING, False
        self._error: BaseException | None = None  # that ended the block
        self._error_of_backend: str | None = None
        self._sigterm_delay, self._holds_sigterm = SigtermDelay(), holds_sigterm

    def __enter__(self) -> "Watchdog":
        Watchdog._entered += 1  # alike on every rank
        if dist.is_initialized():
            rank, world_size = dist.get_rank(), dist.get_world_size()
            store: dist.Store = dist.distributed_c10d._get_default_store()
        else:
            rank, world_size, store = 0, 1, dist.HashStore()
        self.rank = rank
        self._exchange = RankStateExchange(rank, world_size, store, f"course/watchdog/{Watchdog._entered}")
        self._recorder = FlightRecorder(self._exchange.record)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._activity, self._entered_at = (
            Activity((self._thread, self._exchange.thread), self._exchange.peers),
            time.time(),
        )
        self._looked = self._measured = self._progressed = self._moved = time.monotonic()
        self._mark: tuple[int, int] = (0, 0)
        self._position = 0
        self._look()
        self._recorder.start()
        if self._holds_sigterm:
            self._sigterm_delay.start()
        self._exchange.open()
        self._thread.start()
        return self

    def beat(self, step: int) -> None:
        """Say that a step is done."""
        self._recorder.step = step
        self._exchange.record.fields.steps = step + 1
        self._beats += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        if error is not None and is_consequence(error):
            self._lost_peer.set()  # the thread finds out whom, and reports
            while self._thread.is_alive() and not self._reported.wait(LOOK_SECONDS):
                pass
        self._leaving.set()
        self._thread.join()
        if error is None:
            self._state = LEFT
        elif not self._declared:
            self._state = FAILED
            file, line = self._place()
            self._say(error=f"{type(error).__name__}: {error}".splitlines()[0] + f" at {file}:{line}")
        self._write_flags()
        self._exchange.close()
        self._recorder.stop()
        self._sigterm_delay.stop()

    # The thread.

    def _watch(self) -> None:
        deadline, judged_at = float("inf"), 0.0
        while not self._leaving.wait(LOOK_SECONDS):
            if self._sigterm_delay.seconds() > ANSWER_SECONDS:  # nobody has died: it was meant for this rank
                os._exit(128 + signal.SIGTERM)
            if self._declared:
                continue
            self._look()
            now = time.monotonic()
            if self._error_of_backend is None and torch.cuda.is_initialized():
                self._error_of_backend = backend_error()
            if (self._lost_peer.is_set() or self._error_of_backend) and deadline == float("inf"):
                deadline = now + self._exchange.notice_seconds()
            is_hanging = now > deadline or self._exchange.is_alarming()
            if not is_hanging and now - self._progressed >= self.seconds and now - judged_at > JUDGE_SECONDS:
                judged_at, is_hanging = now, is_hang(self._exchange.snapshots(), self.rank, self.seconds)
            if is_hanging:
                self._report()

    def _look(self) -> None:
        """Find out whether this rank makes progress, and note where it is."""
        now = time.monotonic()
        if now - self._looked > min(GAP_SECONDS, self.seconds / 2):
            self._progressed += now - self._looked
            self._moved += now - self._looked
        # What NCCL gives up after an error would pass for ended.
        ended, mark = not self._error_of_backend and self._recorder.look(), (self._recorder.serial, self._beats)
        if ended or mark != self._mark:
            self._progressed = self._moved = now
            self._exchange.record.fields.spins = False
        elif now - max(self._moved, self._measured) > min(MEASURE_SECONDS, self.seconds / 10):
            self._look_at_work(now)
        self._looked, self._mark = now, mark
        self._say()
        fields = self._exchange.record.fields
        fields.looked_at, fields.progressed_at, fields.placed_at = now, self._progressed, now

    def _look_at_work(self, now: float) -> None:
        """Count what is no collective as progress, too: work, for as long as that may take."""
        position = self._recorder.position()
        # In CUDA's hands a thread spins, whether the GPU works or waits for another (cudaDeviceScheduleAuto).
        stands = torch.cuda.is_initialized() and position == self._position
        is_busy, is_first = self._activity.is_busy(stands), self._measured < self._moved
        self._exchange.record.fields.spins = stands and self._activity.main_spins
        is_in_time = now - self._moved < BUSY_FACTOR * self.seconds
        works = is_busy and is_in_time and not is_first and not self._recorder.is_waiting
        if works or self._recorder.is_debugged():  # whoever looks at a rank may take their time
            self._progressed = now
        self._position, self._measured = position, now

    def _place(self) -> tuple[str | None, int | None]:
        """File and line of the user's code that the main thread is in, or was in when it lost a peer."""
        return self._recorder.place_of(self._error.__traceback__) if self._error else self._recorder.place()

    def _stacks(self) -> str:
        if self._error is None:
            return self._recorder.stacks()
        return "the main thread was here:\n" + "".join(traceback.format_exception(self._error))

    def _say(self, **words: Any) -> None:
        file, line = self._place()
        self._exchange.record.write_words({"file": file, "line": line, **words})

    def _write_flags(self, reported: bool = False) -> None:
        self._exchange.record.fields.flags = Flags(self._state, self._declared, reported)

    def _report(self) -> None:
        """Report, together with all ranks that answer, and end."""
        self._declared = True
        self._say(stacks=self._stacks(), dead=self._exchange.dead())
        self._write_flags()
        snapshots = self._wait_for(lambda peer: "stacks" in peer.words, ANSWER_SECONDS)
        answering = [peer.rank for peer in snapshots if peer.life == "running" and "stacks" in peer.words]
        stacks = "\n".join(
            f"--- rank {peer.rank} ---\n{peer.words.get('stacks') or f'none: it is {peer.life}'}" for peer in snapshots
        )
        report = HangReport(
            self.rank,
            snapshots[self.rank].stalled,
            diagnose(snapshots),
            tuple(map(ReportedRank.of, snapshots)),
            stacks,
            self._error_of_backend,
        )
        line = f"watchdog: {report.summary}. The ranks' reports: {self.folder}/hang-rank*.txt\n"
        try:
            self._remove_old_reports()
            report.write(self.folder, snapshots)
            if records := backend_records():  # to read NCCL's asks its events, which have been seen to hang
                report.write(self.folder, snapshots, records)
        except OSError as error:  # such as a full disk, which may be why they hang
            line = f"watchdog: {report.summary}. No report in {self.folder}: {error.strerror}\n"
        self._write_flags(reported=True)
        if self.rank == min(answering):
            below_a_bar = "\n" if os.isatty(2) else ""
            os.write(2, (below_a_bar + line).encode())
        if self.ends:
            self._end(answering, snapshots)
        self._reported.set()

    def _wait_for(self, has_answered: Callable[[RankSnapshot], bool], seconds: float) -> list[RankSnapshot]:
        """The snapshots once every rank that runs has answered, or has had the time for it."""
        until = time.monotonic() + seconds
        while True:
            snapshots = self._exchange.snapshots()
            if all(has_answered(peer) for peer in snapshots if peer.life == "running") or time.monotonic() > until:
                return snapshots
            time.sleep(LOOK_SECONDS / 4)

    def _remove_old_reports(self) -> None:
        """Those of an earlier hang, which may have had more ranks."""
        for path in self.folder.glob("hang-rank*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < self._entered_at - 1:
                    path.unlink()

    def _end(self, answering: list[int], snapshots: list[RankSnapshot]) -> None:
        """End this process at once, and what could not end itself: its children, and ranks that cannot answer."""
        self._wait_for(lambda peer: peer.reported or peer.rank not in answering, ANSWER_SECONDS)
        if any(peer.life == "failed" or "error" in peer.words for peer in snapshots):
            time.sleep(HELD_BACK_SECONDS)
        seconds = ANSWER_SECONDS if any(peer.life == "dead" for peer in snapshots) else LATE_SECONDS
        for peer in self._wait_for(lambda peer: peer.declared or not self._exchange.is_local(peer.rank), seconds):
            is_lost = peer.life == "stopped" or (peer.life == "running" and not peer.declared)
            if is_lost and self._exchange.is_local(peer.rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(peer.pid, signal.SIGKILL)
        for child in multiprocessing.active_children():
            child.kill()
        flush = threading.Thread(target=sys.stdout.flush, daemon=True)  # the main thread may hold its lock
        flush.start()
        flush.join(ANSWER_SECONDS / 2)
        os._exit(EXIT_HUNG)
