"""Supervisor of ranks: reads their pipes, finds the first cause of a failure, and ends them all."""

import contextlib
import os
import pickle
import selectors
import signal
import struct
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from course_lib.errors import EXIT_HUNG, CourseError
from course_lib.launching.output import LabelledOutput
from course_lib.launching.own_time import OwnTime
from course_lib.launching.rank_process import (
    STACK_SIGNAL,
    Failure,
    RankEnds,
    Returned,
    Started,
    call_launched,
    run_rank,
)

GRACE_SECONDS = 0.5  # after a failure, for the others' to arrive: the first cause is the earliest
DEATH_GRACE_SECONDS = 2.5  # after a death without a word, for the others' watchdogs to say what they saw
OF_A_WATCHDOG = f"exited with code {EXIT_HUNG} before the function returned"
ASKED_TO_END = f"was killed by {signal.SIGTERM.name}"  # what becomes of the others once one has died
STACK_SECONDS = 2.0  # for the ranks to write their stacks
EXIT_SECONDS = 60.0  # for the ranks to end, once all have returned
REST_SECONDS = 5.0  # for the rest of what ranks have printed, once they have ended
LOOK_SECONDS = 0.25  # between two looks at how long the ranks waited for a core
_OURS = tuple(f" in {function.__name__}" for function in (call_launched, run_rank))


class RankError(RuntimeError):
    """A rank raised or died; printed with that rank's traceback or, if it left none, its last lines not shown yet.

    Attributes:
        rank: the first to fail.
        cause: its exception, or None where it died or its exception cannot be pickled.
        consequences: what the other ranks reported after it, by rank.
    """

    def __init__(self, rank: int, failure: Failure, consequences: dict[int, str]):
        self.rank, self.failure, self.consequences = rank, failure, consequences
        self.cause: BaseException | None = pickle.loads(failure.cause) if failure.cause else None
        others = "".join(f"\n(then rank {other} {said})" for other, said in sorted(consequences.items()))
        super().__init__(f"rank {rank} {failure.summary}\n{failure.traceback.rstrip()}{others}".rstrip())


class RanksHung(TimeoutError):
    """The ranks did not finish in time; printed with the Python stacks of those that were still running.

    Attributes:
        stacks: stacks of all threads, by rank.
    """

    def __init__(self, timeout: float, stacks: dict[int, str]):
        self.stacks = stacks
        text = "".join(f"\n\n--- rank {rank} was here ---\n{stack.rstrip()}" for rank, stack in sorted(stacks.items()))
        were = "1 rank was" if len(stacks) == 1 else f"{len(stacks)} ranks were"
        ended = "has been ended" if len(stacks) == 1 else "have been ended"
        super().__init__(
            f"{were} still running after {timeout:g} s and {ended}\nIf slow rather than stuck, give more "
            f"time: launch(…, timeout={2 * timeout:g}){text}"
        )


