"""Files as other programs write them: read as they are, or refused with the line and with what settles it."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import os

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from course_lib.config import DataConfig
from course_lib.data import DataConnector, DataProcessor, localfiles
from course_lib.data.plain_files import read_rows
from course_lib.errors import DataError

FRAME = pd.DataFrame({"text": [f"words of row {row}" for row in range(40)], "label": ["neg", "pos"] * 20})
ROWS = sorted(zip(FRAME["text"], FRAME["label"], strict=True))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache of data sets."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(path, **options):
    return DataConnector(DataConfig(dataset=str(path), **options)).load()


def rows_of(data):
    return sorted(
        (text, data.label_names[label])
        for split in data.splits.values()
        for text, label in zip(split["text"], split["label"], strict=True)
    )


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# Delimited text


def read(path, **options):
    return localfiles.read_split([path], localfiles.Options(**options)).to_list()


def test_whatever_a_writer_quotes_is_read_back(tmp_path):
    """1,000 tables of every character that means something, by each of the ways in which Python's csv quotes."""
    random, letters = np.random.default_rng(0), ["a", " ", '"', ",", "\n", "\r\n", "\\", "é", "", "'"]
    path = tmp_path / "rows.csv"
    for number in range(1000):
        names = [f"column {place}" for place in range(2 + number % 3)]
        table = [
            ["".join(random.choice(letters, random.integers(1, 5))) for _ in names]
            for _ in range(random.integers(1, 4))
        ]
        with path.open("w", newline="", encoding="utf-8") as out:
            csv.writer(out, quoting=(csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[number % 2]).writerows([names, *table])
        assert [list(row.values()) for row in read_rows(path, "csv", separator=",")] == table, path.read_text()


SWALLOWED = {
    "quotes are characters": ("tsv", "label\ttext\n" + 'ham\t"Hello there\nspam\tbuy now\n' * 20, 4, "none"),
    "lines in quotes": ("tsv", "label\ttext\n" + '1\t"A good\nfilm"\n0\tbad\n' * 20, 3, "escaped"),
    "quotes begin a text": ("tsv", "label\ttext\n" + '1\t"A good" film\n0\tbad\n' * 20, 2, "none"),
    "backslashes": ("csv", "text,label\nfine,1\n" + '"he said \\"hi\\", ok",1\n"b",0\n' * 20, 3, "escaped"),
    "no end": ("csv", 'text,label\nfine,1\n"no end,0\nand on,1\n', 4, "none"),
    "nothing fits": ("csv", 'text,label\n"a" b, "c,0\n', 2, None),
}


@pytest.mark.parametrize("case", SWALLOWED)
def test_quotes_that_are_none_are_refused_with_their_line_and_an_option_reads_them(case, tmp_path):
    kind, text, line, settles = SWALLOWED[case]
    path = written(tmp_path / f"rows.{kind}", text)
    with pytest.raises(DataError, match=rf"rows\.{kind}, line {line}: its quotes cannot be read .*--quoting none"):
        load(path)
    for quoting in ("none", "escaped"):
        if quoting == settles:
            assert len(read(path, quoting=quoting)) > 1
        else:
            with pytest.raises(DataError, match=", line "):
                read(path, quoting=quoting)


def test_the_options_read_what_they_say(tmp_path):
    def texts(kind, text, quoting):
        return [row["text"] for row in read(written(tmp_path / f"a.{kind}", text), quoting=quoting)]

    assert texts("tsv", 'text\tlabel\n"a\t1\n', "none") == ['"a']
    for plain in (None, "minimal"):
        assert texts("csv", 'text,label\n"a ""b"", c",1\n5" d,0\n', plain) == ['a "b", c', '5" d']
    assert texts("csv", 'text,label\n"a \\"b\\", c",1\n"\\\\ d",0\n', "escaped") == ['a "b", c', "\\ d"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# exported 2026\n" + FRAME.to_csv(index=False),
            "line 2: it has 2 fields, .*above the header",
        ),
        (FRAME.to_csv(index=False, header=False), "where these are a row and no header, put one above it"),
        ("text,text,label\na,b,c\n", "two columns `text`"),
        ("text,label\nhello\nworld,1\n", "line 2: it has 1 field, and the header 2"),
    ],
)
def test_lines_that_are_no_rows_are_named(text, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "rows.csv", text))


