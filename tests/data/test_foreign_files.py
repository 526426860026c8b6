"""Files as other programs write them: read as they are, or refused with the line and with what settles it."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import zipfile

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from course_lib.config import DataConfig
from course_lib.data import DataConnector, DataProcessor, localfiles
from course_lib.data.delimited import QUOTINGS, Ambiguous, Rows
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


def read(text, separator=",", quoting=None):
    return list(Rows(io.StringIO(text, newline=""), separator, quoting))


def test_whatever_a_writer_quotes_is_read_back():
    """10,000 tables of every character that means something, by each of the ways in which Python's csv quotes."""
    random, letters = np.random.default_rng(0), ["a", " ", '"', ",", "\n", "\r\n", "\\", "é", "", "'"]
    ambiguous = 0
    for number in range(10_000):
        width = 1 + number % 3
        table = [
            ["".join(random.choice(letters, random.integers(1, 5))) for _ in range(width)]
            for _ in range(random.integers(1, 4))
        ]
        table = [row for row in table if any(field.strip("\r\n") for field in row)]
        out = io.StringIO(newline="")
        quoting = (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)[number % 2]
        csv.writer(out, quoting=quoting).writerows([[f"column {place}" for place in range(width)], *table])
        try:
            assert read(out.getvalue())[1:] == table, out.getvalue()
        except Ambiguous:
            ambiguous += 1
            assert (
                read(out.getvalue(), quoting="minimal")[1:] == table
                or '\\""' in out.getvalue()
                or ' "' in (out.getvalue())
            ), out.getvalue()
    assert 0 < ambiguous < 4000, "what could be read in another way is refused"


AMBIGUOUS = {
    "quotes are characters": ("tsv", "label\ttext\n" + 'ham\t"Hello there\nspam\tbuy now\n' * 20, 2, {"none"}),
    "quotes begin a text": ("tsv", "label\ttext\n" + '1\t"A good" film\n0\tbad\n' * 20, 2, {"none"}),
    "quotes may be part": (
        "tsv",
        "label\ttext\n" + '0\tbad\n1\t"A good film"\n' * 20,
        3,
        {"none", "minimal", "escaped"},
    ),
    "lines in quotes": ("tsv", "label\ttext\n" + '1\t"A good\nfilm"\n0\tbad\n' * 20, 2, {"minimal", "escaped"}),
    "backslashes": ("csv", "text,label\nfine,1\n" + '"he said \\"hi\\", ok",1\n"b",0\n' * 20, 3, {"escaped"}),
    "a backslash at the end": ("csv", "text,label\n" + '"C:\\dir\\",1\n"b, c",0\n' * 20, 2, {"minimal"}),
    "rows or one text": (
        "csv",
        'text,label\n"Hello I said,1\nmid row,0\nmid row,1\nhe is 5",0\nlast,1\n',
        2,
        {"none", "minimal", "escaped"},
    ),
    "blanks": ("csv", "label, text\n" + 'pos, "a, b"\nneg, "c"\n' * 20, 2, {"minimal", "escaped"}),
    "some in quotes": ("csv", "text,label\n" + '5" pipe,pos\n"a, b",neg\n' * 20, 2, {"minimal", "escaped"}),
    "a quote in the middle": ("csv", 'text,label\n"a, b",neg\n' + '5" pipe,pos\n' * 20, 3, {"minimal", "escaped"}),
    "no end": ("csv", 'text,label\nfine,1\n"no end,0\nand on,1\n', 3, {"none"}),
    "nothing fits": ("csv", 'text,label\n"a" b, "c,0\n', 2, set()),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_what_rfc_4180_leaves_open_is_refused_with_its_line_and_the_options_that_read_it(case, tmp_path):
    kind, text, line, settle = AMBIGUOUS[case]
    path = written(tmp_path / f"rows.{kind}", text)
    with pytest.raises(DataError, match=rf"rows\.{kind}, line {line}: ") as caught:
        load(path)
    assert {name for name in QUOTINGS if f"--quoting {name}" in str(caught.value)} == settle
    for quoting in QUOTINGS:
        if quoting in settle:
            localfiles.read_split([path], localfiles.Options(quoting=quoting))
        else:
            with pytest.raises(DataError, match=", line "):
                localfiles.read_split([path], localfiles.Options(quoting=quoting))


def test_the_options_read_what_they_say(tmp_path):
    def texts(kind, text, quoting):
        rows = localfiles.read_split([written(tmp_path / f"a.{kind}", text)], localfiles.Options(quoting=quoting)).rows
        return rows["text"][:]

    assert texts("tsv", 'text\tlabel\n"a\t1\n', "none") == ['"a']
    assert texts("csv", 'text,label\n"a ""b"", c",1\n5" d,0\n', "minimal") == ['a "b", c', '5" d']
    assert texts("csv", 'text,label\n"a \\"b\\", c",1\n"\\\\ d",0\n', "escaped") == ['a "b", c', "\\ d"]


def test_quotes_that_all_readings_leave_alone_are_no_question(tmp_path):
    path = written(tmp_path / "rows.csv", "text,label\n" + '5" pipe,pos\nsay "hi" now,neg\n' * 20)
    assert rows_of(load(path))[0] == ('5" pipe', "pos")


def test_texts_of_several_lines_are_counted(tmp_path):
    path = written(tmp_path / "rows.csv", FRAME.to_csv(index=False) + '"Dear all,\n\nthat is, all",pos\n')
    data = load(path)
    assert len(rows_of(data)) == 41 and data.notes[0] == (
        "rows.csv: 1 of its rows span lines, within quotes (the first: lines 42 to 44)"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# exported 2026\n" + FRAME.to_csv(index=False), r"line 2: .*is line 1 .*# exported 2026.* a comment"),
        ("My survey\n\n" + FRAME.to_csv(index=False), r"line 3: .*is line 1 .*My survey.* a title"),
        (FRAME.to_csv(index=False, header=False), "is the first line a row, and no header"),
        ("spam,buy\n" + "ham,hello\nspam,now\n" * 9, "is the first line a row, and no header"),
        (FRAME.to_csv(index=False) * 2, "line 42 is line 1 again: .*files were joined: delete"),
        ("text,text,label\na,b,c\n", "two columns `text`"),
        ("text,label\nhello\nworld,1\n", "line 2: it has 1 field, and the header 2"),
    ],
)
def test_lines_that_are_no_rows_are_named(text, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "rows.csv", text))


