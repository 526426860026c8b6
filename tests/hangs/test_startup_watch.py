"""Who has not come to the process group, told from the notes that ranks leave; notes of earlier jobs say nothing."""

import dataclasses
import json
import os
import socket
import time

import pytest

from course_lib.hangs import startup_watch
from course_lib.hangs.liveness import machine, start_ticks
from course_lib.hangs.startup_watch import OWNER, Note, StartupWatch, begin

SECONDS = 10.0


def note(idle=60.0, arrived=False, pid=None, at=None):
    pid = pid or os.getpid()
    started = start_ticks(pid) if pid == os.getpid() else 1
    return Note(pid, started, socket.gethostname(), machine(), at or time.time(), arrived, idle, "train.py", 7, "stack")


COME = note(arrived=True)


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """Of one of three ranks, which has waited for so many seconds; notes of the others by rank."""
    monkeypatch.setenv("MASTER_PORT", "1234")

    def made(waited, own=0, **notes):
        watch = StartupWatch(SECONDS, tmp_path, own, 3)
        watch._arrived_at = time.time() - waited
        watch.notes.mkdir(exist_ok=True)
        for rank, left in notes.items():
            (watch.notes / f"{rank}.json").write_text(json.dumps(dataclasses.asdict(left)))
        return watch._missing()

    return made


def test_who_does_nothing_is_missing_once_the_time_is_over(watch):
    idle = note(idle=SECONDS)
    assert watch(SECONDS - 1, rank1=idle, rank2=COME) == {}
    assert set(watch(SECONDS + 1, rank1=idle, rank2=COME)) == {1}


def test_who_works_has_ten_times_as_long(watch):
    works = note(idle=SECONDS - 1)
    assert watch(SECONDS + 1, rank1=works, rank2=COME) == {}
    assert set(watch(10 * SECONDS + 1, rank1=works, rank2=COME)) == {1}


def test_who_left_no_note_may_be_on_a_machine_with_its_own_folder(watch):
    assert watch(SECONDS + 1, rank1=COME) == {}
    assert watch(10 * SECONDS + 1, rank1=COME) == {2: None}
    assert set(watch(SECONDS + 1, rank1=note(idle=SECONDS))) == {1}, "of rank 2 nothing is known"


def test_who_has_ended_is_told_unless_it_was_of_an_earlier_job(watch):
    dead = note(pid=2**22 - 1)
    assert set(watch(SECONDS + 1, rank1=dataclasses.replace(dead, at=time.time() + 1), rank2=COME)) == {1}
    assert watch(SECONDS + 1, rank1=dataclasses.replace(dead, at=1.0), rank2=COME) == {}
    assert "has ended; it was last seen at train.py:7" in startup_watch._how(dead)
    assert "no process has said" in startup_watch._how(None)


def test_the_first_of_those_that_wait_says_so(watch):
    assert watch(2 * SECONDS, own=2, rank0=COME, rank1=note()) == {}


def test_a_child_of_a_rank_is_no_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(OWNER, "1")
    watch = begin({"seconds": SECONDS, "folder": str(tmp_path)})
    assert watch.rank is None and watch._thread is None


def test_nothing_is_left_of_a_start_that_went_well(tmp_path, monkeypatch):
    monkeypatch.setattr(startup_watch, "NOTE_SECONDS", 0.01)
    watch = StartupWatch(SECONDS, tmp_path / "reports", 0, 1)
    watch.begin()
    while not watch._own_note().exists():
        time.sleep(0.01)
    left = Note(**json.loads(watch._own_note().read_text()))
    assert left.pid == os.getpid() and left.file.endswith("test_startup_watch.py") and not left.arrived
    watch.end()
    assert not list(tmp_path.iterdir())
