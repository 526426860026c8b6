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
from course_lib.launching.launch import launch
from course_lib.training.callbacks import FunctionCallback
from tests.long_cases import some

LEAK = 0.5
"""Objects, files, threads or processes left per step that count as a leak."""
LEAKED_BYTES = 1024
"""Bytes left per step that count as one: of tensors, or of what the C library has given out. 10,000 steps: 10 MB."""

kept: list[object] = []


def leak_an_object():
    kept.append([])  # one that Python's collector tracks, as it does whatever can hold others


def leak_memory():
    kept.append(bytearray(LEAKED_BYTES * 4))


def leak_a_tensor():
    kept.append(torch.zeros(LEAKED_BYTES))


def leak_files():
    kept.append(open(os.devnull))  # noqa: SIM115


def leak_threads():
    kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
    kept[-1].start()


def leak_processes():
    kept.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))


LEAKS = {
    "objects": leak_an_object,
    "bytes": leak_memory,
    "tensors": leak_a_tensor,
    "files": leak_files,
    "threads": leak_threads,
    "processes": leak_processes,
}


class Given(ctypes.Structure):
    """glibc's mallinfo2: `uordblks` are bytes given out and not freed, `hblkhd` those of them with a mapping each."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


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


def limits():
    return {kind: LEAKED_BYTES if kind in ("bytes", "tensors") else LEAK for kind in LEAKS}


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
def test_each_kind_of_leak_is_noticed(kind):
    found = leaks(launch(leaking, kind, num_processes=1, timeout=320)[0], 4)
    assert found[kind] > limits()[kind], found


OPTIONS = {"eval_steps": 50, "save_steps": 50, "desync_steps": 50, "watchdog": 60, "max_train_samples": 100}
"""Every 50 steps of two ranks are alike: two epochs, an evaluation, a checkpoint, a comparison of the ranks."""


def trained(folder, ranks, steps, more=()):
    options = OPTIONS | {"model": load.smallest_model(folder / "model"), "batch_size": 4 // ranks}
    return launch(
        load.train, str(folder / "run"), steps, 50, options, live, more, num_processes=ranks, timeout=2320, stream=False
    )


@pytest.mark.long
def test_many_steps_on_two_ranks_leave_nothing_behind(tmp_path):
    """With evaluations, checkpoints, epochs and comparisons of the ranks among them."""
    for rank, seen in enumerate(trained(tmp_path, 2, 1000)):
        found = leaks(seen, 300)
        assert len(seen) == 20 and {kind for kind in LEAKS if found[kind] > limits()[kind]} == set(), (rank, found)


def test_one_object_per_step_left_behind_by_a_callback_is_noticed(tmp_path):
    """The same training, so the counts of what does not leak are quiet enough to see it."""
    (seen,) = trained(tmp_path, 1, 500, [FunctionCallback(lambda trainer: leak_an_object())])
    assert 0.9 < leaks(seen, 200)["objects"] < 1.5


def test_eight_ranks_start_and_finish_wherever_they_run(tmp_path):
    every = launch(
        load.train,
        str(tmp_path / "run"),
        3,
        1,
        {"eval_steps": 0, "save_steps": 0, "batch_size": 1},
        num_processes=8,
        timeout=720,
        stream=False,
    )
    assert [len(seen) for seen in every] == [3] * 8


# --- rows ---


def peak_of(folder, by_hand=False):
    """The most bytes at once of a pass over a data set, of Python's and NumPy's and of Arrow's objects, MiB.

    By hand: of a list of its texts, and one of its tokens. Counted where they are asked for, so whatever the allocators
    keep, and whatever else the machine does, is not in it.
    """
    tracemalloc.start()
    if by_hand:
        texts = pa.parquet.read_table(folder / "train.parquet")["text"].to_pylist()
        tokens = [text.split() for text in texts]
        assert len(tokens) == len(texts)
    else:
        load.stream(folder, "classification", 50)
    return (tracemalloc.get_traced_memory()[1] + pa.default_memory_pool().max_memory()) / load.MIB


@pytest.mark.long
def test_four_times_the_rows_take_no_more_memory(tmp_path):
    few, many = 20_000, 80_000
    peaks = {}
    for rows in (few, many):
        load.write_rows(tmp_path / str(rows), rows)
        for by_hand in (False, True):  # a process that is forked would begin with this one's peak of Arrow's
            peaks[rows, by_hand] = launch(
                peak_of, tmp_path / str(rows), by_hand, num_processes=1, timeout=880, start_method="spawn", stream=False
            )[0]
    listed = peaks[many, True] - peaks[few, True]
    assert listed > 40, "MiB more for lists of the texts and their words"
    assert peaks[many, False] - peaks[few, False] < 10, peaks


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
def test_a_large_file_is_not_read_ahead_of_what_is_written(tmp_path, group):
    file = tmp_path / "train.parquet"
    with pq.ParquetWriter(file, pa.schema({"text": pa.string()})) as out:
        rows = [os.urandom(5000).hex() for _ in range(9_999)] + ["the last"]
        for start in range(0, len(rows), group):
            out.write_table(pa.table({"text": rows[start : start + group]}))
    datasets_own, ours = [
        launch(read_slowly, file, tmp_path / str(by_datasets), by_datasets, num_processes=1, timeout=400, stream=False)[
            0
        ]
        for by_datasets in (True, False)
    ]
    assert datasets_own >= ALL > LITTLE > ours, f"of a file of {file.stat().st_size >> 20} MiB"


def test_an_epoch_of_any_number_of_rows_has_each_row_once():
    lengths = np.random.default_rng(0).integers(1, 60, 10_007)
    whole = EpochBatches(lengths, 8, [1, 0])
    parts = EpochBatches(lengths, 8, [1, 0], part=1024)
    on_disk = EpochBatches(pa.chunked_array([lengths[:5000], lengths[5000:]]), 8, [1, 0], part=1024)
    for batches in (whole, parts, on_disk):
        assert len(batches) == 1251 and sorted(len(batch) for batch in batches)[:2] == [7, 8]
        assert sorted(itertools.chain.from_iterable(batches)) == list(range(10_007))
    assert all(np.array_equal(a, b) for a, b in zip(parts, on_disk, strict=True)), "the same however it is stored"
    other = EpochBatches(lengths, 8, [1, 1], part=1024)
    assert sum(np.array_equal(a, b) for a, b in zip(parts, other, strict=True)) < 5, "another epoch, another order"
    in_order = list(parts)
    assert all(np.array_equal(parts[i], in_order[i]) for i in (1250, 3, 700, -1)), "also out of order, as on a resume"
    held = parts.here[1]
    assert sum(map(len, held)) <= 1024, "a part at a time"
    first_part = np.concatenate([parts[i] for i in range(128)])
    assert np.histogram(first_part, 4, (0, 10_007))[0].min() > 100, "each part is drawn from all over"
    padded = [
        sum(lengths[batch].max() - lengths[batch].mean() for batch in batches)
        for batches in (parts, EpochBatches(lengths, 8, [1, 0], group_by_length=False, part=1024))
    ]
    assert padded[0] < padded[1] / 3, "and sorted by length within windows"