def test_what_excel_adds_is_understood(tmp_path):
    frame = FRAME.to_csv(index=False, sep=";", lineterminator="\r\n")
    assert rows_of(load(written(tmp_path / "a.csv", "\ufeffsep=;\r\n" + frame))) == ROWS
    blank = FRAME.rename(columns={"label": " label "}).assign(more=None).to_csv(index=False).replace(",more", ",")
    assert rows_of(load(written(tmp_path / "b.csv", blank))) == ROWS, "blanks around a name; a comma at each line's end"


# Encodings


@pytest.mark.parametrize(
    ("text", "encoding", "word"),
    [
        ("très déçu, ça va être génial", "latin-1", "très"),
        ("très déçu, ça va", "latin-1", "très"),
        ("el señor está aquí mañana", "latin-1", "señor"),
        ("naïve", "cp1252", "naïve"),
        ("Ærø og Åben", "cp1252", "Ærø"),
        ("não é bom, ação", "cp1252", "não"),
        ("it’s “fine”", "cp1252", "it’s"),
        ("schöne Grüße", "cp1252", "schöne"),
        ("zażółć gęślą jaźń", "cp1250", "zażółć"),
        ("Příliš žluťoučký kůň", "cp1250", "Příliš"),
        ("Привет как дела, очень хорошо", "cp1251", "Привет"),
        ("καλημέρα κόσμε", "cp1253", "καλημέρα"),
        ("こんにちは世界、悪い映画です", "shift_jis", "こんにちは世界"),
        ("你好世界电影很好", "gb18030", "你好世界电影很好"),
    ],
)
def test_an_encoding_is_named_with_a_word_as_it_reads_it(text, encoding, word, tmp_path):
    rows = f"{text.replace(',', ';')},1\nplain,0\n" * 20
    path = written(tmp_path / "a.csv", f"text,label\n{rows}".encode(encoding))
    with pytest.raises(DataError, match=f"`{word}` as ") as caught:
        load(path)
    named = str(caught.value).partition(f"`{word}` as ")[2].split(",")[0].split(";")[0]
    assert f"--encoding {named}" in str(caught.value) or f" or {named}" in str(caught.value)
    data = load(path, encoding=named, clean_text=False)
    assert any(split["text"][0] == text.replace(",", ";") for split in data.splits.values())


# JSON


def records():
    return FRAME.to_dict("records")


