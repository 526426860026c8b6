"""The one way to wait ends with what it waits for, with a process, or when nothing moves; never by the wall's clock."""

import itertools
import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from course_lib.launching import own_time
from tests import waiting
from tests.waiting import has_lines, until


def started(code):
    return subprocess.Popen([sys.executable, "-S", "-c", code])


def test_it_gives_what_the_condition_gave(tmp_path):
    file = tmp_path / "lines"
    process = started(
        f"import time\nwith open({str(file)!r}, 'w') as out:\n print(1, file=out)\n"
        " print(2, file=out, flush=True)\n time.sleep(600)"
    )
    assert until(has_lines(file, 2), process)
    process.kill()
    process.wait()
    assert until(lambda: "there", process) == "there", "what stands already needs nobody"


def test_a_process_that_ends_before_is_a_failure_at_once_and_its_last_act_counts(tmp_path):
    process = started("pass")
    with pytest.raises(AssertionError, match="ended before the file\nits log"):
        until((tmp_path / "file").exists, process, what="the file", told=lambda: "its log")
    process = multiprocessing.get_context("fork").Process(target=(tmp_path / "file").touch)
    process.start()
    assert until((tmp_path / "file").exists, process)


def test_who_stands_still_fails_and_who_computes_does_not(monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE", 0.2)
    asleep = started("import time; time.sleep(600)")
    with pytest.raises(AssertionError, match="nothing moved"):
        until(lambda: False, asleep)
    asleep.kill()
    busy, looks = started("while True: pass"), iter(range(1000))
    monkeypatch.setattr(waiting, "cpu_seconds", lambda process: float(next(looks)))
    assert until(lambda: next(looks) > 60, busy, what="thirty looks, more than its patience")
    busy.kill()


@pytest.fixture
def seconds_of(monkeypatch):
    """A function: what a clock says at each second, of one process with these accounts, on two cores."""

    def seconds(*accounts):
        now, seen = itertools.count(), iter(accounts)
        monkeypatch.setattr(own_time, "usable_cores", lambda: 2)
        monkeypatch.setattr(own_time, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
        monkeypatch.setattr(own_time, "queued_and_used", lambda pid: next(seen))
        clock = own_time.OwnTime()
        return [pytest.approx(clock.look([1])) for _ in accounts]

    return seconds


def test_time_in_which_a_process_waits_for_a_core_is_left_out(seconds_of):
    assert seconds_of((7.0, 9.0), (7.9, 9.0), (7.9, 9.0), (8.9, 9.0)) == [1.0, 1.1, 2.1, 2.1]
    assert seconds_of((7.0, 9.0), (7.0, 9.0), (9.0, 9.0), (9.0, 9.0), (9.0, 9.0)) == [1.0, 2.0, 2.0, 2.0, 3.0], (
        "the kernel tells of a wait when it is over"
    )
    assert seconds_of(None, None) == [1.0, 2.0], "where nobody can tell"


def test_what_they_use_of_all_cores_counts_so_that_who_fills_the_queue_gains_nothing(seconds_of):
    assert seconds_of((7.0, 9.0), (8.0, 11.0), (9.0, 13.0)) == [1.0, 1.0, 2.0]


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel keeps no account of waiting")
def test_a_process_that_gets_no_core_has_hardly_any_time_of_its_own():
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, [{core}])\n"
    rivals = [started(f"{pinned}while True: pass") for _ in range(5)]
    process = started(f"{pinned}while True: pass")
    clock, begun = own_time.OwnTime(), own_time.queued_and_used(process.pid)[0]
    try:
        while own_time.queued_and_used(process.pid)[0] < begun + 2.0:  # two seconds and more on the wall
            clock.look([process.pid])
            time.sleep(0.05)
        clock.look([process.pid])
    finally:
        for each in [*rivals, process]:
            each.kill()
            each.wait()
    assert clock.seconds < 1.0
