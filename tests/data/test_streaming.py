"""Streams of training text: a pure order, the same global batches for any number of ranks, resumed at the row."""

import copy
import gzip
import itertools
import json
from collections import Counter
from unittest import mock

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from course_lib.config import DataConfig, build
from course_lib.data import DataConnector, open_stream
from course_lib.data.batching import GlobalBatchSampler
from course_lib.data.collating import Collator
from course_lib.data.conversations import CHATML, Answered
from course_lib.data.streaming import TextStream
from course_lib.data.window_rows import LazyRow
from course_lib.errors import ConfigError, DataError
from tests.data import local_cases

SIZES = (7, 3, 11, 5, 9)
ROWS = [f"{shard}.{row}" for shard, size in enumerate(SIZES) for row in range(size)]
WINDOW = 6
GLOBAL = 4


class Held(str):
    """A text whose being there is counted."""

    now = most = 0

    def __init__(self, text):
        Held.now += 1
        Held.most = max(Held.most, Held.now)

    def __del__(self):
        Held.now -= 1


class Lists:
    """Shards in memory, and from where they were read."""

    def __init__(self, sizes=SIZES, make=str):
        self.sizes, self.make, self.reads = sizes, make, []

    def __len__(self):
        return len(self.sizes)

    def name(self, shard):
        return f"shard {shard}"

    def read(self, shard, start=0):
        self.reads.append((shard, start))
        for row in range(start, self.sizes[shard]):
            yield self.make(f"{shard}.{row}")


def one_each(texts):
    return [LazyRow(len(one.text), lambda one=one: {"text": str(one.text)}) for one in texts]


def texts_of(rows):
    return [row["text"] for row in rows if not row["ignore"]]


def stream_of(shards=None, ranks=1, rank=0, **options):
    usual = {"window": WINDOW, "seed": 5, "rank": rank, "world_size": ranks, "batch_size": GLOBAL // ranks}
    return TextStream(shards or Lists(), one_each, **usual | options)


def steps(streams, size, limit=None):
    """Rows of each global batch without filler, sorted, from the streams of all ranks, and the state after each."""
    found = []
    iterators = [iter(stream) for stream in streams]
    while len(found) != limit and any(rows := [list(itertools.islice(own, size)) for own in iterators]):
        assert len(set(map(len, rows))) == 1
        found.append((sorted(sum(map(texts_of, rows), [])), rows[0][-1]["place"]))
    return found


def test_an_epoch_has_each_row_once_in_an_order_of_its_own():
    stream = stream_of()
    epochs = [texts_of(stream) for _ in range(2)]
    assert all(sorted(epoch) == sorted(ROWS) for epoch in epochs) and epochs[0] != epochs[1]
    assert stream.place.epoch == 2
    stream.set_epoch(0)
    assert stream.place.epoch == 2  # Accelerate's loaders count from 0 in each process
    stream.load_state_dict({"epoch": 1})
    assert texts_of(stream) == epochs[1]
    later = stream_of()
    later.set_epoch(1)
    assert texts_of(later) == epochs[1]
    assert texts_of(stream_of(seed=6)) != epochs[0]
    # shards are permuted, and rows within windows of those that follow each other
    shards = list(dict.fromkeys(text.split(".")[0] for text in epochs[0]))
    assert shards != sorted(shards)
    in_order = [f"{shard}.{row}" for shard in _order() for row in range(SIZES[shard])]
    windows = [slice(start, start + WINDOW) for start in range(0, len(ROWS), WINDOW)]
    assert all(sorted(epochs[0][window]) == sorted(in_order[window]) for window in windows)
    assert any(epochs[0][window] != in_order[window] for window in windows)


def _order():
    """Of the shards, in the first epoch."""
    shards = Lists()
    list(stream_of(shards))
    return [shard for shard, _ in shards.reads]


@pytest.mark.parametrize("batch", [{}, {"accumulation": 2}, {"global_batch_size": 3}, {"drop_last": True}], ids=str)
def test_a_global_batch_has_the_same_rows_for_any_number_of_ranks(batch):
    accumulation = batch.get("accumulation", 1)
    found = {}
    for ranks in (1, 2, 4):
        streams = [stream_of(ranks=ranks, rank=rank, **batch) for rank in range(ranks)]
        found[ranks] = steps(streams, GLOBAL // ranks * accumulation)
    assert found[1] == found[2] == found[4] and len(found[1]) > 3
    options = {"global_batch_size": batch.get("global_batch_size"), "drop_last_batch": batch.get("drop_last", False)}
    sampler = GlobalBatchSampler([1] * len(ROWS), GLOBAL, 1, accumulation, group_by_length=False, **options)
    assert [len(rows) for rows, _ in found[1]] == list(map(len, sampler.batches))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 2, 4, 7, 8])
