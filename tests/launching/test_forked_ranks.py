"""Ranks that are forked from a command: what becomes of those that do not end when they are asked to."""

import multiprocessing.context
import os
import signal
import threading
import time

import psutil
import pytest

from course_lib.launching import forked_ranks
from course_lib.launching.forked_ranks import RanksEnded, run_forked


def rank():
    return int(os.environ["RANK"])


def exists(folder, *names):
    """Wait until files are there."""
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)


class Deaf:
    """A rank that notes each SIGTERM and goes on for ever; rank 1 does as it is told to, once both are there."""

    def __init__(self, folder, rank_1):
        self.folder, self.rank_1 = folder, rank_1

    def __call__(self):
        signal.signal(signal.SIGTERM, lambda number, frame: (self.folder / f"asked{rank()}").touch())
        (self.folder / f"pid{rank()}").write_text(str(os.getpid()))
        exists(self.folder, "pid0", "pid1")
        if rank() == 1:
            return self.rank_1(self.folder)
        while True:
            signal.pause()

    def left(self):
        """Ranks that are still there, and those that were asked to end."""
        pids = [int((self.folder / f"pid{number}").read_text()) for number in (0, 1)]
        return [pid for pid in pids if psutil.pid_exists(pid)], [(self.folder / f"asked{n}").exists() for n in (0, 1)]


def fails(folder):
    return 3


def asks_the_launcher(folder):
    """The launcher gets SIGTERM; this rank, told so, saves and ends well."""
    os.kill(os.getppid(), signal.SIGTERM)
    exists(folder, "asked1", "asked0")
    (folder / "saved").touch()
    return 0


def test_a_deaf_rank_is_killed_once_the_others_failure_has_had_its_time(tmp_path, time_is_over_once, monkeypatch):
    monkeypatch.setattr(forked_ranks, "OTHERS_END", 0.1)
    time_is_over_once(forked_ranks, tmp_path / "asked0")
    ranks = Deaf(tmp_path, fails)
    assert run_forked(ranks, 2, threads=None, grace=0.1) == RanksEnded(signal=None, code=3), "the first failure's code"
    assert ranks.left() == ([], [True, False])


def test_a_deaf_rank_is_killed_after_the_grace_of_a_signal(tmp_path, time_is_over_once):
    time_is_over_once(forked_ranks, tmp_path / "saved")
    ranks = Deaf(tmp_path, asks_the_launcher)
    assert run_forked(ranks, 2, threads=None, grace=0.1) == RanksEnded(signal=signal.SIGTERM, code=-signal.SIGKILL)
    assert ranks.left() == ([], [True, True]) and (tmp_path / "saved").exists()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside a thread that takes signals"])
def test_a_signal_amid_the_start_of_a_rank_reaches_it_too(tmp_path, monkeypatch, others):
    """Its process runs, and this one has not been told its number yet."""
    popen = multiprocessing.context.ForkProcess._Popen

    def signalled(process):
        started = popen(process)
        if process.name.endswith("last"):
            exists(tmp_path, "there0", "there1")
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)  # for whichever thread takes it
        return started

    def waits():
        told = []
        signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
        (tmp_path / f"there{rank()}").touch()
        for _ in range(1000):
            if told:
                return 0
            time.sleep(0.01)
        return 5  # nobody has told it

    names = iter(("first", "the last"))
    monkeypatch.setattr(multiprocessing.context.ForkProcess, "_Popen", staticmethod(signalled))
    monkeypatch.setattr(
        multiprocessing.context.ForkContext,
        "Process",
        staticmethod(lambda **options: multiprocessing.context.ForkProcess(name=next(names), **options)),
    )
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    if others:
        thread.start()
    try:
        assert run_forked(waits, 2, threads=None, grace=30) == RanksEnded(signal=signal.SIGUSR1, code=0)
    finally:
        done.set()
        if others:
            thread.join()


def test_who_ends_within_the_grace_is_not_killed(tmp_path):
    def both_save():
        signal.signal(signal.SIGTERM, lambda number, frame: (tmp_path / f"asked{rank()}").touch())
        (tmp_path / f"pid{rank()}").touch()
        exists(tmp_path, "pid0", "pid1")
        return asks_the_launcher(tmp_path) if rank() == 1 else exists(tmp_path, "asked0") or 0

    assert run_forked(both_save, 2, threads=None, grace=50.0) == RanksEnded(signal=signal.SIGTERM, code=0)