def test_what_excel_adds_is_understood(tmp_path):
    frame = FRAME.to_csv(index=False, sep=";", lineterminator="\r\n")
    assert rows_of(load(written(tmp_path / "a.csv", "\ufeff" + frame))) == ROWS
    blank = FRAME.rename(columns={"label": " label "}).assign(more=None).to_csv(index=False).replace(",more", ",")
    assert rows_of(load(written(tmp_path / "b.csv", blank))) == ROWS, "blanks around a name; a comma at each line's end"


# Encodings


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("très déçu, ça va être génial", "cp1252"),
        ("schöne Grüße", "cp1252"),
        ("it’s “fine”", "cp1252"),
        ("Привет как дела, очень хорошо", "cp1251"),
        ("καλημέρα κόσμε", "cp1253"),
    ],
)
def test_an_encoding_is_named_with_what_it_reads(text, encoding, tmp_path):
    rows = f"{text.replace(',', ';')},1\nplain,0\n" * 20
    path = written(tmp_path / "a.csv", f"text,label\n{rows}".encode(encoding))
    with pytest.raises(DataError, match=f"is not UTF-8: give --encoding .*{encoding} .it has `.*{text[:4]}") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    data = load(path, encoding=encoding, clean_text=False)
    assert any(split["text"][0] == text.replace(",", ";") for split in data.splits.values())


# JSON


def records():
    return FRAME.to_dict("records")


JSON = {
    "lines": FRAME.to_json(orient="records", lines=True),
    "a list": json.dumps(records()),
    "an indented list": json.dumps(records(), indent=1),
    "columns of lists": json.dumps(FRAME.to_dict("list")),
    "pandas' own": FRAME.to_json(),
    "table": FRAME.to_json(orient="table"),
    "within data": json.dumps({"version": 1, "data": records()}),
    "a mark at the beginning": "\ufeff" + FRAME.to_json(orient="records", lines=True),
    "blank lines": "\n\n" + FRAME.to_json(orient="records", lines=True).replace("\n", "\r\n\n"),
}


@pytest.mark.parametrize("form", JSON)
def test_json_is_read_in_every_usual_form(form, tmp_path):
    assert rows_of(load(written(tmp_path / "rows.json", JSON[form]))) == ROWS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"text": "a", "label": 1}\nnull\n', "line 2: it is a NoneType, not an object"),
        ('{"text": "a", "label": 1}\n{"text": "b", \n', "line 2: it is no JSON"),
        ('{"text": "a", "label": 1}\n[1, 2]\n', "line 2: it is a list, not an object"),
        ('[{"text": "a"}, "b"]', r"row 1 \(from 0\): it is a str, not an object"),
        (
            '{"text": "fine", "label": 1}\n{"text": "a \\ud83d", "label": 1}\n',
            r"cannot be read as json .*surrogates",
        ),
        ('{"label": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "cannot be read as json .*recursion"),
        ("1\n2\n", "rows.jsonl is no JSON .*: give one object per line, or a list of objects"),
        (json.dumps({"text": ["a", "b"], "label": [1]}), "column `text` .* holds lists"),
        ("{}\n{}\n", "has no rows"),
    ],
)
def test_json_that_is_no_rows_is_named(text, said, tmp_path):
    with pytest.raises(DataError, match=said) as caught:
        load(written(tmp_path / "rows.jsonl", text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "task", "said"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "masked_lm", "none is known to be the text: name it with"),
        ({"text": [{"role": "user", "content": "hi"}]}, "causal_lm", "not text.*apply_chat_template"),
        ({"premise": "a", "hypothesis": "b", "label": 1}, "classification", "in several columns, join them first"),
        ({"text": ["a", "b"], "label": 1}, "classification", r"column `text` .* holds lists, .*, not text.*\.join"),
    ],
)
def test_columns_of_another_form_are_named_with_what_converts_them(row, task, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "rows.jsonl", f"{json.dumps(row)}\n" * 9), task=task)


# Where data lies


