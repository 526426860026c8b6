"""A rank that is killed while it fetches a batch: its worker process ends without a word."""

import signal
import subprocess
import sys

import pytest

from tests.long_cases import some

PROGRAM = """
import os, sys
from multiprocessing import connection
import torch, datasets
from course_lib.data import batching
from torch.utils.data._utils import worker

worker.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds between a worker's looks for its rank; 5 otherwise
rows = datasets.Dataset.from_dict({"length": [2] * 64, "input_ids": [[1, 2]] * 64})

def collator(rows):
    return torch.tensor([row["input_ids"] for row in rows])

def killed(*_):
    os.kill(os.getpid(), 9)

def challenged(conn, key):
    conn.recv_bytes()
    os.kill(os.getpid(), 9)

if sys.argv[1] == "training":
    loader = batching.training_loader(rows, batching.GlobalBatchSampler(rows["length"], 4), collator, 1)
else:
    loader = batching.evaluation_loader(rows, 4, collator, 0, 1)
if sys.argv[2] == "without":
    loader.worker_init_fn = None
batches = iter(loader)
assert next(batches).shape == (4, 2)
connection.answer_challenge = {"at once": killed, "in the middle": challenged}[sys.argv[3]]
next(batches)
"""


def stderr_of(*arguments):
    """What the rank and its worker wrote until both had ended: the worker holds the pipe, too."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=240)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stderr


@pytest.mark.parametrize("loader", some(["training", "evaluation"], "training"))
@pytest.mark.parametrize("moment", some(["at once", "in the middle"], "at once"))
def test_its_worker_says_nothing(loader, moment):
    assert "resource_sharer" in stderr_of(loader, "without", moment)
    assert stderr_of(loader, "with", moment) == ""
