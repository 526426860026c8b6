"""What `course train --watchdog` leaves when a rank stops or dies: one line, the reports, and no process."""

import os
import signal
import subprocess

import psutil
import pytest

from course_lib.errors import EXIT_HUNG
from course_lib.hangs.watchdog import read_reports
from tests.commands.conftest import QUICK, command
from tests.waiting import has_lines, until


def ranks_of(process):
    """The training processes that a launcher started, by rank: it forks them in that order."""
    started = psutil.Process(process.pid).children()
    return dict(enumerate(sorted(started, key=lambda rank: (rank.create_time(), rank.pid))))


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fault", "what", "seconds"),
    [(signal.SIGSTOP, "is stopped", 2), pytest.param(signal.SIGKILL, "is gone", 3600, marks=pytest.mark.long)],
)
def test_one_line_names_the_rank_and_all_end(tmp_path, fault, what, seconds):
    options = f"--max_steps 100000 --save_steps 0 --eval_steps 0 --num_processes 2 --watchdog {seconds} --num_workers 1"
    line = command("train", *QUICK, *options.split(), "--desync_check", "off", "--output_dir", tmp_path)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    shared = set(os.listdir("/dev/shm"))
    until(has_lines(tmp_path / "metrics.jsonl", 3), process, what="three steps")
    ranks, below = ranks_of(process), psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 2
    ranks[1].send_signal(fault)
    _, left = psutil.wait_procs(ranks.values(), timeout=600)
    assert not left, "a stopped rank is ended, and a death is seen before the watchdog's hour is over"
    _, err = process.communicate()
    (line,) = [line for line in err.splitlines() if line.startswith("watchdog: ")]
    assert f"rank 1 {what}" in line and " #" in line and str(tmp_path / "hang") in line, err
    assert process.returncode == EXIT_HUNG and "Traceback" not in err
    until(lambda: not any(map(is_alive, below)), what="a dead rank's worker looks for its parent every 5 seconds")
    theirs = {str(child.pid) for child in below}  # other tests use that folder, too
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if theirs & set(name.split("_"))]
    (report,) = read_reports(tmp_path / "hang")
    assert report.rank == 0 and [verdict.rank for verdict in report.verdicts] == [1]
    assert report.states[1].file and report.verdicts[0].file and report.verdicts[0].line
