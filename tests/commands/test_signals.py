"""SIGTERM, SIGUSR1 and Ctrl-C: all ranks save the same step, an exit code says so, and twice means now."""

import argparse
import ctypes
import functools
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate.commands import launch as launch_module
from torch.distributed.elastic.multiprocessing.api import SignalException

from course_lib.commands import relaunch
from course_lib.config import build
from course_lib.errors import EXIT_INTERRUPTED, EXIT_RESUME, TrainingInterrupted
from course_lib.launching import forks, interrupts, openmp
from course_lib.launching.cores import usable_cores
from course_lib.launching.forked_ranks import SIGNALS
from course_lib.launching.interrupts import NOTE, StopRequest, end_with_launcher, exit_code, leave_note, stop_requests
from course_lib.training.callbacks import Callback
from course_lib.training.checkpoints import checkpoint
from course_lib.training.run import build_trainer
from testing.virtual_hosts import torchrun
from tests.forked_process import Forked
from tests.waiting import has_lines, until


def vote(*wishes):
    request = StopRequest()
    for number in wishes:
        request.ask(number)
    return request.vote


def test_the_ranks_codes_are_those_of_the_wish():
    assert exit_code(7 * vote()) == 0 and exit_code(1000 * vote(signal.SIGINT)) == EXIT_INTERRUPTED == 130
    assert exit_code(vote(signal.SIGTERM)) == exit_code(vote(signal.SIGUSR1) + 3 * vote(signal.SIGINT)) == 75


def config(folder, **more):
    sizes = {"model": "tiny-bert", "max_train_samples": 60, "max_eval_samples": 8, "max_length": 32, "batch_size": 4}
    steps = {"max_steps": 50, "num_epochs": 100_000, "eval_steps": 0, "save_steps": 0, "logging_steps": 1}
    rest = {"keep_best": False, "progress_bar": False, "device": "cpu", "output_dir": str(folder)}
    return build(sizes | steps | rest | more)


class Signalled(Callback):
    """Sends one rank a signal after step 3."""

    def __init__(self, number, rank):
        self.number, self.rank = number, rank

    def on_step_end(self, trainer):
        if (trainer.rank, trainer.state.step) == (self.rank, 3):
            signal.raise_signal(self.number)


def interrupted(folder, number, rank):
    """The exit code and the step with which a rank ends when one rank was asked to stop after step 3."""
    trainer = build_trainer(config(folder, num_workers=1), [Signalled(number, rank)])[0]
    with pytest.raises(TrainingInterrupted) as raised:
        trainer.train()
    return raised.value.exit_code, trainer.state.step


@pytest.mark.parametrize(
    ("number", "rank", "code", "note"),
    [(signal.SIGTERM, 1, 75, '{"step": 4}'), (signal.SIGUSR1, 0, 75, '{"step": 4}'), (signal.SIGINT, 1, 130, None)],
)
def test_one_rank_is_asked_and_all_save_the_same_step(tmp_path, ranks, number, rank, code, note):
    assert ranks(2, timeout=600)(interrupted, tmp_path, number, rank) == [(code, 4)] * 2
    assert checkpoint.latest(tmp_path).name == checkpoint.name(4)
    assert ((tmp_path / NOTE).read_text().strip() if (tmp_path / NOTE).exists() else None) == note


def rank_that_is_asked_twice(does, folder):
    """A rank whose clock stands still until a file is there, and which tells in files how far it is."""
    os.environ["RANK"] = "0"
    select, signals_read = interrupts.select.select, itertools.count()

    def waits_for_signals(*arguments):  # its thread, which has noticed all that came before
        (folder / f"noticed-{next(signals_read)}").touch()
        return select(*arguments)

    interrupts.time = SimpleNamespace(monotonic=lambda: 1000.0 + 60.0 * (folder / "later").exists())
    interrupts.select = SimpleNamespace(select=waits_for_signals)
    interrupts.PATIENCE = 0.2

    def hang():
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex), lock(mutex)  # for ever, in C: as in a collective, no handler of Python's is run

    def work():
        while not request:
            time.sleep(0.01)
        (folder / "asked").touch()
        while not (folder / "noticed-2").exists():  # the second signal, which the handler has had before
            time.sleep(0.01)

    with stop_requests() as request:
        (folder / "ready").touch()
        {"hangs": hang, "works": work}[does]()
    if interrupts.LAUNCHER_DIED:
        signal.raise_signal(interrupts.LAUNCHER_DIED)  # its last thread may die when the rank has stopped
    return int(request.signal)


LAUNCHER_DIES = (interrupts.LAUNCHER_DIED, True, interrupts.LAUNCHER_DIED)
ON_LINUX = pytest.mark.skipif(interrupts.LAUNCHER_DIED is None, reason="there is no such signal")


@pytest.mark.parametrize(
    ("first", "later", "second", "does", "code"),
    [
        (signal.SIGUSR1, False, signal.SIGUSR1, "works", int(signal.SIGUSR1)),  # forwarded twice
        (signal.SIGUSR1, False, signal.SIGTERM, "works", int(signal.SIGUSR1)),  # forwarded as another
        (signal.SIGUSR1, True, signal.SIGINT, "works", 1),
        (signal.SIGUSR1, True, signal.SIGTERM, "hangs", 128 + signal.SIGTERM),  # in a collective
        pytest.param(*LAUNCHER_DIES, "works", int(signal.SIGTERM), marks=ON_LINUX),
    ],
)
def test_a_second_wish_a_minute_later_means_now(tmp_path, first, later, second, does, code):
    """The kernel tells of the end of each of a launcher's threads: on a busy machine at any distance, and one wish."""
    process = Forked(functools.partial(rank_that_is_asked_twice, does, tmp_path), os.environ)
    until((tmp_path / "ready").exists, process)
    process.send_signal(first)
    until((tmp_path / "noticed-1").exists, process)
    if does == "works":
        until((tmp_path / "asked").exists, process)
    if later:
        (tmp_path / "later").touch()
    process.send_signal(second)
    assert process.wait() == code


