"""Files as other programs write them: read as they are, or refused with the line and with what settles it."""

import bz2
import csv
import gzip
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
from tests.data.local_cases import WRITERS, load, texts_of, written

FRAME = pd.DataFrame({"text": [f"words of row {row}" for row in range(40)], "label": ["neg", "pos"] * 20})
ROWS = sorted(FRAME.itertuples(index=False, name=None))
pytestmark = pytest.mark.usefixtures("cache")


def named_rows(data):
    return sorted(
        (text, data.label_names[label])
        for split in data.splits.values()
        for text, label in zip(split["text"], split["label"], strict=True)
    )


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


def test_what_excel_adds_is_understood(tmp_path):
    frame = FRAME.to_csv(index=False, sep=";", lineterminator="\r\n")
    assert named_rows(load(written(tmp_path / "a.csv", "\ufeff" + frame))) == ROWS
    blank = FRAME.rename(columns={"label": " label "}).assign(more=None).to_csv(index=False).replace(",more", ",")
    assert named_rows(load(written(tmp_path / "b.csv", blank))) == ROWS, (
        "blanks around a name; a comma at each line's end"
    )


# Encodings


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("très déçu; ça va être génial", "cp1252"),
        ("it’s “fine”", "cp1252"),
        ("Привет как дела; очень хорошо", "cp1251"),
        ("καλημέρα κόσμε", "cp1253"),
    ],
)
def test_an_encoding_is_named_with_what_it_reads(text, encoding, tmp_path):
    rows = f"{text},1\nplain,0\n" * 20
    path = written(tmp_path / "a.csv", f"text,label\n{rows}".encode(encoding))
    with pytest.raises(DataError, match=f"is not UTF-8: give --encoding .*{encoding} .it has `.*{text[:4]}"):
        load(path)
    assert text in texts_of(load(path, encoding=encoding, clean_text=False))


# JSON


RECORDS, LINES = FRAME.to_dict("records"), FRAME.to_json(orient="records", lines=True)
JSON = {
    "lines": LINES,
    "a list": json.dumps(RECORDS),
    "an indented list": json.dumps(RECORDS, indent=1),
    "columns of lists": json.dumps(FRAME.to_dict("list")),
    "pandas' own": FRAME.to_json(),
    "table": FRAME.to_json(orient="table"),
    "within data": json.dumps({"version": 1, "data": RECORDS}),
    "a mark at the beginning": "\ufeff" + LINES,
    "blank lines": "\n\n" + LINES.replace("\n", "\r\n\n"),
}


