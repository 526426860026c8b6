"""Conversations: the answers alone are learnt, whatever the file and the template; bad rows are named."""

import copy
import json
import re

import datasets
import pandas as pd
import pytest

from course_lib.config import DataConfig, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.collating import IGNORE, Collator
from course_lib.data.conversations import CHATML, Chat
from course_lib.errors import ConfigError, DataError, ModelError
from tests.data.local_cases import load, written

TALKS = [
    [
        {"role": "user", "content": f"question {row}?"},
        {"role": "assistant", "content": f"answer {row}" * (row % 3)},
        *([{"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}] if row % 2 else []),
    ]
    for row in range(12)
]
pytestmark = pytest.mark.usefixtures("cache")
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", CHATML)


@pytest.fixture
def tokenizer(by_bytes):
    own = copy.deepcopy(by_bytes)
    own.chat_template = CHATML
    return own


def shared(row):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in row]


def lines(folder, talks=TALKS, column="messages", split="train", **more):
    rows = [json.dumps({column: talk, "id": row} | more) + "\n" for row, talk in enumerate(talks)]
    return written(folder / f"{split}.jsonl", "".join(rows))


WRITERS = {
    "json lines": lines,
    "ShareGPT": lambda folder: lines(folder, [shared(talk) for talk in TALKS], "conversations"),
    "parquet": lambda folder: written(folder / "train.parquet", pd.DataFrame({"messages": TALKS, "text": "x"})),
    "saved": lambda folder: datasets.Dataset.from_dict({"prompt": ["x"] * 12, "messages": TALKS}).save_to_disk(folder),
}


def processed(folder, tokenizer, **options):
    config = DataConfig(dataset=str(folder), task="causal_lm", **options)
    processor = DataProcessor(config, tokenizer)
    return processor, processor.process(DataConnector(config).load())


def said(tokenizer, row):
    """What is learnt of a row, as text."""
    batch = Collator("causal_lm", 0)([row])
    return tokenizer.decode([token for token in batch["labels"][0].tolist() if token != IGNORE])


@pytest.mark.parametrize("kind", WRITERS)
def test_answers_alone_are_learnt_of_every_kind_of_file(kind, tmp_path, tokenizer):
    folder = tmp_path / "data"
    WRITERS[kind](folder)
    data = load(folder, task="causal_lm")
    assert data.conversations and sorted(data.splits) == ["test", "train", "validation"]
    assert "question" in "".join(data.training_texts) and "role" not in "".join(data.training_texts)
    _, done = processed(folder, tokenizer, max_length=200)
    learnt = sorted(said(tokenizer, row) for rows in done.splits.values() for row in rows)
    assert learnt == sorted(
        "".join(turn["content"] + "<|im_end|>" for turn in talk if turn["role"] == "assistant") for talk in TALKS
    )
    train = done.splits["train"]
    tokens = sum(len(said(tokenizer, row)) for row in train)
    assert f"train: the loss is over the {tokens:,} tokens of answers alone" in done.notes
    assert tokenizer.decode(train[0]["input_ids"]).startswith("<|im_start|>user\nquestion")


def test_a_template_without_marks_is_asked_by_prefixes(tokenizer):
    marked, plain = Chat(tokenizer), copy.deepcopy(tokenizer)
    plain.chat_template = UNMARKED
    plain = Chat(plain)
    assert marked.marks and not plain.marks
    for talk in TALKS:
        with_marks, by_prefix = (chat(json.dumps(talk), "row") for chat in (marked, plain))
        assert with_marks.input_ids == by_prefix.input_ids
        more = [at for at, answer in enumerate(by_prefix.answers) if answer != with_marks.answers[at]]
        # an answer has the line break besides that the template puts after it
        assert {tokenizer.decode([with_marks.input_ids[at]]) for at in more} == {"\n"}
        assert len(more) == sum(turn["role"] == "assistant" for turn in talk)


SKIPS = UNMARKED.replace("message['content'] +", "(message['content'] if loop.last else 'thought') +")
TURNS = "{{ raise_exception('roles have to take turns') }}"


@pytest.mark.parametrize(
    ("template", "talks", "told"),
    [
        (SKIPS, [TALKS[0], TALKS[1]], "renders what comes before turn"),
        (UNMARKED, [TALKS[0], TALKS[0][1:]], "begins with an answer"),
        (TURNS, [TALKS[0], TALKS[0]], "refuses it .roles have to take turns"),
        (CHATML, [TALKS[0], []], "holds no conversation"),
        (CHATML, [TALKS[0], None], "holds no conversation"),
        (CHATML, [TALKS[0], ["hi"]], r"its turn 0 \(from 0\) has no role of text"),
        (CHATML, [TALKS[0], [{"role": "user", "content": 3}]], r"its turn 0 \(from 0\) has no content of text"),
    ],
    ids=range(7),
)
def test_a_row_that_cannot_be_read_is_named(template, talks, told, tmp_path, tokenizer):
    for split in ("train", "validation", "test"):
        lines(tmp_path, talks if split == "train" else TALKS[:1], split=split)
    tokenizer.chat_template = template
    number = 0 if template in (SKIPS, TURNS) else 1
    with pytest.raises(DataError, match=f"row {number} .from 0. of the train split.*{told}") as error:
        processed(tmp_path, tokenizer, max_length=200)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_template_says_what_to_give(tmp_path, by_bytes):
    path = lines(tmp_path)
    with pytest.raises(ModelError, match="no chat template.*--chat_template chatml"):
        processed(path, by_bytes)
    own = copy.deepcopy(by_bytes)
    processed(path, own, chat_template="chatml", max_length=200)
    assert own.chat_template == CHATML  # and is saved with the model
    jinja = written(tmp_path / "own.jinja", UNMARKED)
    assert processed(path, own, chat_template=str(jinja), max_length=200)[0].chat.marks is False
    with pytest.raises(DataError, match=r"none\.jinja cannot be read"):
        processed(path, own, chat_template=str(tmp_path / "none.jinja"))


def test_what_is_beyond_max_length_is_cut_and_counted(tmp_path, tokenizer):
    long = [{"role": "user", "content": "why " * 40}, *TALKS[1][1:]]
    for split, talks in {"train": [*TALKS, long, TALKS[0][:1]], "validation": TALKS, "test": TALKS}.items():
        lines(tmp_path, talks, split=split)
    _, done = processed(tmp_path, tokenizer, max_length=160)
    facts, rows = done.facts["train"], done.splits["train"]
    assert (facts.rows, facts.left_out, len(rows)) == (14, 2, 12) and max(rows["length"]) <= 160
    assert facts.tokens - facts.cut_tokens == sum(rows["length"]) and 0 < facts.cut_rows < 14
    assert "2 rows without an answer within 160 tokens left out" in facts.line("train")
    _, packed = processed(tmp_path, tokenizer, max_length=160, packing="best_fit")
    joined = packed.splits["train"]
    assert packed.facts["train"].packed_rows == len(joined) < 12 and packed.fingerprint != done.fingerprint
    assert sum(joined["length"]) == sum(rows["length"])
    assert sum(len(said(tokenizer, row)) for row in joined) == sum(len(said(tokenizer, row)) for row in rows)


def test_another_column_is_plain_text(tmp_path):
    data = load(lines(tmp_path, note="noted"), task="causal_lm", text_column="note")
    assert not data.conversations and data.splits["train"][0]["text"] == "noted"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lowercase": True}, "leave the two out"),
        ({"text_column": "note", "chat_template": "chatml"}, "no conversations, which chat_template chatml is for"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options, told, tmp_path):
    with pytest.raises(DataError, match=told):
        load(lines(tmp_path, note="noted"), task="causal_lm", **options)


def test_splits_hold_all_conversations_or_none(tmp_path):
    lines(tmp_path)
    written(tmp_path / "test.jsonl", '{"text": "a"}\n')
    with pytest.raises(DataError, match=r"hold both \(train conversations, test texts\)"):
        load(tmp_path, task="causal_lm")


def test_a_template_is_for_causal_language_models():
    with pytest.raises(ConfigError, match="chat_template chatml has no effect"):
        build({"chat_template": "chatml", "task": "masked_lm"})