@pytest.mark.parametrize(
    ("number", "saved", "code"),
    [(signal.SIGUSR1, True, EXIT_RESUME), (signal.SIGTERM, False, 143), (signal.SIGINT, False, EXIT_INTERRUPTED)],
)
def test_the_launcher_passes_the_signals_on_and_ends_with_the_ranks_code(
    tmp_path, monkeypatch, capsys, number, saved, code
):
    def launched(arguments):
        assert "SIGUSR1" in os.environ["PET_SIGNALS_TO_HANDLE"].split(",")
        assert arguments.training_script_args == ["train"]
        if saved:
            leave_note(tmp_path, 3)
        raise SignalException("", signal.Signals(number))

    # As on GPUs, where ranks are not forked.
    monkeypatch.setattr(forks, "why_not_fork", lambda device: "a GPU was used")
    monkeypatch.setattr(launch_module, "launch_command", launched)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(relaunch, "usable_cores", lambda: 1)
    args = argparse.Namespace(argv=["train"], main=None)
    assert relaunch.relaunch(2, args, config(tmp_path), output_dir=tmp_path) == code
    assert "warning: 2 ranks share 1 core" in capsys.readouterr().err


def rank_to_signal(arguments):
    """A rank that says that it is there, and what it is told; or one that ends or fails of itself."""
    folder, does = arguments
    rank = os.environ["RANK"]
    if does == "raises" and rank == "1":
        raise RuntimeError("a defect")
    if does == "fails" and rank == "1":
        return 3
    told = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: told.append(number))
    (folder / f"ready-{rank}").write_text(f"{os.getpid()} {torch.get_num_threads()} {os.environ['WORLD_SIZE']}")
    while not told and does != "ends":
        time.sleep(0.01)
    (folder / f"told-{rank}").write_text(str(told))
    return 0


def launched_apart(folder, does):
    """A launcher of two such ranks in a process of its own, which ends with the code of the command."""

    def launch_them():
        with open(folder / "stderr", "w") as said:
            os.dup2(said.fileno(), 2)
        sys.excepthook = lambda *error: print("told:", error[1], file=sys.__stderr__, flush=True)
        os.environ.pop("OMP_NUM_THREADS", None)
        args = argparse.Namespace(argv=(folder, does), main=rank_to_signal)
        os._exit(relaunch.relaunch(2, args, config(folder), output_dir=folder))

    openmp.end_threads()
    launcher = multiprocessing.get_context("fork").Process(target=launch_them)
    launcher.start()
    return launcher


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_the_forked_ranks_are_told_each_signal_once(tmp_path, number):
    launcher, files = launched_apart(tmp_path, "waits"), [tmp_path / f"ready-{rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files), launcher, what="both ranks are there")
    ranks = [[int(word) for word in file.read_text().split()] for file in files]
    assert len({os.getsid(pid) for pid, *_ in ranks} - {os.getsid(0)}) == 2, "Ctrl-C in a terminal is the launcher's"
    assert [rank[1:] for rank in ranks] == [[max(1, usable_cores() // 2), 2]] * 2
    os.kill(launcher.pid, number)
    launcher.join(240)
    assert launcher.exitcode == (EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == [f"[{int(number)}]"] * 2


@pytest.mark.parametrize(
    ("does", "code", "told"), [("ends", 0, ""), ("fails", 3, ""), ("raises", 1, "told: a defect\n")]
)
def test_a_forked_ranks_own_end_is_the_commands(tmp_path, does, code, told):
    launcher = launched_apart(tmp_path, does)
    launcher.join(240)
    said = (tmp_path / "stderr").read_text()
    assert launcher.exitcode == code and told in said and "Traceback" not in said


def train_for_ever(folder):
    """What the command line does in a rank."""
    end_with_launcher()
    torch.set_num_threads(1)
    try:
        build_trainer(config(folder, max_steps=100_000), [])[0].train()
    except TrainingInterrupted as error:
        os._exit(error.exit_code)


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path, endpoint):
    (tmp_path / "run").mkdir()
    openmp.end_threads()
    launcher = multiprocessing.get_context("fork").Process(
        target=functools.partial(torchrun, nodes=(1, 1), ranks=2, endpoint=endpoint, is_head=True),
        args=(train_for_ever, tmp_path / "run"),
    )
    launcher.start()
    try:
        until(has_lines(tmp_path / "run" / "metrics.jsonl", 3), launcher, what="three steps")
        ranks = psutil.Process(launcher.pid).children(recursive=True)
    finally:
        launcher.kill()
    gone, left = psutil.wait_procs(ranks, timeout=240)
    for rank in left:
        rank.kill()
    assert len(gone) == 2
    step = json.loads((tmp_path / "run" / NOTE).read_text())["step"]
    assert checkpoint.latest(tmp_path / "run").name == checkpoint.name(step)
