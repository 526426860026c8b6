"""The order of the data: the seed and the epoch decide it, the number of processes does not."""

import itertools
import os
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pytest

from course_lib.data import batching
from course_lib.data.batching import GlobalBatchSampler, RowKey, Rows, SequentialKeys, training_loader
from course_lib.data.ordering import EpochBatches

LENGTHS = np.random.default_rng(0).integers(4, 60, size=203)
LAYOUTS = [(1, 16, 1), (2, 8, 1), (4, 4, 1), (1, 4, 4), (2, 4, 2), (4, 1, 4)]  # processes, rows, accumulation


def sampler(processes=1, rows=16, accumulation=1, **options):
    return GlobalBatchSampler(LENGTHS, rows, processes, accumulation, **{"seed": 7} | options)


def rows_of_steps(batches, epoch=0, first_step=0):
    """Rows of each global batch, put together from the micro-batches as the processes would get them."""
    batches.start_at(epoch, first_step)
    micro = list(batches)
    per_step = batches.num_processes * batches.accumulation
    assert len(micro) == len(batches) and len(micro) % per_step == 0
    steps = [sum(micro[i : i + per_step], []) for i in range(0, len(micro), per_step)]
    return [sorted(key.row for key in step if not key.is_filler) for step in steps]


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_global_batches_are_the_same_for_any_layout(layout, grouped):
    one, many = sampler(*LAYOUTS[0], group_by_length=grouped), sampler(*layout, group_by_length=grouped)
    for epoch in (0, 1):
        assert rows_of_steps(one, epoch) == rows_of_steps(many, epoch)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_row_once_an_epoch(layout, grouped):
    batches = sampler(*layout, group_by_length=grouped)
    assert sorted(sum(rows_of_steps(batches), [])) == list(range(len(LENGTHS)))


def test_the_order_depends_on_seed_and_epoch_alone():
    first = rows_of_steps(sampler(), epoch=0)
    assert first == rows_of_steps(sampler(), epoch=0)
    assert first != rows_of_steps(sampler(), epoch=1)
    assert first != rows_of_steps(sampler(seed=8), epoch=0)


def test_micro_batches_have_one_size_and_filler_has_no_targets():
    batches = sampler(4, 4, 2)
    micro = list(batches)
    assert {len(batch) for batch in micro} == {4}
    filler = [key for batch in micro for key in batch if key.is_filler]
    assert len(filler) == -len(LENGTHS) % batches.global_batch_size
    rows = Rows(datasets.Dataset.from_dict({"input_ids": [[1]] * len(LENGTHS)}), seed=3)
    fetched = rows.__getitems__([RowKey(2, 5), RowKey(2, 9, True)])
    assert [row["ignore"] for row in fetched] == [False, True]
    assert [row["mask_seed"] for row in fetched] == [(3, 2, 5), (3, 2, 9)]


def test_resuming_in_the_middle_of_an_epoch_continues_the_order():
    batches = sampler(2, 4, 2)
    assert rows_of_steps(batches, epoch=3, first_step=5) == rows_of_steps(batches, epoch=3)[5:]


def padding_share(batches):
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    return 1 - sum(LENGTHS[batch].sum() for batch in batches) / padded


def test_grouping_by_length_pads_less():
    random, grouped = (padding_share(sampler(group_by_length=g).batches) for g in (False, True))
    assert random > 0.3 and grouped < 0.1


def test_processes_get_rows_of_like_lengths():
    """Every second row, from the longest to the shortest: two processes differ by no more than two rows do."""
    micro = [LENGTHS[[key.row for key in batch]] for batch in sampler(2, 8, 1)]
    for first, second in zip(micro[::2], micro[1::2], strict=True):
        assert abs(first.sum() - second.sum()) <= max(first[0], second[0]) - min(first[-1], second[-1])


def test_a_workers_streams_begin_anew_with_each_epoch(monkeypatch):
    seeded, rows = [], Rows(datasets.Dataset.from_dict({"input_ids": [[1]] * 4}), seed=3, rank=1)
    monkeypatch.setattr(batching, "get_worker_info", lambda: SimpleNamespace(id=2))
    monkeypatch.setattr(batching, "seed_worker", lambda *place: seeded.append(place))
    for epoch in (0, 0, 1, 1):
        rows.__getitems__([RowKey(epoch, 0)])
    assert seeded == [(3, 1, 2, 0), (3, 1, 2, 1)]


def test_evaluation_sees_every_row_once():
    keys = list(SequentialKeys(LENGTHS))
    assert sorted(key.row for key in keys) == list(range(len(LENGTHS)))
    assert list(LENGTHS[[key.row for key in keys]]) == sorted(LENGTHS, reverse=True)


def test_evaluation_sorts_a_large_data_set_a_part_at_a_time():
    in_parts = SequentialKeys(pa.chunked_array([LENGTHS[:90], LENGTHS[90:]]), part=64)
    rows, given = [key.row for key in in_parts], [list(part) for part in in_parts.parts()]
    assert sum(given, []) == rows and sorted(rows) == list(range(len(LENGTHS))) and len(in_parts) == len(LENGTHS)
    assert max(map(len, given)) == 64
    for number, part in enumerate(given):
        assert set(part) <= set(range(64 * number, 64 * number + 64))
        assert list(LENGTHS[part]) == sorted(LENGTHS[part], reverse=True)


class Numbers:
    """A collator that gives row numbers, and the process that collated them."""

    def __call__(self, rows):
        return [row["input_ids"][0] for row in rows], os.getpid()


def test_workers_stay_and_the_order_is_that_without_them():
    """Two epochs, the first left in its middle, as a run that ends or resumes there leaves it."""
    rows = datasets.Dataset.from_dict({"input_ids": [[row] for row in range(len(LENGTHS))]})
    orders, processes = {}, {}
    for workers in (0, 2):
        order = sampler(1, 8)
        loader = training_loader(rows, order, Numbers(), workers)
        orders[workers], processes[workers] = [], []
        for epoch, batches in ((0, 5), (1, 3), (2, None)):
            order.start_at(epoch, first_step=1)
            taken = list(itertools.islice(iter(loader), batches))
            orders[workers].append([numbers for numbers, _ in taken])
            processes[workers].append({process for _, process in taken})
    assert orders[0] == orders[2] and len(orders[0][2]) == order.steps_per_epoch - 1
    assert processes[2][0] == processes[2][1] == processes[2][2] and len(processes[2][0]) == 2
    assert processes[0][0] == {os.getpid()}


@pytest.mark.parametrize("group_by_length", [False, True])
@pytest.mark.parametrize("part", [2**20, 40])
def test_the_rows_that_fill_no_batch_are_left_out(group_by_length, part):
    """Other ones in each epoch; without it, as in all other tests, no row is."""
    lengths, left_out = list(range(1, 104)), []
    for epoch in range(2):
        batches = list(EpochBatches(lengths, 10, [1, epoch], group_by_length, part, drop_last=True))
        rows = np.concatenate(batches)
        assert [len(batch) for batch in batches] == [10] * 10 and len(set(rows.tolist())) == 100
        left_out.append(set(range(103)) - set(rows.tolist()))
    assert left_out[0] != left_out[1]
    assert len(EpochBatches(lengths, 10, [1], group_by_length, part)) == 11
