"""Many steps, many ranks and many rows leave nothing behind and take no more memory. benchmarks/load.py runs longer."""

import itertools
import os
import subprocess
import sys
import threading
import time
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.arrow_writer import ArrowWriter

from benchmarks import load
from course_lib.data import localfiles
from course_lib.data.ordering import EpochBatches
from course_lib.launching.launch import launch

pytestmark = pytest.mark.slow

MEMORY, COUNT = 4096, 0.004
"""What a step may leave behind: bytes, and files, threads or processes. Ten thousand steps at that are 40 MB and 40."""

kept: list[object] = []


def leak_memory():
    kept.append(bytearray(os.urandom(64)) * 2**17)  # 8 MiB: what the tests before have freed is used up first


def leak_files():
    kept.append(open(os.devnull))  # noqa: SIM115


def leak_threads():
    kept.append(threading.Thread(target=threading.Event().wait, daemon=True))
    kept[-1].start()


def leak_processes():
    kept.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))


LEAKS = {"memory": leak_memory, "files": leak_files, "threads": leak_threads, "processes": leak_processes}


def leaking(kind):
    """What is seen of 24 steps after each of which something is left behind; on one rank, without a model."""
    seen = []
    for step in range(1, 25):
        LEAKS[kind]()
        seen.append((step, *load.held()))
    for process in [each for each in kept if isinstance(each, subprocess.Popen)]:
        process.kill()
        process.wait()
    return seen


@pytest.mark.timeout(60)
def test_each_kind_of_leak_is_noticed():
    for kind in LEAKS:
        found = load.slopes(launch(leaking, kind, num_processes=1, timeout=50)[0], 4)
        assert found.memory > 10 * MEMORY if kind == "memory" else getattr(found, kind) > 0.9, (kind, found)
    assert len(LEAKS) == 4


@pytest.mark.timeout(900)
def test_many_steps_on_two_ranks_leave_nothing_behind(tmp_path):
    """With evaluations, checkpoints, epochs and comparisons of the ranks among them."""
    options = {"model": load.smallest_model(tmp_path / "model"), "eval_steps": 200, "save_steps": 200,
               "desync_steps": 50, "watchdog": 60, "max_train_samples": 400}
    every = launch(load.train, str(tmp_path / "run"), 1500, 20, options, num_processes=2, timeout=880, stream=False)
    for rank, seen in enumerate(every):
        found = load.slopes(seen, 500)
        assert len(seen) == 75 and found.memory < MEMORY, (rank, found, seen)
        assert max(found.files, found.threads, found.processes) < COUNT, (rank, found)


@pytest.mark.timeout(200)
def test_eight_ranks_start_and_finish_wherever_they_run(tmp_path):
    every = launch(load.train, str(tmp_path / "run"), 3, 1, {"eval_steps": 0, "save_steps": 0, "batch_size": 1},
                   num_processes=8, timeout=180, stream=False)
    assert [len(seen) for seen in every] == [3] * 8


# --- rows ---


def peak_of(folder, by_hand=False):
    """The peak of memory of a pass over a data set, MiB; by hand: of a list of its texts, and one of its tokens."""
    if not by_hand:
        return max(load.stream(folder, "classification", 50).values())
    with load.Peak() as peak:
        texts = pa.parquet.read_table(folder / "train.parquet")["text"].to_pylist()
        tokens = [text.split() for text in texts]
        peak.mark("all")
    assert len(tokens) == len(texts)
    return peak.found["all"]


@pytest.mark.timeout(280)
def test_four_times_the_rows_take_no_more_memory(tmp_path, monkeypatch):
    for name, value in load.AT_ONCE.items():  # the usual allocators keep, by chance, up to 30 MiB
        monkeypatch.setenv(name, value)
    few, many = 40_000, 160_000
    peaks = {}
    for rows in (few, many):
        load.write_rows(tmp_path / str(rows), rows)
        for by_hand in (False, True):  # a process that is forked would keep this one's allocators
            peaks[rows, by_hand] = launch(peak_of, tmp_path / str(rows), by_hand, num_processes=1, timeout=130,
                                          start_method="spawn", stream=False)[0]
    listed = peaks[many, True] - peaks[few, True]
    assert listed > 60, "MiB more for lists of the texts and their words"
    assert peaks[many, False] - peaks[few, False] < 10, peaks


def read_slowly(file, cache, by_datasets=False):
    """The peak of memory of reading a Parquet file to a disk slower than the one that it is read from, MiB."""
    write = ArrowWriter.write_table

    def slow(self, *args, **kwargs):
        time.sleep(0.02)
        return write(self, *args, **kwargs)

    with mock.patch.object(ArrowWriter, "write_table", slow), load.Peak() as peak, \
            mock.patch.object(datasets.config, "HF_DATASETS_CACHE", cache):
        rows = datasets.Dataset.from_parquet(str(file)) if by_datasets else localfiles.read_split([file])
        peak.mark("read")
    assert len(rows) == 10_000 and rows[-1]["text"].endswith("the last")
    return peak.found["read"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group", [200, 10_000], ids=["small-row-groups", "one-row-group"])
def test_a_large_file_is_not_read_ahead_of_what_is_written(tmp_path, group):
    file = tmp_path / "train.parquet"
    with pq.ParquetWriter(file, pa.schema({"text": pa.string()})) as out:
        rows = [os.urandom(5000).hex() for _ in range(9_999)] + ["the last"]
        for start in range(0, len(rows), group):
            out.write_table(pa.table({"text": rows[start:start + group]}))
    peaks = [launch(read_slowly, file, tmp_path / str(by_datasets), by_datasets, num_processes=1, timeout=100,
                    stream=False)[0] for by_datasets in (True, False)]
    assert peaks[0] > 80 > 60 > peaks[1], f"{peaks} MiB of a file of {file.stat().st_size >> 20}"


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
    padded = [sum(lengths[batch].max() - lengths[batch].mean() for batch in batches)
              for batches in (parts, EpochBatches(lengths, 8, [1, 0], group_by_length=False, part=1024))]
    assert padded[0] < padded[1] / 3, "and sorted by length within windows"
