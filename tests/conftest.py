"""The environment of every test: offline, on the CPU, and blind to what a developer has cached or launched.

GPU_TESTS=hardware leaves the GPUs in sight: `make gpu` runs tests/gpu so.
"""

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest_plugins = ["tests.cpu_by_room", "tests.ranks", "tests.slices"]
CACHE = tempfile.mkdtemp(prefix="course-tests-")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's `make test &`: all that a test starts would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shell inside a training job, or a developer's own caches, must not change what a test sees.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for name in list(os.environ):
    if name in LAUNCHED or name.startswith("ACCELERATE_") or (name.startswith("HF_") and name.endswith("_CACHE")):
        del os.environ[name]

os.environ.update(
    HF_HOME=CACHE,
    HF_HUB_OFFLINE="1",
    WANDB_MODE="offline",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    COURSE_TRACKER="none",
    COURSE_ANSWERS=os.path.join(CACHE, "my_answers.json"),
    COURSE_RESULTS=os.path.join(CACHE, "my_results.json"),
)
if os.environ.get("GPU_TESTS") != "hardware":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# trio has hypothesis look through all that is imported for who refers to its generator, when hypothesis is imported.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

# torch's store asks the name server for the name of ::ffff:127.0.0.1, eight times in a launch of three ranks. An answer
# that is lost is waited for 5 seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# gloo's receiving thread polls without a pause while another thread of its rank holds the connection (handleEvents in
# gloo/transport/tcp/pair.cc); where a thread that wakes up does not take that one's core, this is short.
if hasattr(os, "sched_setscheduler"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture
def own_accelerator():
    """Forgets Accelerate's state, which holds for a process the precision that a test trained in."""
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without the garbage collector: it looked, half of the time, through what a thousand modules make and keep."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if sys.platform == "linux":
            into_huge_pages()


def into_huge_pages():
    """Asks Linux (6.1) for pages of 2 MiB where memory is the process's own: a fork copies one entry for 512."""
    huge, collapse, madvise = 2**21, 25, ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, mode, _, _, file, *_ = line.split()
        if mode == "rw-p" and file == "0":
            start, end = (int(address, 16) for address in area.split("-"))
            for page in range(-(-start // huge) * huge, end - huge + 1, huge):
                madvise(ctypes.c_void_p(page), ctypes.c_size_t(huge), collapse)


@pytest.fixture
def time_is_over_once(monkeypatch):
    """A function (module, *files): a module's clock stands still until the files are there, however long that takes."""

    def stop(module, *files):
        def monotonic():
            return 1e9 if all(path.exists() for path in files) else 0.0

        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))

    return stop


@pytest.fixture(scope="module", autouse=True)
def freed_memory_goes_back():
    """To the system, as a fork copies the page table of all that malloc keeps: of 1.5 GB three times that of 0.5."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def pytest_unconfigure():
    for child in multiprocessing.active_children():  # of a test that failed; Python would wait for it to end
        child.kill()
    shutil.rmtree(CACHE, ignore_errors=True)