PACKED = {
    "rows.csv.gz": gzip.compress,
    "rows.csv.bz2": bz2.compress,
    "rows.csv.xz": lzma.compress,
    "rows.csv.zst": lambda text: pa.compress(text, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_files_are_read(name, tmp_path):
    content = PACKED[name](FRAME.to_csv(index=False).encode())
    assert rows_of(load(written(tmp_path / name, content))) == ROWS
    written(tmp_path / "cut" / name, content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read as csv"):
        load(tmp_path / "cut" / name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.xlsx", b"PK\x03\x04", r"rows\.xlsx is of a kind that is not read here: .*pandas\.read_excel"),
        ("rows.zip", b"PK\x03\x04", "not read here: .*unpack archives"),
        ("rows.parquet.gz", gzip.compress(b"PAR1", mtime=0), "is of a kind that is not read here"),
        ("rows.csv", b"PK\x03\x04\xff", "is not UTF-8"),
        (
            "rows.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a Git LFS pointer.*git lfs pull",
        ),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        ("rows.csv.gz", gzip.compress(b"", mtime=0), r"rows\.csv\.gz has no rows"),
    ],
)
def test_files_that_are_something_else_are_named(name, content, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / name, content))


def test_a_name_that_is_nowhere_is_compared_with_names_like_it_alone(tmp_path):
    written(tmp_path / "minus1.csv", "text,label\n")
    with pytest.raises(DataError, match="no file or folder .*surr.jsonl") as caught:
        load(tmp_path / "surr.jsonl")
    assert "minus1" not in str(caught.value)
    with pytest.raises(DataError, match="did you mean `.*/minus1.csv`"):
        load(tmp_path / "minus.csv")


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    whole = datasets.Dataset.from_pandas(FRAME)
    whole.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": whole.select(range(30)), "test": whole.select(range(30, 40))}).save_to_disk(
        tmp_path / "splits"
    )
    assert rows_of(load(tmp_path / "one")) == rows_of(load(tmp_path / "splits")) == ROWS
    assert len(load(tmp_path / "splits").splits["test"]) == 10


def test_a_clone_of_a_data_set_of_the_hub_is_read(tmp_path):
    clone = tmp_path / "clone" / "data"
    clone.mkdir(parents=True)
    FRAME[:30].to_parquet(clone / "train-00000-of-00001-a09b74b3ef9c3b56.parquet")
    FRAME[30:].to_parquet(clone / "test-00000-of-00001-0123456789abcdef.parquet")
    data = load(tmp_path / "clone")
    assert rows_of(data) == ROWS and len(data.splits["test"]) == 10
    assert rows_of(load(clone)) == ROWS, "its folder of data alone"

    several = tmp_path / "several"
    for number, name in enumerate(("plain", "other")):
        written(several / name / "train.csv", FRAME[20 * number : 20 * number + 20].to_csv(index=False))
    written(
        several / "README.md",
        "---\nconfigs:\n"
        + "".join(
            f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.csv\n"
            for name in ("plain", "other")
        )
        + "---\n# About\n",
    )
    with pytest.raises(DataError, match=r"has the configurations \['plain', 'other'\]: choose one with --dataset_con"):
        load(several)
    assert rows_of(load(several, dataset_config="other")) == sorted(
        zip(FRAME["text"][20:], FRAME["label"][20:], strict=True)
    )


def test_a_clone_whose_card_is_broken_is_named(tmp_path):
    written(tmp_path / "data" / "train.csv", FRAME.to_csv(index=False))
    written(tmp_path / "README.md", "---\nconfigs:\n- config_name: [\n---\n")
    with pytest.raises(DataError, match="cannot be read as a clone .*: mend its README"):
        load(tmp_path)


# Caches


@pytest.mark.parametrize("kind", ["csv", "tsv", "json", "jsonl", "parquet", "txt"])
def test_a_cache_answers_for_the_bytes_that_are_there(kind, tmp_path):
    """A file of the same name, size and times, and of other contents, as archives and images with fixed times have."""
    path = tmp_path / f"rows.{kind}"
    other = FRAME.assign(text=FRAME["text"].str.replace("words", "WORDS"))
    writers = {
        "csv": lambda frame: frame.to_csv(path, index=False),
        "tsv": lambda frame: frame.to_csv(path, index=False, sep="\t"),
        "json": lambda frame: frame.to_json(path),
        "parquet": lambda frame: frame.to_parquet(path),
        "jsonl": lambda frame: frame.to_json(path, orient="records", lines=True),
        "txt": lambda frame: path.write_text("\n".join(frame["text"])),
    }
    seen = []
    for frame in (FRAME, other):
        writers[kind](frame)
        os.utime(path, (1, 1))
        data = load(path, task="causal_lm")
        seen.append({word for split in data.splits.values() for text in split["text"] for word in text.split()[:1]})
    assert seen == [{"words"}, {"WORDS"}]