JSON = {
    "lines": FRAME.to_json(orient="records", lines=True),
    "a list": json.dumps(records()),
    "an indented list": json.dumps(records(), indent=1),
    "indented objects": "\n".join(json.dumps(row, indent=1) for row in records()),
    "columns of lists": json.dumps(FRAME.to_dict("list")),
    "pandas' own": FRAME.to_json(),
    "index": FRAME.to_json(orient="index"),
    "split": FRAME.to_json(orient="split"),
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
        ('{"text": "a", "label": 1}\nnull\n', "line 2: it is null, not an object"),
        ('{"text": "a", "label": 1}\n{"text": "b", \n', "line 2: it is no JSON"),
        ('{"text": "a", "label": 1}\n[1, 2]\n', "line 2: it is a list, not an object"),
        ("1\n2\n", "line 1: it is a number, not an object"),
        ('[{"text": "a"}, "b"]', r"row 1 \(from 0\): it is a text, not an object"),
        ('{"text": "fine", "label": 1}\n{"text": "a \\ud83d", "label": 1}\n', r"half of a surrogate pair in row 1"),
        ('{"label": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "too many levels deep"),
        (
            json.dumps({"train": records(), "test": records()}),
            r"holds several tables \(train, test\): give each split a f",
        ),
        (json.dumps({"a": {"x": 1}, "b": {"y": 2}}), "is an object of objects, not rows"),
        ("{}\n{}\n", "no column is text or numbers"),
        ('"text"', "line 1: it is a text|is a text, not rows"),
    ],
)
def test_json_that_is_no_rows_is_named(text, said, tmp_path):
    with pytest.raises(DataError, match=said) as caught:
        load(written(tmp_path / "rows.jsonl", text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "task", "said"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "masked_lm", "apply_chat_template"),
        ({"id": "a", "chosen": [{"role": "user", "content": "hi"}]}, "causal_lm", r"row\['chosen'\]"),
        ({"conversations": [{"from": "human", "value": "hi"}], "id": "a"}, "masked_lm", r"row\['conversations'\]"),
        ({"premise": "a", "hypothesis": "b", "label": 1}, "classification", r'row\["premise"\] .* row\["hypothesis"\]'),
        ({"instruction": "a", "output": "b"}, "causal_lm", "instruction and output are two texts per row"),
        ({"text": ["a", "b"], "label": 1}, "classification", r"column `text` .* holds lists, not text.*\.join"),
    ],
)
def test_columns_of_another_form_are_named_with_the_line_that_converts_them(row, task, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "rows.jsonl", f"{json.dumps(row)}\n" * 9), task=task)


# Where data lies


def zipped(*names):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), FRAME.to_csv(index=False))
    return out.getvalue()


PACKED = {
    "rows.csv.gz": gzip.compress,
    "rows.csv.bz2": bz2.compress,
    "rows.csv.xz": lzma.compress,
    "rows.csv.zst": lambda text: pa.compress(text, codec="zstd", asbytes=True),
    "rows.csv.zip": lambda text: zipped("inner/reviews.csv"),
    "rows.zip": lambda text: zipped("reviews.csv"),
}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_files_are_read(name, tmp_path):
    content = PACKED[name](FRAME.to_csv(index=False).encode())
    assert rows_of(load(written(tmp_path / name, content))) == ROWS
    written(tmp_path / "cut" / name, content[: len(content) // 2])
    with pytest.raises(DataError, match="cannot be read as csv|is no zip archive"):
        load(tmp_path / "cut" / name)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.zip", zipped("a.csv", "b.csv"), "holds 2 files: unzip it"),
        ("rows.xlsx", b"PK\x03\x04", r"convert it: pandas\.read_excel\('.*rows\.xlsx'\)\.to_csv\('.*rows\.csv'"),
        ("rows.csv", b"PK\x03\x04", "is a spreadsheet or another zip archive"),
        ("rows.csv", b"PAR1abc", "is Parquet: name it by its own suffix"),
        ("rows.csv", b"<!DOCTYPE html><html>", "is a web page, perhaps an error that was saved"),
        (
            "rows.csv",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
            "is a Git LFS pointer.*git lfs pull",
        ),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer"),
        ("rows.parquet.gz", gzip.compress(b"PAR1", mtime=0), "is parquet in another compression: unpack it"),
        ("rows.tar", b"", "is an archive: unpack it"),
        ("rows.csv.gz", gzip.compress(b"", mtime=0), r"rows\.csv\.gz is empty"),
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


def test_a_folder_of_texts_per_class_is_named_with_the_line_that_makes_a_table(tmp_path, monkeypatch):
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            for number in range(6):
                written(tmp_path / "imdb" / split / label / f"{number}.txt", f"{label} text {number}")
    with pytest.raises(DataError, match=r"perhaps one per class \(neg, pos\): make a table") as caught:
        load(tmp_path / "imdb")
    monkeypatch.chdir(tmp_path)
    exec(f"import pathlib, pandas\n{str(caught.value).partition('first: ')[2]}")
    assert len(rows_of(load("train.csv"))) == 24
    assert load(tmp_path / "imdb", task="causal_lm").splits["train"]["text"][0].startswith(("neg", "pos"))


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
    path = written(tmp_path / "a.csv", 'text,label\n"a",1\n"b",0\n' * 1 + "c,1\nd,0\n" * 9)
    as_text = [
        localfiles.read_split([path], localfiles.Options(quoting=quoting)).rows["text"][0]
        for quoting in (None, "none", None)
    ]
    assert as_text == ["a", '"a"', "a"]


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

    with pytest.raises(DataError, match="00001-of-00002.parquet has no column `label`, and train-00000"):
        load(shards("a", FRAME, FRAME[["text"]], "parquet"))
    with pytest.raises(DataError, match="00001-of-00002.csv has the columns text, and train-00000.*same header"):
        load(shards("b", FRAME, FRAME[["text"]], "csv"))
    numbers = FRAME.assign(label=[0, 1] * 20)
    with pytest.raises(DataError, match=r"column `label` .* holds \w+ in one file and int64, not one class"):
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
