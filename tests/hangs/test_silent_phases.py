"""Two hundred phases in which one rank is silent for good reasons, and the other waits: nobody is accused."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from course_lib.hangs.watchdog import Watchdog, read_reports
from course_lib.launching.launch import launch

SECONDS, PHASES, LAUNCHES = 2.0, 8, 25
KINDS = ("download", "upload", "compile", "evaluation", "saving", "debugger", "suspended")


class Server:
    """A child that sends, or takes, as fast as it is told, over TCP; whose process is no rank's."""

    def __init__(self, rate):
        listening = socket.create_server(("127.0.0.1", 0))
        self.address, self.rate = listening.getsockname(), rate
        self.child = os.fork()
        if self.child == 0:
            connection, _ = listening.accept()
            with contextlib.suppress(OSError):
                if connection.recv(1) == b"d":
                    while True:
                        connection.sendall(bytes(int(rate / 20)))
                        time.sleep(0.05)
                while connection.recv(1 << 16):
                    pass
            os._exit(0)
        listening.close()

    def __enter__(self):
        self.connection = socket.create_connection(self.address)
        return self

    def __exit__(self, *_):
        self.connection.close()
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)


def download(seconds, rate, folder):
    with Server(rate) as server:
        server.connection.send(b"d")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            server.connection.recv(1 << 20)


def upload(seconds, rate, folder):
    with Server(rate) as server:
        server.connection.send(b"u")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            server.connection.sendall(bytes(int(rate / 20)))
            time.sleep(0.05)


def compile_(seconds, rate, folder):
    """By another process, as a compiler is one."""
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-c", code], check=True)


def evaluation(seconds, rate, folder):
    until, x = time.monotonic() + seconds, torch.ones(64, 64)
    while time.monotonic() < until:
        x = torch.tanh(x @ x)


def saving(seconds, rate, folder):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.save(torch.ones(1 << 18), folder / "model.pt")
        time.sleep(0.05)


def debugger(seconds, rate, folder):
    stand = {"__name__": "pdb"}
    exec(compile("import time\ndef interaction(seconds): time.sleep(seconds)", "pdb.py", "exec"), stand)
    stand["interaction"](seconds)


def suspended(seconds, rate, folder):
    """All ranks, as by Ctrl-Z or a laptop that sleeps; a process in a session of its own wakes them."""
    pids = [path.name.removeprefix("pid") for path in folder.glob("pid*")]
    code = f"kill -STOP {' '.join(pids)}; sleep {seconds}; kill -CONT {' '.join(pids)}"
    subprocess.run(["sh", "-c", code], start_new_session=True, check=True)


DO = {each.__name__.strip("_"): each for each in (compile_, download, upload, evaluation, saving, debugger, suspended)}


def phases(seed, folder):
    """Some of one launch: a rank is silent for two to four times the watchdog's seconds, the other in a barrier."""
    pick = random.Random(seed)
    dist.init_process_group("gloo")
    (folder / f"pid{os.getpid()}").touch()
    with Watchdog(SECONDS, folder / "hang", ends=False):
        for number in range(PHASES):
            kind = KINDS[(seed * PHASES + number) % len(KINDS)]
            silent, seconds, rate = pick.randrange(2), pick.uniform(2, 4) * SECONDS, 10 ** pick.uniform(5.0, 6.7)
            dist.all_reduce(torch.ones(4))
            if dist.get_rank() == silent:
                DO[kind](seconds, rate, folder)
            dist.barrier()
            if (folder / "hang").exists():
                accused = [verdict.sentence for report in read_reports(folder / "hang") for verdict in report.verdicts]
                return kind, rate, accused
    return None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(LAUNCHES))
def test_nobody_is_accused(seed, tmp_path):
    assert launch(phases, seed, tmp_path, num_processes=2, device="cpu", timeout=600, stream=False) == [None, None]
