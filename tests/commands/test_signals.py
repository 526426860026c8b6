"""SIGTERM, SIGUSR1 and Ctrl-C: all ranks save the same step, an exit code says so, and twice means now."""

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from accelerate.commands import launch as launch_module
from torch.distributed.elastic.multiprocessing.api import SignalException

from course_lib.commands.relaunch import relaunch
from course_lib.config import build
from course_lib.errors import EXIT_INTERRUPTED, EXIT_RESUME, TrainingInterrupted
from course_lib.launching.forks import end_openmp_threads
from course_lib.launching.interrupts import NOTE, StopRequest, end_with_launcher, exit_code, leave_note
from course_lib.launching.launch import launch
from course_lib.launching.launch_environment import free_port
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import build_trainer
from testing.virtual_hosts import torchrun

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


def test_the_ranks_codes_are_those_of_the_wish():
    asked = {number: StopRequest() for number in (None, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number, request in asked.items():
        request.signal = number
    votes = {number: request.vote for number, request in asked.items()}
    assert exit_code(7 * votes[None]) == 0
    assert exit_code(1000 * votes[signal.SIGINT]) == EXIT_INTERRUPTED == 130
    assert exit_code(votes[signal.SIGTERM]) == exit_code(votes[signal.SIGUSR1] + 3 * votes[signal.SIGINT]) == 75


def config(folder, **more):
    return build({"model": "tiny-bert", "max_train_samples": 60, "max_eval_samples": 8, "max_length": 32,
                  "batch_size": 4, "max_steps": 50, "num_epochs": 100_000, "eval_steps": 0, "save_steps": 0,
                  "logging_steps": 1, "keep_best": False, "progress_bar": False, "device": "cpu",
                  "output_dir": str(folder)} | more)


class Signalled(Callback):
    """Sends this rank a signal after some step; what happens then is told by rank."""

    def __init__(self, number, rank, at):
        self.number, self.rank, self.at = number, rank, at

    def on_step_end(self, trainer):
        if (trainer.rank, trainer.state.step) == (self.rank, self.at):
            signal.raise_signal(self.number)


def interrupted(folder, cases):
    """What each rank raises, and the checkpoint that stands then, by signal."""
    ends = {}
    for number, rank in cases:
        (folder / str(number)).mkdir(exist_ok=True)
        trainer = build_trainer(config(folder / str(number), num_workers=1), [Signalled(number, rank, at=3)])[0]
        with pytest.raises(TrainingInterrupted) as raised:
            trainer.train()
        ends[number] = raised.value.exit_code, trainer.state.step, checkpoint.latest(trainer.output_dir).name
    return ends


def test_one_rank_is_asked_and_all_save_the_same_step(tmp_path):
    cases = [(signal.SIGTERM, 1), (signal.SIGUSR1, 0), (signal.SIGINT, 1)]
    first, second = launch(interrupted, tmp_path, cases, num_processes=2, timeout=150)
    assert first == second, "the rank that was not asked does as the other"
    assert first == {number: (code, 4, checkpoint.name(4)) for number, code in
                     ((signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130))}
    notes = {number: (tmp_path / str(number) / NOTE).exists() for number, _ in cases}
    assert notes == {signal.SIGTERM: True, signal.SIGUSR1: True, signal.SIGINT: False}
    assert json.loads((tmp_path / str(signal.SIGTERM) / NOTE).read_text()) == {"step": 4}


RANK = """
import ctypes, os, time
os.environ["RANK"] = "0"
from course_lib.launching import interrupts
interrupts.PATIENCE, interrupts.SAME_WISH = 0.2, {same}

def hang():
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex), lock(mutex)  # for ever, in C: as in a collective, no handler of Python's is run

def work(rest):
    while not request:
        time.sleep(0.01)
    time.sleep(rest)  # of the step

with interrupts.stop_requests() as request:
    print("ready", flush=True)
    {does}
print("granted", int(request.signal), flush=True)
"""


TWICE = {  # what the rank does, seconds within which it is the same wish and to the second signal, that signal, code
    "forwarded twice": ("work(5)", 60, 0.05, signal.SIGUSR1, 0),
    "forwarded as another": ("work(5)", 60, 0.05, signal.SIGTERM, 0),
    "a second wish": ("work(60)", 0.05, 2, signal.SIGINT, -signal.SIGINT),
    "a second wish in a collective": ("hang()", 0.05, 2, signal.SIGTERM, 128 + signal.SIGTERM),
}
"""Seconds far apart, so that a machine that is busy for a second or two turns none of them into another."""


def twice(does, same, apart, second):
    """What a rank prints and ends with."""
    process = subprocess.Popen([sys.executable, "-c", RANK.format(does=does, same=same)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    time.sleep(apart)
    assert process.poll() is None, "once means after the step"
    process.send_signal(second)
    return process.communicate(timeout=60)[0], process.returncode


def test_twice_means_now():
    with ThreadPoolExecutor(len(TWICE)) as side_by_side:
        outcomes = dict(zip(TWICE, side_by_side.map(lambda case: twice(*case[:4]), TWICE.values()), strict=True))
    granted = f"granted {signal.SIGUSR1:d}\n"
    assert outcomes == {name: ("" if code else granted, code) for name, (*_, code) in TWICE.items()}


@pytest.mark.parametrize(("number", "saved", "code"), [
    (signal.SIGUSR1, True, EXIT_RESUME), (signal.SIGTERM, True, EXIT_RESUME), (signal.SIGTERM, False, 143),
    (signal.SIGINT, False, EXIT_INTERRUPTED)])
def test_the_launcher_passes_the_signals_on_and_ends_with_the_ranks_code(tmp_path, monkeypatch, number, saved, code):
    def launched(_):
        assert "SIGUSR1" in os.environ["PET_SIGNALS_TO_HANDLE"].split(",")
        if saved:
            leave_note(tmp_path, 3)
        raise SignalException("", signal.Signals(number))

    monkeypatch.setattr(launch_module, "launch_command", launched)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert relaunch(2, ["train"], use_cpu=True, output_dir=tmp_path) == code


def train_for_ever(folder):
    """What the command line does in a rank."""
    end_with_launcher()
    torch.set_num_threads(1)
    try:
        build_trainer(config(folder, max_steps=100_000), [])[0].train()
    except TrainingInterrupted as error:
        os._exit(error.exit_code)


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path):
    (tmp_path / "run").mkdir()
    end_openmp_threads()
    launcher = multiprocessing.get_context("fork").Process(
        target=functools.partial(torchrun, nodes=(1, 1), ranks=2, endpoint=f"127.0.0.1:{free_port()}", is_head=True),
        args=(train_for_ever, tmp_path / "run"))
    launcher.start()
    lines, end = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    try:
        while not lines.exists() or len(lines.read_text().splitlines()) < 3:
            assert launcher.is_alive() and time.monotonic() < end
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.kill()
    gone, left = psutil.wait_procs(ranks, timeout=60)
    for rank in left:
        rank.kill()
    assert len(gone) == 2
    step = json.loads((tmp_path / "run" / NOTE).read_text())["step"]
    assert checkpoint.latest(tmp_path / "run").name == checkpoint.name(step)