@pytest.mark.parametrize("form", JSON)
def test_json_is_read_in_every_usual_form(form, tmp_path):
    assert named_rows(load(written(tmp_path / "rows.json", JSON[form]))) == ROWS


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
    assert named_rows(load(written(tmp_path / name, content))) == ROWS
    written(tmp_path / "cut" / name, content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read as csv"):
        load(tmp_path / "cut" / name)


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    whole = datasets.Dataset.from_pandas(FRAME)
    whole.save_to_disk(tmp_path / "one")
    splits = datasets.DatasetDict({"train": whole.select(range(30)), "test": whole.select(range(30, 40))})
    splits.save_to_disk(tmp_path / "splits")
    assert named_rows(load(tmp_path / "one")) == named_rows(load(tmp_path / "splits")) == ROWS
    assert len(load(tmp_path / "splits").splits["test"]) == 10


def test_a_clone_of_a_data_set_of_the_hub_is_read(tmp_path):
    clone = tmp_path / "clone" / "data"
    written(clone / "train-00000-of-00001-a09b74b3ef9c3b56.parquet", FRAME[:30])
    written(clone / "test-00000-of-00001-0123456789abcdef.parquet", FRAME[30:])
    data = load(tmp_path / "clone")
    assert named_rows(data) == ROWS and len(data.splits["test"]) == 10
    assert named_rows(load(clone)) == ROWS, "its folder of data alone"


def test_of_a_clone_with_several_configurations_one_is_chosen(tmp_path):
    written(tmp_path / "plain" / "train.csv", FRAME[:20])
    written(tmp_path / "other" / "train.csv", FRAME[20:])
    names = ", ".join(f"{{config_name: {name}, data_files: {name}/train.csv}}" for name in ("plain", "other"))
    card = written(tmp_path / "README.md", f"---\nconfigs: [{names}]\n---\n# About\n")
    with pytest.raises(DataError, match=r"has the configurations \['plain', 'other'\]: choose one with --dataset_con"):
        load(tmp_path)
    assert named_rows(load(tmp_path, dataset_config="other")) == sorted(FRAME[20:].itertuples(index=False, name=None))
    written(card, "---\nconfigs:\n- config_name: [\n---\n")
    with pytest.raises(DataError, match="cannot be read as a clone .*: mend its README"):
        load(tmp_path)


# Caches


@pytest.mark.parametrize("kind", WRITERS)
def test_a_cache_answers_for_the_bytes_that_are_there(kind, tmp_path):
    """A file of the same name, size and times, and of other contents, as archives and images with fixed times have."""
    for word in ("words", "WORDS"):
        path = written(tmp_path / f"rows.{kind}", FRAME.assign(text=FRAME["text"].str.replace("words", word)))
        os.utime(path, (1, 1))
        assert {text.split()[0] for text in texts_of(load(path, task="causal_lm"))} == {word}


def test_another_way_of_reading_is_another_entry(tmp_path):
    path = written(tmp_path / "a.csv", 'text,label\n"a",1\n"b",0\nc,1\n')
    assert [read(path, quoting=quoting)[0]["text"] for quoting in (None, "none", None)] == ["a", '"a"', "a"]


# Texts of language models


CODE = 'def f(x):\n    if x:\n\treturn "a &lt; b"  \n\n\n# cafe\u0301 \u00a0 \u1100\u1161 ﬁ ∑\r\n'


@pytest.mark.parametrize("task", ["causal_lm", "masked_lm"])
@pytest.mark.parametrize("kind", ["txt", "lines.txt", "jsonl", "csv", "parquet"])
def test_blocks_decode_to_the_files_own_bytes(kind, task, by_bytes, tmp_path):
    texts, suffix = [f"{row} {CODE}" for row in range(20)], kind.rpartition(".")[2]
    if kind == "lines.txt":
        texts = [text.replace("\n", " ").replace("\r", "") + "\n" for text in texts]
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.{suffix}", "".join(texts) if suffix == "txt" else pd.DataFrame({"text": texts}))
    config = DataConfig(dataset=str(tmp_path), task=task, max_length=4)
    done = DataProcessor(config, by_bytes).process(DataConnector(config).load())
    for split, blocks in done.splits.items():
        ids = [token for block in blocks["input_ids"] for token in block if token != by_bytes.eos_token_id]
        decoded = by_bytes.decode(ids, clean_up_tokenization_spaces=False)
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


NUMBERS = FRAME.assign(label=[0, 1] * 20)


def shards(folder, first, second, kind):
    for number, frame in enumerate((first, second)):
        written(folder / f"train-{number:05d}-of-00002.{kind}", frame)
    return folder


@pytest.mark.parametrize(
    ("second", "kind", "said"),
    [
        (FRAME[["text"]], "parquet", "00001-of-00002.parquet has the columns text, and train-00000"),
        (FRAME[["text"]], "csv", "00001-of-00002.csv has the columns text, and train-00000.*same columns"),
        (NUMBERS, "parquet", "00000-of-00002.parquet .or one of 1 beside .*label has incompatible types"),
    ],
)
def test_files_of_a_split_that_differ_are_named(second, kind, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(shards(tmp_path, FRAME, second, kind))


def test_whole_numbers_of_one_file_are_what_another_holds_as_fractions(tmp_path):
    mixed = load(shards(tmp_path, NUMBERS, NUMBERS.astype({"label": float}), "parquet"))
    assert mixed.label_names == ("0", "1")


def test_files_that_name_their_classes_otherwise_are_refused(tmp_path):
    for names in (["neg", "pos"], ["pos", "neg"]):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = datasets.Dataset.from_dict({"text": list("abcd"), "label": [0, 1, 0, 1]}, features=features)
        rows.to_parquet(tmp_path / f"train-0000{names.index('pos')}-of-00002.parquet")
    with pytest.raises(DataError, match="names its classes otherwise than train-00000"):
        load(tmp_path)
