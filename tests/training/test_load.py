"""Many steps, many ranks and many rows leave nothing behind and take no more memory. benchmarks/load.py runs longer."""

import ctypes
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from unittest import mock

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets.arrow_writer import ArrowWriter

from benchmarks import load
from course_lib.data import localfiles
from course_lib.data.ordering import EpochBatches
from course_lib.training.callbacks import FunctionCallback
from tests.long_cases import some

LEAKED_BYTES = 1024
"""Bytes left per step that count as a leak: of tensors, or of what the C library has given out. 10,000 steps: 10 MB."""
LIMITS = dict.fromkeys(["objects", "files", "threads", "processes"], 0.5)
LIMITS |= dict.fromkeys(["bytes", "tensors"], LEAKED_BYTES)

kept: list[object] = []


def leak_threads():
    kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
    kept[-1].start()


def leak_processes():
    kept.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))


LEAKS = {
    "objects": lambda: kept.append([]),  # one that Python's collector tracks, as it does whatever can hold others
    "bytes": lambda: kept.append(bytearray(LEAKED_BYTES * 4)),
    "tensors": lambda: kept.append(torch.zeros(LEAKED_BYTES)),
    "files": lambda: kept.append(open(os.devnull)),  # noqa: SIM115
    "threads": leak_threads,
    "processes": leak_processes,
}


class Given(ctypes.Structure):
    """glibc's mallinfo2: `uordblks` are bytes given out and not freed, `hblkhd` those of them with a mapping each."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def live():
    """Counted, not sampled: Python's objects, bytes of the C library and of tensors, files, threads, processes."""
    gc.collect()
    objects = gc.get_objects()
    count = getattr(ctypes.CDLL(None), "mallinfo2", None)  # only glibc has it
    if count is not None:
        count.restype = Given
    given = count() if count else Given()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in objects
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)
    }
    process = psutil.Process()
    return (
        len(objects),
        given.uordblks + given.hblkhd,
        sum(storages.values()),
        process.num_fds(),
        process.num_threads(),
        len(process.children(recursive=True)),
    )


def leaks(seen, warm_up):
    """What is left behind per step, by kind: the median over the stretches between two looks, all alike.

    A cache that is filled, or a table that is made larger, is in a few stretches; a leak is in each of them.
    """
    later = np.array([each for each in seen if each[0] > warm_up], float)
    per_step = np.diff(later[:, 1:], axis=0) / np.diff(later[:, :1], axis=0)
    return dict(zip(LEAKS, np.median(per_step, axis=0).tolist(), strict=True))


def leaking(kind):
    """What is seen of 24 steps after each of which something is left behind; on one rank, without a model."""
    seen = []
    for step in range(1, 25):
        LEAKS[kind]()
        seen.append((step, *live()))
    for process in [each for each in kept if isinstance(each, subprocess.Popen)]:
        process.kill()
        process.wait()
    return seen


@pytest.mark.parametrize("kind", LEAKS)
def test_each_kind_of_leak_is_noticed(ranks, kind):
    found = leaks(ranks(1, timeout=320)(leaking, kind)[0], 4)
    assert found[kind] > LIMITS[kind], found


OPTIONS = {"eval_steps": 50, "save_steps": 50, "desync_steps": 50, "watchdog": 60, "max_train_samples": 100}
"""Every 50 steps of two ranks are alike: two epochs, an evaluation, a checkpoint, a comparison of the ranks."""


