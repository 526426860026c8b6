"""Conversations: the answers alone are learnt, whatever the file and the template; bad rows are named."""

import copy
import json
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from course_lib.config import DataConfig, build
from course_lib.data import DataConnector, DataProcessor
from course_lib.data.collating import IGNORE, Collator
from course_lib.data.conversations import CHATML, Chat
from course_lib.errors import ConfigError, DataError, ModelError

TALKS = [
    [
        {"role": "user", "content": f"question {row}?"},
        {"role": "assistant", "content": f"answer {row}" * (row % 3)},
        *([{"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}] if row % 2 else []),
    ]
    for row in range(12)
]
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", CHATML)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(by_bytes):
    own = copy.deepcopy(by_bytes)
    own.chat_template = CHATML
    return own


def shared(row):
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in row]


def write_lines(folder, talks=TALKS, column="messages", split="train"):
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps({"id": 1, column: talk}) + "\n" for talk in talks))
    return path


WRITERS = {
    "json lines": write_lines,
    "ShareGPT": lambda folder: write_lines(folder, [shared(talk) for talk in TALKS], "conversations"),
    "parquet": lambda folder: pq.write_table(
        pa.table({"messages": TALKS, "text": ["x"] * 12}), folder / "train.parquet"
    ),
    "saved": lambda folder: datasets.Dataset.from_dict({"prompt": ["x"] * 12, "messages": TALKS}).save_to_disk(folder),
}


def load(folder, **options):
    return DataConnector(DataConfig(dataset=str(folder), task="causal_lm", **options)).load()


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
    folder.mkdir()
    WRITERS[kind](folder)
    data = load(folder)
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


@pytest.mark.parametrize(
    ("template", "talk", "told"),
    [
        (
            UNMARKED.replace("message['content'] +", "(message['content'] if loop.last else 'thought') +"),
            TALKS[1],
            "renders what comes before turn",
        ),
        (UNMARKED, TALKS[0][1:], "begins with an answer"),
        ("{{ raise_exception('roles have to take turns') }}", TALKS[0], "refuses it .roles have to take turns"),
        (CHATML, [], "holds no conversation"),
        (CHATML, None, "holds no conversation"),
        (CHATML, ["hi"], r"its turn 0 \(from 0\) has no role of text"),
        (CHATML, [*TALKS[0], {"role": "user", "content": 3}], r"its turn 2 \(from 0\) has no content of text"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(template, talk, told, tmp_path, tokenizer):
    path = write_lines(tmp_path, [*TALKS[:1], talk])
    for split in ("validation", "test"):
        write_lines(tmp_path, TALKS[:1], split=split)
    tokenizer.chat_template = template
    if "raise" in template:
        path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in (talk, talk)))
    with pytest.raises(DataError, match=f"row [01] .from 0. of the train split.*{told}") as error:
        processed(tmp_path, tokenizer, max_length=200)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_template_says_what_to_give(tmp_path, by_bytes):
    path = write_lines(tmp_path)
    with pytest.raises(ModelError, match="no chat template.*--chat_template chatml"):
        processed(path, by_bytes)
    own = copy.deepcopy(by_bytes)
    processed(path, own, chat_template="chatml", max_length=200)
    assert own.chat_template == CHATML  # and is saved with the model
    (tmp_path / "own.jinja").write_text(UNMARKED)
    assert processed(path, own, chat_template=str(tmp_path / "own.jinja"), max_length=200)[0].chat.marks is False
    with pytest.raises(DataError, match=r"none\.jinja cannot be read"):
        processed(path, own, chat_template=str(tmp_path / "none.jinja"))


def test_what_is_beyond_max_length_is_cut_and_counted(tmp_path, tokenizer):
    folder = tmp_path / "data"
    folder.mkdir()
    long = [{"role": "user", "content": "why " * 40}, *TALKS[1][1:]]
    for split, talks in {"train": [*TALKS, long, TALKS[0][:1]], "validation": TALKS, "test": TALKS}.items():
        write_lines(folder, talks, split=split)
    _, done = processed(folder, tokenizer, max_length=160)
    facts, rows = done.facts["train"], done.splits["train"]
    assert (facts.rows, facts.left_out, len(rows)) == (14, 2, 12) and max(rows["length"]) <= 160
    assert facts.tokens - facts.cut_tokens == sum(rows["length"]) and 0 < facts.cut_rows < 14
    assert "2 rows without an answer within 160 tokens left out" in facts.line("train")
    _, packed = processed(folder, tokenizer, max_length=160, packing="best_fit")
    joined = packed.splits["train"]
    assert packed.facts["train"].packed_rows == len(joined) < 12 and packed.fingerprint != done.fingerprint
    assert sum(joined["length"]) == sum(rows["length"])
    assert sum(len(said(tokenizer, row)) for row in joined) == sum(len(said(tokenizer, row)) for row in rows)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"text_column": "note"}, None),
        ({"lowercase": True}, "leave the two out"),
        (
            {"text_column": "note", "chat_template": "chatml"},
            "holds no conversations, which chat_template chatml is for",
        ),
    ],
)
def test_another_column_is_plain_text(options, told, tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"messages": talk, "note": f"note {row}"} for row, talk in enumerate(TALKS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if told:
        with pytest.raises(DataError, match=told):
            load(path, **options)
    else:
        data = load(path, **options)
        assert not data.conversations and data.splits["train"][0]["text"].startswith("note")


def test_splits_hold_all_conversations_or_none(tmp_path):
    write_lines(tmp_path)
    (tmp_path / "test.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"hold both \(train conversations, test texts\)"):
        load(tmp_path)


def test_a_template_is_for_causal_language_models():
    with pytest.raises(ConfigError, match="chat_template chatml has no effect"):
        build({"chat_template": "chatml", "task": "masked_lm"})