def test_it_goes_on_at_the_row_with_any_number_of_ranks_and_reads_nothing_before(done, ranks):
    whole = steps([stream_of(endless=True)], GLOBAL, 18)
    state = json.loads(json.dumps(whole[done - 1][1]))
    shards = [Lists() for _ in range(ranks)]
    streams = [stream_of(own, ranks, rank, endless=True) for rank, own in enumerate(shards)]
    for stream in streams:
        stream.load_state_dict(state)
        assert stream.state_dict() == state
    rest = steps(streams, GLOBAL // ranks, len(whole) - done)
    assert [rows for rows, _ in rest] == [rows for rows, _ in whole[done:]]
    order = _order()
    read = shards[0].reads[: len(order) - state["shard"]]
    assert read == [(order[state["shard"]], state["shard_row"]), *((shard, 0) for shard in order[state["shard"] + 1 :])]
    assert state["window"] == state["row"] // WINDOW and state["window_row"] == state["window"] * WINDOW


def test_epoch_and_row_alone_are_enough():
    whole, stream = steps([stream_of()], GLOBAL), stream_of()
    stream.load_state_dict({"epoch": 0, "row": 3 * GLOBAL})
    assert [rows for rows, _ in steps([stream], GLOBAL)] == [rows for rows, _ in whole[3:]]


def test_within_a_global_batch_of_several_micro_batches_it_goes_on_with_the_next():
    whole, stream, again = (stream_of(batch_size=1, accumulation=4) for _ in range(3))
    taken = list(itertools.islice(stream, 6))
    again.load_state_dict(stream.state_dict())
    assert (stream.place.row, stream.place.micro) == (4, 2)
    assert [row["text"] for row in [*taken, *again]] == [row["text"] for row in whole]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_batches_of_none_and_go_on_too(workers):
    def batches(workers, state=None):
        stream = stream_of(ranks=2, rank=1, endless=True)
        if state:
            stream.load_state_dict(state)
        loader = DataLoader(stream, batch_size=GLOBAL // 2, num_workers=workers, collate_fn=list)
        return list(itertools.islice(loader, 13 if state else 18))

    alone, found = ([texts_of(batch) for batch in batches(number)] for number in (0, workers))
    assert found == alone
    assert [texts_of(batch) for batch in batches(workers, batches(0)[4][-1]["place"])] == alone[5:]


def test_no_more_is_held_than_a_window_and_the_next():
    sizes = (400,) * 5
    Held.now = Held.most = 0
    for row in stream_of(Lists(sizes, Held), window=50):
        assert Held.now <= 2 * 50 + GLOBAL + 2
        del row
    assert 50 < Held.most <= 2 * 50 + GLOBAL + 2 < sum(sizes)


@pytest.mark.parametrize(("sizes", "drop_last"), [((0, 0), False), ((2,), True)])
def test_an_empty_stream_is_an_error_and_no_endless_loop(sizes, drop_last):
    with pytest.raises(DataError, match="hold no rows"):
        next(iter(stream_of(Lists(sizes), endless=True, drop_last=drop_last)))


# Files


TEXTS = [[f"text {shard}.{row} " + "word " * (row % 7) for row in range(40)] for shard in range(3)]


def as_arrow(frame, path):
    table = pa.table({"text": list(frame["text"])})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)


STREAMED = {kind: local_cases.WRITERS[kind] for kind in ("jsonl", "csv", "txt")} | {
    "parquet": lambda frame, path: frame.to_parquet(path, row_group_size=8),
    "arrow": as_arrow,
}


def written(folder, kind="jsonl"):
    """Three shards, and rows to evaluate on."""
    for shard, texts in enumerate(TEXTS):
        STREAMED[kind](pd.DataFrame({"id": 7, "text": texts}), folder / f"train-{shard:05}-of-00003.{kind}")
    local_cases.written(folder / "validation.jsonl", pd.DataFrame({"text": ["checked words"] * 8}))
    return folder


def config_of(folder, **options):
    return DataConfig(dataset=str(folder), task="causal_lm", streaming=True, **options)


@pytest.mark.parametrize("kind", STREAMED)
def test_each_kind_of_file_is_read_from_any_row_on(kind, tmp_path):
    shards = DataConnector(config_of(written(tmp_path, kind))).open_training_shards()
    assert len(shards) == 3
    for shard, start in itertools.product(range(3), (0, 1, 8, 15, 39, 40, 50)):
        read = [text.removesuffix("\n") for text in shards.read(shard, start)]
        assert read == TEXTS[shard][start:]


def test_of_parquet_no_group_of_rows_before_is_read(tmp_path):
    shards = DataConnector(config_of(written(tmp_path, "parquet"))).open_training_shards()
    groups, read = [], pq.ParquetFile.iter_batches

    def noting(file, *args, **options):
        groups.append((options["row_groups"], options["columns"]))
        return read(file, *args, **options)

    with mock.patch.object(pq.ParquetFile, "iter_batches", noting):
        list(shards.read(1, 17))
    assert groups == [([2, 3, 4], ["text"])]


def test_compressed_lines_are_shards_too(tmp_path):
    written(tmp_path)
    for path in tmp_path.glob("train*"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    shards = DataConnector(config_of(tmp_path)).open_training_shards()
    assert [list(shards.read(shard)) for shard in range(3)] == TEXTS


@pytest.mark.parametrize("packing", ["wrapped", "best_fit"])
def test_texts_become_rows_within_their_window(packing, tmp_path, by_bytes, cache):
    config = config_of(written(tmp_path), packing=packing, max_length=64, stream_window=16)
    stream = open_stream(config, by_bytes)
    rows = list(stream)
    assert stream.window == 16 and all(row["length"] <= 64 for row in rows) and not (tmp_path / "cache").exists()
    tokens = Counter(token for row in rows for token in row["input_ids"])
    wanted = Counter(token for texts in TEXTS for text in texts for token in by_bytes(text)["input_ids"])
    assert tokens == wanted + Counter({by_bytes.eos_token_id: 120})
    batch = Collator("causal_lm", 0)(rows[:4])
    assert ("position_ids" in batch) == (packing == "best_fit") and batch.place["row"] == 4
    if packing == "best_fit":  # a window's texts are in its rows alone
        assert sum(len(row["documents"]) for row in rows) == 120 and len(rows) < 110


def test_conversations_are_streamed_and_made_by_the_rank_that_needs_them(tmp_path, by_bytes):
    tokenizer = copy.deepcopy(by_bytes)
    talks = [[{"role": "user", "content": f"{row}?"}, {"role": "assistant", "content": f"{row}!"}] for row in range(20)]
    path = local_cases.written(tmp_path / "train.jsonl", pd.DataFrame({"messages": talks}))
    made = Answered([1, 2, 3], [False, True, True])
    with mock.patch("course_lib.data.conversations.Chat.__call__", return_value=made) as asked:
        rows = list(open_stream(config_of(path, chat_template="chatml"), tokenizer, world_size=2, rank=1))
    assert asked.call_count == len(rows) == 10 and tokenizer.chat_template == CHATML


def test_what_cannot_be_streamed_is_named(tmp_path):
    written(tmp_path)
    local_cases.written(tmp_path / "train-00001-of-00003.jsonl", '{"text": null}\n')
    with pytest.raises(DataError, match=r"row 0 \(from 0\) has no text in column"):
        list(DataConnector(config_of(tmp_path)).load().shards.read(1))
    (tmp_path / "validation.jsonl").unlink()
    with pytest.raises(DataError, match="has no validation split, and none can be cut"):
        DataConnector(config_of(tmp_path)).load()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "say how many to make: --max_steps"),
        ({"max_steps": 3, "max_train_samples": 5}, "max_train_samples 5 has no effect"),
        ({"max_steps": 3, "task": "masked_lm"}, "streaming True has no effect"),
    ],
)
def test_what_a_stream_needs_is_asked_for(options, told):
    with pytest.raises(ConfigError, match=told):
        build({"streaming": True, "task": "causal_lm"} | options)


def test_only_local_files_are_streamed():
    with pytest.raises(DataError, match="streaming reads local files"):
        DataConnector(DataConfig(dataset="pydocs", task="causal_lm", streaming=True)).open_training_shards()