@pytest.fixture
def trained(tmp_path, ranks):
    """A function (number of ranks, steps, callbacks) that trains, and gives what each rank saw of what was live."""

    def train(number, steps, more=()):
        options = OPTIONS | {"model": load.smallest_model(tmp_path / "model"), "batch_size": 4 // number}
        return ranks(number, timeout=2320)(load.train, str(tmp_path / "run"), steps, 50, options, live, more)

    return train


@pytest.mark.long
def test_many_steps_on_two_ranks_leave_nothing_behind(trained):
    """With evaluations, checkpoints, epochs and comparisons of the ranks among them."""
    for seen in trained(2, 1000):
        found = leaks(seen, 300)
        assert {kind: found[kind] for kind in LEAKS if found[kind] > LIMITS[kind]} == {}


def test_one_object_per_step_left_behind_by_a_callback_is_noticed(trained):
    """The same training, so the counts of what does not leak are quiet enough to see it."""
    (seen,) = trained(1, 500, [FunctionCallback(lambda trainer: LEAKS["objects"]())])
    assert 0.9 < leaks(seen, 200)["objects"] < 1.5


def test_eight_ranks_start_and_finish_wherever_they_run(tmp_path, ranks):
    options = {"eval_steps": 0, "save_steps": 0, "batch_size": 1}
    every = ranks(8, timeout=720)(load.train, str(tmp_path / "run"), 3, 1, options)
    assert [len(seen) for seen in every] == [3] * 8


# --- rows ---


def peak_of(folder, by_hand=False):
    """The most bytes at once of a pass over a data set, of Python's and NumPy's and of Arrow's objects, MiB.

    By hand: of a list of its texts, and one of its tokens. Counted where they are asked for, whatever allocators keep.
    """
    tracemalloc.start()
    if by_hand:
        texts = pa.parquet.read_table(folder / "train.parquet")["text"].to_pylist()
        tokens = [text.split() for text in texts]  # noqa: F841 (held)
    else:
        load.stream(folder, "classification", 50)
    return (tracemalloc.get_traced_memory()[1] + pa.default_memory_pool().max_memory()) / load.MIB


@pytest.mark.long
def test_four_times_the_rows_take_no_more_memory(tmp_path, ranks):
    measured = ranks(
        1, timeout=880, start_method="spawn"
    )  # a forked process would begin with this one's peak of Arrow's
    peaks = {}
    for rows in (20_000, 80_000):
        load.write_rows(tmp_path / str(rows), rows)
        for by_hand in (False, True):
            (peaks[rows, by_hand],) = measured(peak_of, tmp_path / str(rows), by_hand)
    assert peaks[80_000, True] - peaks[20_000, True] > 40, "MiB more for lists of the texts and their words"
    assert peaks[80_000, False] - peaks[20_000, False] < 10, peaks


ALL, LITTLE = 80 * load.MIB, 60 * load.MIB


def read_slowly(file, cache, by_datasets=False):
    """The most bytes that Arrow held while a Parquet file was written to a disk slower than the one it is read from.

    Each write waits: for a reader that goes on to have read as much as it will, for one that does not a moment.
    """
    write, before, most = ArrowWriter.write_table, pa.total_allocated_bytes(), [0]

    def slow(self, *args, **kwargs):
        end = time.monotonic() + (60 if by_datasets else 0.02)
        while most[0] < ALL and time.monotonic() < end:
            time.sleep(0.01)
            most[0] = max(most[0], pa.total_allocated_bytes() - before)
        return write(self, *args, **kwargs)

    with (
        mock.patch.object(ArrowWriter, "write_table", slow),
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache),
    ):
        rows = datasets.Dataset.from_parquet(str(file)) if by_datasets else localfiles.read_split([file])
    assert len(rows) == 10_000 and rows[-1]["text"].endswith("the last")
    return most[0]


@pytest.mark.parametrize("group", some([200, 10_000], 10_000), ids=["small-row-groups", "one-row-group"])
def test_a_large_file_is_not_read_ahead_of_what_is_written(tmp_path, ranks, group):
    file = tmp_path / "train.parquet"
    with pq.ParquetWriter(file, pa.schema({"text": pa.string()})) as out:
        rows = [os.urandom(5000).hex() for _ in range(9_999)] + ["the last"]
        for start in range(0, len(rows), group):
            out.write_table(pa.table({"text": rows[start : start + group]}))
    datasets_own, ours = [
        ranks(1, timeout=400)(read_slowly, file, tmp_path / str(by_datasets), by_datasets)[0]
        for by_datasets in (True, False)
    ]
    assert datasets_own >= ALL > LITTLE > ours, f"of a file of {file.stat().st_size >> 20} MiB"


def test_an_epoch_of_a_part_at_a_time_has_each_row_once_and_pads_little():
    lengths = np.random.default_rng(0).integers(1, 60, 10_007)
    parts = EpochBatches(lengths, 8, [1, 0], part=1024)
    on_disk = EpochBatches(pa.chunked_array([lengths[:5000], lengths[5000:]]), 8, [1, 0], part=1024)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(10_007))
    assert all(np.array_equal(a, b) for a, b in zip(parts, on_disk, strict=True)), "the same however it is stored"
    in_order = list(parts)
    assert all(np.array_equal(parts[i], in_order[i]) for i in (1250, 3, 700, -1)), "also out of order, as on a resume"
    assert sum(map(len, parts.here[1])) <= 1024, "a part at a time"
    first_part = np.concatenate([parts[i] for i in range(128)])
    assert np.histogram(first_part, 4, (0, 10_007))[0].min() > 100, "each part is drawn from all over"
    ungrouped = EpochBatches(lengths, 8, [1, 0], group_by_length=False, part=1024)
    padded = [sum(max(lengths[batch]) - lengths[batch].mean() for batch in each) for each in (parts, ungrouped)]
    assert padded[0] < padded[1] / 3, "and sorted by length within windows"