def test_another_way_of_reading_is_another_entry(tmp_path):
    path = written(tmp_path / "a.csv", 'text,label\n"a",1\n"b",0\nc,1\n')
    assert [read(path, quoting=quoting)[0]["text"] for quoting in (None, "none", None)] == ["a", '"a"', "a"]


# Texts of language models


CODE = 'def f(x):\n    if x:\n\treturn "a &lt; b"  \n\n\n# cafe\u0301 \u00a0 \u1100\u1161 ﬁ ∑\r\n'


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("kind", ["txt", "lines.txt", "jsonl", "csv", "parquet"])
def test_blocks_decode_to_the_files_own_bytes(kind, task, by_bytes, tmp_path):
    texts = [f"{row} {CODE}" for row in range(20)]
    if kind == "lines.txt":
        texts = [text.replace("\n", " ").replace("\r", "") + "\n" for text in texts]
    frame = pd.DataFrame({"text": texts})
    content = {
        "txt": "".join(texts),
        "csv": frame.to_csv(index=False),
        "parquet": frame.to_parquet(),
        "jsonl": frame.to_json(orient="records", lines=True),
    }[kind.rpartition(".")[2]]
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.{kind.rpartition('.')[2]}", content)
    config = DataConfig(dataset=str(tmp_path), task=task, max_length=4)
    done = DataProcessor(config, by_bytes).process(DataConnector(config).load())
    for split, blocks in done.splits.items():
        ids = list(itertools.chain.from_iterable(blocks["input_ids"]))
        decoded = by_bytes.decode(
            [token for token in ids if token != by_bytes.eos_token_id], clean_up_tokenization_spaces=False
        )
        whole, facts = "".join(texts), done.facts[split]
        assert whole.startswith(decoded.rstrip("\ufffd")) and len(whole.encode()) - len(decoded.encode()) < 8
        assert facts.cut_tokens == facts.tokens - 4 * len(blocks) < 4
        assert facts.tokens == len(whole.encode()) + facts.rows


def test_what_is_cut_at_max_length_is_counted(by_bytes, tmp_path):
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.csv", "text,label\nabcdefgh,1\nabc,0\nabcdefghijkl,1\n")
    config = DataConfig(dataset=str(tmp_path), max_length=8)
    facts = DataProcessor(config, by_bytes).process(DataConnector(config).load()).facts["test"]
    assert (facts.rows, facts.tokens, facts.cut_rows, facts.cut_tokens) == (3, 23, 1, 4)
    assert facts.classes == {"0": 1, "1": 2} and facts.in_train == 3
    assert facts.line("test") == (
        "3 rows: 0 1, 1 2; 3 rows of the training split too; 1 row (33.3%) cut at 8 "
        "tokens, which leaves out 17.4% of the tokens"
    )


def test_files_of_a_split_that_differ_are_named(tmp_path):
    def shards(folder, first, second, kind):
        for number, frame in enumerate((first, second)):
            path = written(tmp_path / folder / f"train-{number:05d}-of-00002.{kind}", b"")
            (frame.to_csv if kind == "csv" else frame.to_parquet)(path, index=False)
        return tmp_path / folder

    with pytest.raises(DataError, match="00001-of-00002.parquet has the columns text, and train-00000"):
        load(shards("a", FRAME, FRAME[["text"]], "parquet"))
    with pytest.raises(DataError, match="00001-of-00002.csv has the columns text, and train-00000.*same columns"):
        load(shards("b", FRAME, FRAME[["text"]], "csv"))
    numbers = FRAME.assign(label=[0, 1] * 20)
    with pytest.raises(DataError, match="00000-of-00002.parquet .or one of 1 beside .*label has incompatible types"):
        load(shards("c", FRAME, numbers, "parquet"))
    mixed = load(shards("d", numbers, numbers.astype({"label": float}), "parquet"))
    assert mixed.label_names == ("0", "1"), "whole numbers of one file are what another holds as fractions"
    (tmp_path / "named").mkdir()
    for names in (["neg", "pos"], ["pos", "neg"]):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
        rows.to_parquet(tmp_path / "named" / f"train-0000{names.index('pos')}-of-00002.parquet")
    with pytest.raises(DataError, match="names its classes otherwise than train-00000"):
        load(tmp_path / "named")