class RankSupervisor:
    """Reads the ranks' pipes until all have ended, and ends them when one fails or the time is over.

    Attributes:
        processes: of the ranks, as far as they have been started.
    """

    def __init__(self, own: list[RankEnds], timeout: float, shown: LabelledOutput):
        self.own, self.shown = own, shown
        self.processes: list[BaseProcess] = []
        self.clock, self.limit = OwnTime(), timeout  # all limits are in the ranks' own time
        self.buffers = [bytearray() for _ in own]
        self.stacks: dict[int, bytearray] = {}
        self.pids: dict[int, int] = {}
        self.outcomes: dict[int, Returned | Failure] = {}
        self.grace: float | None = None  # when, by that clock, the ranks are ended after a failure
        self.noticed_at = 0.0  # what is read now
        self.running = set(range(len(own)))
        self.returned = self.hung = self.ended = False
        self.selector = selectors.DefaultSelector()

    def watch(self) -> None:
        """Read and decide until every rank has ended, by itself or from here."""
        for rank, ends in enumerate(self.own):
            for kind, end in zip(RankEnds._fields, ends, strict=True):
                self.selector.register(end, selectors.EVENT_READ, (rank, kind))
        while self.running:
            next_limit = self.limit if self.grace is None else min(self.limit, self.grace)
            self._look(min(LOOK_SECONDS, max(0.0, next_limit - self.clock.seconds)))
            self._decide()
        self.kill()  # what a rank left running
        until = time.monotonic() + REST_SECONDS
        while self.selector.get_map() and time.monotonic() < until:
            self._look(LOOK_SECONDS)
        self.shown.finish()

    def _look(self, seconds: float) -> None:
        """Read what there is, or comes in so many seconds."""
        ready = self.selector.select(seconds)
        self.noticed_at = time.monotonic()
        self.clock.look(self.pids.values())
        for key, _ in ready:
            self._read(*key.data)

    def _read(self, rank: int, kind: str) -> None:
        """Take what a pipe holds; at its end, notice a rank that died without a word."""
        end: Connection = getattr(self.own[rank], kind)
        try:
            data = os.read(end.fileno(), 65536)
        except OSError:
            data = b""
        if not data:
            self.selector.unregister(end)
            if kind == "control":
                self.running.remove(rank)
                if rank not in self.outcomes and not self.ended:
                    self._take_death(rank)
        elif kind == "output":
            self.shown.feed(rank, data)
        elif kind == "stacks":
            self.stacks.setdefault(rank, bytearray()).extend(data)
        else:
            buffer = self.buffers[rank]
            buffer += data
            while len(buffer) >= 8 and len(buffer) >= 8 + (size := struct.unpack("!Q", buffer[:8])[0]):
                message = pickle.loads(bytes(buffer[8 : 8 + size]))
                del buffer[: 8 + size]
                self._take(rank, message)

    def _take_death(self, rank: int) -> None:
        """Notice a rank that ended without a word, and ask the others to end."""
        self.processes[rank].join()
        code = self.processes[rank].exitcode or 0
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code} before the function returned"
        )
        if self.grace is not None and how == ASKED_TO_END:
            return
        self._take(rank, Failure(how, self.noticed_at, consequence=False))
        for other in self.running:
            self.processes[other].terminate()

    def _take(self, rank: int, message: Started | Returned | Failure) -> None:
        if isinstance(message, Started):
            self.pids[rank] = message.pid
            if len(self.pids) == len(self.own):
                self._tell_all()
            return
        self.outcomes[rank] = message
        if isinstance(message, Failure) and self.grace is None:
            self.grace = self.clock.seconds + (GRACE_SECONDS if message.traceback else DEATH_GRACE_SECONDS)
        if len(self.outcomes) == len(self.own):
            if self.grace is None:
                if not self.hung:
                    self.returned, self.limit = True, self.clock.seconds + EXIT_SECONDS
                self._tell_all()
            else:
                self.grace = self.clock.seconds

    def _decide(self) -> None:
        """End the ranks where a failure has had its grace, or the time is over."""
        if self.grace is not None and self.clock.seconds >= self.grace:
            self.kill()
            self.grace = None if not self.pids else float("inf")
        elif self.clock.seconds >= self.limit:
            self.hung, self.limit = not self.returned, float("inf")
            self._collect_stacks()
            self.kill()

    def _collect_stacks(self) -> None:
        """Ask every rank that has not reported, or has and does not end, for its stacks, and read them."""
        there = {key.data for key in self.selector.get_map().values()}
        waiting = [
            rank for rank in self.pids if (rank, "stacks") in there and (self.returned or rank not in self.outcomes)
        ]
        for rank in waiting:
            self.stacks[rank] = bytearray()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], STACK_SIGNAL)
        end = self.clock.seconds + STACK_SECONDS
        while self.clock.seconds < end and not all(self.stacks[rank] for rank in waiting):
            self._look(0.1)
        time.sleep(0.1)  # the rest of a stack that has begun
        self._look(0)

    def _tell_all(self) -> None:
        """Send each rank the byte that it waits for."""
        for ends in self.own:
            with contextlib.suppress(OSError):
                os.write(ends.control.fileno(), b"\0")

    def kill(self) -> None:
        """End every rank with the processes that it started: each leads a session of its own once it has started."""
        self.ended = True
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for rank, process in enumerate(self.processes):
            if rank not in self.pids:  # it has not started, and leads none yet
                process.kill()

    def end(self) -> None:
        """Called when the launcher is done, for better or worse: end what is left, and clear up."""
        self.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.selector.close()
        close(self.own)

    def results(self, timeout: float) -> list[Any]:
        """The return values, or the error that tells what happened first."""
        failures = {rank: o for rank, o in self.outcomes.items() if isinstance(o, Failure)}
        if self.hung:
            absent = {rank: "nowhere yet: it had not started" for rank in range(len(self.own)) if rank not in self.pids}
            stacks = {rank: _own_frames(stack) for rank, stack in self.stacks.items()}
            raise RanksHung(timeout, stacks | absent)
        if failures:
            # A watchdog ends its rank because of another one, which may take a moment longer to die.
            rank = min(
                failures, key=lambda r: (failures[r].consequence, failures[r].summary == OF_A_WATCHDOG, failures[r].at)
            )
            said = {other: failure.summary for other, failure in failures.items() if other != rank}
            error = RankError(rank, self._with_last_lines(rank, failures[rank]), said)
            if isinstance(error.cause, CourseError):
                raise error.cause
            raise error from error.cause
        for rank, stack in self.stacks.items():
            warnings.warn(
                f"rank {rank} returned, did not end within {EXIT_SECONDS:g} s of that, and was ended here; "
                f"it was at\n{_own_frames(stack, ending=True)}",
                RuntimeWarning,
                stacklevel=3,
            )
        return [pickle.loads(self.outcomes[rank].value) for rank in range(len(self.own))]  # type: ignore[union-attr]

    def _with_last_lines(self, rank: int, failure: Failure) -> Failure:
        """The failure, with the last lines of a rank that left no traceback and whose output was not shown."""
        lines = self.shown.dropped[rank]
        if failure.traceback or not lines:
            return failure
        return replace(failure, traceback="\n".join(["its last lines:", *lines]))


def close(ends: Iterable[RankEnds]) -> None:
    """Close pipes of ranks."""
    for of_rank in ends:
        for end in of_rank:
            end.close()


def _own_frames(stack: bytearray, ending: bool = False) -> str:
    """A stack as faulthandler writes it, less the frames below the function that was launched or, at the rank's end,
    below what ends it."""
    threads = []
    for thread in stack.decode(errors="replace").split("\n\n"):
        lines = thread.splitlines()
        below = next((i for i, line in enumerate(lines) if line.endswith(_OURS)), len(lines))
        threads.append("\n".join(lines[: below + ending]))
    return "\n\n".join(threads)
