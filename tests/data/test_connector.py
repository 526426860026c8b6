"""Every kind of local data, every way to cut and name its splits, and every way in which it can be wrong."""

import ast
import json
from collections import Counter

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from course_lib.config import DataConfig
from course_lib.data import DataConnector, columns, localfiles, plain_files, pydocs
from course_lib.data.cache import column
from course_lib.data.cleaning import clean
from course_lib.errors import DataError


def load(path, seed=42, **options):
    return DataConnector(DataConfig(dataset=str(path), **options), seed).load()


def table(size=40, classes=2, texts="text", labels="label"):
    return pd.DataFrame(
        {texts: [f"words of row {row}" for row in range(size)], labels: [row % classes for row in range(size)]}
    )


def rows_of(data):
    return {split: list(zip(rows["text"], rows["label"], strict=True)) for split, rows in data.splits.items()}


def test_cleaning():
    assert clean("  so &amp; &lt;b&gt;\n\tCafe\u0301 ") == "so & <b> Café"
    assert clean("ÀB  c", lowercase=True) == "àb c"


WRITERS = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "json": lambda frame, path: frame.to_json(path, orient="records"),
    "parquet": lambda frame, path: frame.to_parquet(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_of_file_gives_the_same_data(kind, tmp_path):
    WRITERS[kind](table(), tmp_path / f"rows.{kind}")
    data = load(tmp_path / f"rows.{kind}")
    wanted = [(f"words of row {row}", row % 2) for row in range(40)]
    got = rows_of(data)
    assert sorted(sum(got.values(), [])) == sorted(wanted)
    assert {split: len(rows) for split, rows in got.items()} == {"train": 32, "validation": 4, "test": 4}
    assert data.label_names == ("0", "1") and data.name == f"rows.{kind}"
    assert data.splits["train"].features == {"text": datasets.Value("string"), "label": datasets.Value("int64")}


@pytest.mark.parametrize("kind", [*WRITERS, "txt"])
def test_short_rows_of_a_file_make_few_records(kind, tmp_path):
    """Each record of the cache takes memory in every process that opens it; `datasets` makes one of 1,000 rows."""
    path, size = tmp_path / f"rows.{kind}", 25_000
    WRITERS.get(kind, lambda frame, path: path.write_text("\n".join(frame["text"])))(table(size), path)
    rows = localfiles.read_split([path])
    assert rows[-1]["text"].strip() == f"words of row {size - 1}" and column(rows, "text").num_chunks <= 3


# The shapes of data sets on the Hub: columns, number of classes, whether the classes have names.
SHAPES = {
    "dair-ai/emotion": (6, ["sadness", "joy", "love", "anger", "fear", "surprise"], "validation"),
    "imdb": (2, ["neg", "pos"], None),
    "ag_news": (4, ["World", "Sports", "Business", "Sci/Tech"], None),
    "yelp_polarity": (2, ["1", "2"], None),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_of_the_hub_as_a_folder_of_parquet(name, tmp_path):
    classes, names, validation = SHAPES[name]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    splits = ["train", "test"] + ([validation] if validation else [])
    for split in splits:
        rows = datasets.Dataset.from_pandas(table(60, classes), features=features)
        rows.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    data = load(tmp_path)
    assert data.label_names == tuple(names)
    assert list(data.splits) == ["train", "validation", "test"] if validation else ["train", "test", "validation"]
    assert set(data.splits["train"]["label"]) == set(range(classes))
    assert len(data.splits["test"]) == 60
    assert any("no validation split" in note for note in data.notes) == (validation is None)
    assert not any("no test split" in note for note in data.notes)


def test_shards_of_a_split_are_joined_in_order(tmp_path):
    table(10).to_parquet(tmp_path / "train-00001-of-00002.parquet")
    table(30).to_parquet(tmp_path / "train-00000-of-00002.parquet")
    table(10).to_parquet(tmp_path / "valid.parquet")
    table(10).to_parquet(tmp_path / "test.parquet")
    data = load(tmp_path)
    assert list(data.splits["train"]["text"][:]) == [*table(30)["text"], *table(10)["text"]]
    assert data.notes == ("the split `valid` is the validation split",)


def test_csv_columns_are_text_whatever_they_look_like(tmp_path):
    frame = pd.DataFrame({"text": ["1", "NA", "null", "2020-01-01", "007", "None"] * 4, "label": list("aabbab") * 4})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    data = load(tmp_path / "rows.csv")
    texts = [text for rows in data.splits.values() for text in rows["text"]]
    assert sorted(texts) == sorted(frame["text"])


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["pos", "neg"], ("neg", "pos")),
        ([10, 9], ("9", "10")),
        (["10", "9"], ("9", "10")),
        ([1.0, 0.0], ("0", "1")),
        ([True, False], ("false", "true")),
        (pd.Categorical(["b", "a"]), ("a", "b")),
    ],
)
def test_classes_are_named_and_numbered_in_order(labels, names, tmp_path):
    frame = pd.DataFrame({"text": ["first", "second"], "label": labels})
    frame.to_parquet(tmp_path / "train.parquet")
    frame.to_parquet(tmp_path / "validation.parquet")
    data = load(tmp_path)
    assert data.label_names == names and rows_of(data)["train"] == [("first", 1), ("second", 0)]


def test_columns_are_found_by_usual_names_and_taken_by_given_ones(tmp_path):
    table(texts="Review", labels="sentiment").to_csv(tmp_path / "usual.csv", index=False)
    assert load(tmp_path / "usual.csv").label_names == ("0", "1")
    table(texts="body", labels="stars").to_csv(tmp_path / "own.csv", index=False)
    assert load(tmp_path / "own.csv", text_column="body", label_column="stars").label_names == ("0", "1")


def test_plain_text_is_lines_or_paragraphs(tmp_path):
    (tmp_path / "lines.txt").write_text("\ufefffirst line\nsecond line\nthird line\n\n", encoding="utf-8")
    (tmp_path / "paragraphs.txt").write_text("first\nparagraph\n\nsecond one\r\n\r\nthird\n", encoding="utf-8")
    lines = load(tmp_path / "lines.txt", task="causal_lm", validation_fraction=0.33)
    paragraphs = load(tmp_path / "paragraphs.txt", task="masked_lm", validation_fraction=0.33)
    for data, wanted in (
        (lines, ["first line\n", "second line\n", "third line\n\n"]),
        (paragraphs, ["first\nparagraph\n\n", "second one\r\n\r\n", "third\n"]),
    ):
        assert sorted(text for rows in data.splits.values() for text in rows["text"]) == wanted
        assert data.label_names is None and data.splits["train"].column_names == ["text"]


def test_blank_rows_are_found_wherever_they_are():
    texts = np.array([f"row {row}" for row in range(25_003)], dtype=object)
    blank = np.random.default_rng(0).random(len(texts)) < 0.3
    texts[blank] = np.resize(["", " \t ", "\u2003"], blank.sum())
    rows = datasets.Dataset.from_dict({"text": list(texts)})
    blanks = columns.blank_rows(rows)
    assert len(blanks) == 25_003 and (blanks.to_numpy() == blank).all()
    order = np.random.default_rng(1).permutation(25_003)[:9_999]
    assert (columns.blank_rows(rows.select(order)).to_numpy() == blank[order]).all()


def test_cleaning_is_done_and_can_be_left(tmp_path):
    table(20).assign(text="A &amp;  b").to_csv(tmp_path / "rows.csv", index=False)
    assert load(tmp_path / "rows.csv").splits["train"]["text"][0] == "A & b"
    assert load(tmp_path / "rows.csv", lowercase=True).splits["train"]["text"][0] == "a & b"
    assert load(tmp_path / "rows.csv", clean_text=False).splits["train"]["text"][0] == "A &amp;  b"
    assert load(tmp_path / "rows.csv", clean_text=False, lowercase=True).splits["train"]["text"][0] == "a &amp;  b"


# Splits


def cut(size, fraction, seed, labels=None, part=2**20):
    """The rows that are held out."""
    labels = None if labels is None else pa.chunked_array([pa.array(chunk) for chunk in np.array_split(labels, 3)])
    return np.flatnonzero(columns.cut(size, fraction, seed, labels, part).to_numpy())


@pytest.mark.parametrize("part", [2**20, 300, 7])
def test_a_cut_is_stratified_and_depends_on_the_seed_alone(part):
    labels = np.array([0] * 700 + [1] * 250 + [2] * 49 + [3])
    held_out = cut(1000, 0.1, 1, labels, part)
    assert np.bincount(labels[held_out]).tolist() == [70, 25, 5] and 999 not in held_out
    again, other = cut(1000, 0.1, 1, labels, part), cut(1000, 0.1, 2, labels, part)
    assert np.array_equal(held_out, again) and not np.array_equal(held_out, other)
    assert len(cut(5, 0.1, 0, part=part)) == 1
    assert len(cut(3, 0.9, 0, np.array([0, 1, 2]), part)) == 0


def test_a_cut_draws_each_row_as_often_as_any_other_whatever_the_parts():
    drawn = sum((np.bincount(cut(20, 0.3, seed, part=7), minlength=20) for seed in range(2000)), np.zeros(20, int))
    assert drawn.sum() == 2000 * 6
    assert abs(drawn - 600).max() < 5 * (2000 * 0.3 * 0.7) ** 0.5  # standard deviations of one row's count


def test_a_small_cut_is_that_of_one_permutation_a_class():
    """As it always was: runs that are resumed see the rows that they saw."""
    labels, random = np.arange(1000) % 3, np.random.default_rng(5)
    wanted = [random.permutation(np.flatnonzero(labels == label))[:seats] for label, seats in enumerate((34, 33, 33))]
    assert np.array_equal(cut(1000, 0.1, 5, labels), np.sort(np.concatenate(wanted)))


def test_a_missing_validation_split_is_cut_and_said(tmp_path):
    table(100).to_csv(tmp_path / "rows.csv", index=False)
    data, again, other = (load(tmp_path / "rows.csv", seed, validation_fraction=0.2) for seed in (1, 1, 2))
    assert Counter(data.splits["validation"]["label"]) == {0: 10, 1: 10}
    assert Counter(data.splits["test"]["label"]) == {0: 10, 1: 10} and len(data.splits["train"]) == 60
    assert sorted(text for rows in data.splits.values() for text in rows["text"]) == sorted(table(100)["text"])
    assert rows_of(data) == rows_of(again) != rows_of(other)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    assert data.notes == (
        "no validation split: 20 rows (20% in each class, seed 1) are cut from the training split",
        "no test split: 20 rows (20% in each class, seed 1) are cut from the training split",
    )


def test_a_test_split_alone_leaves_the_validation_rows_as_they_were(tmp_path):
    """Runs on data that have a test split go on with the rows that they had."""
    for split in ("train", "test"):
        table(100).to_csv(tmp_path / f"{split}.csv", index=False)
    table(100).to_csv(tmp_path / "one.csv", index=False)
    with_test, alone = load(tmp_path), load(tmp_path / "one.csv")
    assert len(with_test.splits["test"]) == 100 and len(with_test.splits["train"]) == 90
    assert rows_of(with_test)["validation"] == rows_of(alone)["validation"]


def test_few_rows_make_no_test_split_and_that_is_said(tmp_path):
    table(4).to_csv(tmp_path / "rows.csv", index=False)
    data = load(tmp_path / "rows.csv")
    assert {split: len(rows) for split, rows in data.splits.items()} == {"train": 2, "validation": 1, "test": 1}
    table(3).to_csv(tmp_path / "rows.csv", index=False)
    data = load(tmp_path / "rows.csv")
    assert list(data.splits) == ["train", "validation"]
    assert data.notes[1] == (
        "no test split, and 3 rows are too few to cut one: the validation split, by which the "
        "best model is chosen, stands in for it"
    )


def test_samples_are_limited_to_the_first_rows_of_each_split(tmp_path):
    for split in ("train", "validation", "test"):
        table(50).to_csv(tmp_path / f"{split}.csv", index=False)
    data = load(tmp_path, max_train_samples=10, max_eval_samples=5)
    assert {split: len(rows) for split, rows in data.splits.items()} == {"train": 10, "validation": 5, "test": 5}
    assert list(data.splits["train"]["text"][:3]) == ["words of row 0", "words of row 1", "words of row 2"]
    assert data.notes == ()


@pytest.mark.parametrize("classes", [2, 5])
def test_a_limit_of_sorted_rows_takes_every_class(classes, tmp_path):
    for split in ("train", "validation", "test"):
        table(50, classes).sort_values("label", kind="stable").to_csv(tmp_path / f"{split}.csv", index=False)
    data, again = [load(tmp_path, max_train_samples=10, max_eval_samples=10) for _ in range(2)]
    for rows in data.splits.values():
        assert Counter(rows["label"]) == dict.fromkeys(range(classes), 10 // classes)
    assert len(data.notes) == 3 and data.fingerprint == again.fingerprint
    assert "the first 10 rows of the test split have 1 of its" in data.notes[2]
    assert load(tmp_path, max_train_samples=1).notes == (f"the training rows have 1 of the {classes} classes",)


def test_splits_go_by_the_names_that_are_given(tmp_path):
    for split in ("learn", "check"):
        table(50).to_csv(tmp_path / f"{split}.csv", index=False)
    data = load(tmp_path, train_split="learn", validation_split="check", test_split="check")
    assert list(data.splits) == ["train", "validation", "test"]
    assert data.notes == ("validation and test are the same split, `check`",)


def test_the_fingerprint_names_texts_labels_and_order(tmp_path):
    prints = set()
    frame = table(40)
    for number, variant in enumerate(
        [frame, frame[::-1], frame.assign(label=1 - frame["label"]), frame.assign(text=frame["text"] + "!")]
    ):
        variant.to_csv(tmp_path / f"{number}.csv", index=False)
        prints.add(load(tmp_path / f"{number}.csv").fingerprint)
    assert len(prints) == 4
    frame.to_parquet(tmp_path / "same.parquet")
    assert load(tmp_path / "same.parquet").fingerprint in prints


# The machine's own Python


def test_docstrings_stand_in_the_order_of_the_source():
    source = ['"top"', "def a():", ' "in a"', "try:", " pass", "except E:", " class B:", '  "in B"']
    assert list(pydocs.docstrings(ast.parse("\n".join(source)))) == ["top", "in a", "in B"]


def test_pydocs(monkeypatch):
    monkeypatch.setattr(pydocs, "documents", lambda: (f"topic {number}\n\nis   this" for number in range(30)))
    monkeypatch.setattr(pydocs.sysconfig, "get_path", lambda _: "of this test")
    data = load("pydocs", task="causal_lm")
    assert {split: len(rows) for split, rows in data.splits.items()} == {"train": 24, "validation": 3, "test": 3}
    assert "PSF licence" in data.source and data.splits["train"]["text"][0] == "topic 0 is this"


def test_the_documents_of_this_python():
    documents = list(pydocs.documents())
    assert len(documents) > 400 and sum(map(len, documents)) > 1_500_000
    assert documents[0].startswith('The "assert" statement')
    assert len(set(documents)) == len(documents)


# What can be wrong


def write(folder, files):
    """Write files, given as data frames, objects or bytes, by name."""
    for name, content in files.items():
        if isinstance(content, pd.DataFrame):
            WRITERS[name.rpartition(".")[2]](content, folder / name)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def changed(row, column, value):
    frame = table().astype(object)
    frame.loc[row, column] = value
    return frame


WRONG = {
    "latin-1": (
        {"train.csv": "text,label\nwell,0\ncaf\xe9,1\n".encode("latin-1")},
        {},
        r"train\.csv is not UTF-8: give --encoding cp1252 .it has `.*café",
    ),
    "Cyrillic": (
        {"train.csv": "text,label\nПривет как дела,0\nочень хорошо всё,1\n".encode("cp1251")},
        {},
        r"is not UTF-8: give --encoding .*cp1251 .it has `.*Привет",
    ),
    "another encoding": (
        {"train.csv": "text,label\ncaf\xe9,0\n".encode("latin-1")},
        {"encoding": "utf-8"},
        r"is not utf-8 \(.*byte 0xe9.*name another with --encoding",
    ),
    "not the encoding": ({"train.csv": table()}, {"encoding": "utf-32"}, "train.csv is not utf-32 .*: name another"),
    "no encoding": ({"train.csv": table()}, {"encoding": "cp1253b"}, "no encoding `cp1253b`: did you mean `cp12"),
    "encoding of Parquet": ({"train.parquet": table()}, {"encoding": "cp1252"}, "encoding `cp1252` has no meaning for"),
    "separator of JSON": ({"train.jsonl": table()}, {"separator": ";"}, "separator `;` has no meaning .* CSV files"),
    "two separators": (
        {"train.csv": b"text;a,label\n" + b"x;y,z\n" * 9},
        {},
        "could be separated by `,` or by `;`: say by which with --separator",
    ),
    "fractions": (
        {"train.csv": table(60).assign(label=np.linspace(0, 1, 60), stars=[1, 2, 3] * 20)},
        {},
        "column `label` .* has 60 different values in 60 rows .*numbers to predict, and regression is not "
        "here .*--label_column: stars would do",
    ),
    "sentences": (
        {"train.csv": table(60).assign(label=[f"it is about row {row}" for row in range(60)])},
        {},
        "texts, not classes: name a column of classes with --label_column; no other column here would do",
    ),
    "identifiers": (
        {"train.csv": table(60).assign(label=[f"id{row}" for row in range(60)])},
        {},
        "nearly as many as rows, so no classes",
    ),
    "swapped": (
        {"train.csv": table(60)},
        {"text_column": "label", "label_column": "text"},
        "column `label` looks like the classes: are the two swapped. Give --text_column text --label_col",
    ),
    "all cut off": ({"train.csv": table()}, {"validation_fraction": 0.5}, "cut off twice.*give less than 0.5"),
    "empty file": ({"train.csv": b""}, {}, r"train\.csv has no rows"),
    "header only": ({"train.csv": b"text,label\n"}, {}, r"train\.csv has no rows"),
    "empty parquet": ({"train.parquet": table(0)}, {}, r"train\.parquet has no rows"),
    "empty validation": ({"train.csv": table(), "validation.csv": table(0)}, {}, r"validation\.csv has no rows"),
    "broken json": (
        {"train.jsonl": b'{"text": "a", "label": \n'},
        {},
        r"train\.jsonl is no JSON",
    ),
    "broken parquet": ({"train.parquet": b"PAR?"}, {}, r"train\.parquet cannot be read as parquet"),
    "open quote": (
        {"train.csv": b'text,label\n"a,0\n'},
        {},
        r"train\.csv, line 2: its quotes cannot be read .*--quoting none",
    ),
    "one long row": (
        {"train.csv": b"text,label\na,0\nb,c,1\n"},
        {},
        "line 3: it has 3 fields, and the header 2: mend that line",
    ),
    "long rows": (
        {"train.csv": b"text,label\na,z,0\nb,c,1\n"},
        {},
        "line 2: it has 3 fields, and the header 2: mend that line",
    ),
    "no column text": (
        {"train.csv": table(texts="body")},
        {},
        "has the columns body, label, and none is known to be the text: name it with --text_column",
    ),
    "two columns text": (
        {"train.csv": table().assign(Review="again")},
        {},
        "text and Review could each be the text: name it with --text_column",
    ),
    "no column label": (
        {"train.csv": table(labels="stars")},
        {},
        "none is known to be the label: name it with --label_column",
    ),
    "column misspelt": (
        {"train.csv": table(texts="body")},
        {"text_column": "bodi"},
        "has no column `bodi`, only body, label: did you mean `body`",
    ),
    "label column misspelt": ({"train.csv": table()}, {"label_column": "lable"}, "no column `lable`.*you mean `label`"),
    "text of numbers": ({"train.parquet": table().assign(text=1.5)}, {}, "column `text` .* holds double, not text"),
    "labels of lists": (
        {"train.jsonl": b'{"text": "a", "label": [1]}\n'},
        {},
        "column `label` .* not one class per row",
    ),
    "labels of two types": (
        {"train.jsonl": b'{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n'},
        {},
        "column `label` of the train split holds lists, objects or values of several types",
    ),
    "fractional labels": ({"train.parquet": table().assign(label=0.5)}, {}, r"holds 0\.5 in row 0 \(from 0\)"),
    "label missing": (
        {"train.csv": changed(7, "label", None)},
        {},
        r"row 7 \(from 0\) of the train split has no label in column `label`: give every row a class$",
    ),
    "label NaN": ({"train.parquet": table().assign(label=[0.0] * 39 + [float("nan")])}, {}, "row 39 .* has no label"),
    "label null": ({"train.jsonl": changed(3, "label", None)}, {}, "row 3 .* has no label"),
    "label blank": ({"train.csv": table().assign(label=["a"] * 38 + [" ", "b"])}, {}, "row 38 .* has no label"),
    "label hidden": (
        {"train.csv": table(), "test.parquet": changed(5, "label", -1).astype({"label": int})},
        {},
        "`-1` in row 5 .* of the test split does not occur in the training split: it often stands for no",
    ),
    "all labels hidden": (
        {"train.csv": table(), "test.parquet": table().assign(label=-1)},
        {},
        "the test split has no labels: every row has `-1`: name another split with --test_split",
    ),
    "label unseen": (
        {"train.csv": table(), "test.csv": table(classes=3)},
        {},
        r"label `2` in row 2 \(from 0\) of the test split does not occur in the training split",
    ),
    "one class": ({"train.csv": table(classes=1)}, {}, "every row of the training split has the label `0`"),
    "text missing": ({"train.csv": changed(11, "text", None)}, {}, r"row 11 \(from 0\) of the train split has no text"),
    "text blank": ({"train.jsonl": changed(12, "text", " &nbsp; ")}, {}, "row 12 .* has no text in column `text`"),
    "all text blank": ({"train.csv": table().assign(text=" ")}, {"task": "causal_lm"}, "has no text in column `text`"),
    "text without classes": ({"train.txt": b"a\nb\n"}, {}, "no column but `text`, so no classes: use --task causal_lm"),
    "split misspelt": (
        {"train.csv": table(), "dev.csv": table()},
        {"validation_split": "dew"},
        "has no split `dew`: did you mean `dev`",
    ),
    "no train split": ({"test.csv": table()}, {}, "has no split `train`: choose from `test`"),
    "too few to cut": ({"train.csv": table(2)}, {}, "has 2 rows, too few to cut a validation split from"),
    "two kinds": (
        {"train.csv": table(), "train.jsonl": table()},
        {},
        r"holds the split `train` more than once \(train\.csv, train\.jsonl\): keep one of them",
    ),
    "no data": ({"notes.md": b"words"}, {}, "holds no data: it needs train, validation and test files"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(case, tmp_path):
    files, options, said = WRONG[case]
    write(tmp_path, files)
    with pytest.raises(DataError, match=said) as caught:
        load(tmp_path, **options)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found_or_named(separator, tmp_path):
    frame = table().assign(text=[f"so, {row}; a|b\tand “more”" for row in range(40)])
    frame.to_csv(tmp_path / "rows.csv", index=False, sep=separator)
    name = {"\t": "tab"}.get(separator, separator)
    found, named = (
        load(tmp_path / "rows.csv", clean_text=False),
        load(tmp_path / "rows.csv", separator=name, clean_text=False),
    )
    assert sorted(sum(rows_of(found).values(), [])) == sorted(zip(frame["text"], frame["label"], strict=True))
    assert rows_of(found) == rows_of(named)
    with pytest.raises(DataError, match="columns|line 2"):
        load(tmp_path / "rows.csv", separator="|" if separator != "|" else ";")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_encodings_are_found_by_their_mark_or_named(encoding, kind, tmp_path):
    frame = table().assign(text=[f"un café, {row}" for row in range(40)])
    path = tmp_path / f"rows.{kind}"
    text = {
        "csv": frame.to_csv(index=False),
        "jsonl": frame.to_json(orient="records", lines=True, force_ascii=False),
        "txt": "\n".join(frame["text"]),
    }[kind]
    path.write_bytes(text.encode(encoding))
    data = load(path, task="causal_lm", encoding="cp1252" if encoding == "cp1252" else None)
    texts = [text.removesuffix("\n") for rows in data.splits.values() for text in rows["text"]]
    assert sorted(texts) == sorted(frame["text"])


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-32", "cp1252"])
def test_lines_keep_their_ends(encoding, tmp_path):
    text, path = "un café\r\nund Bäume\rund\n\n" * 5 + "Ende", tmp_path / "rows.txt"
    path.write_bytes(text.encode(encoding))
    named = None if encoding in ("utf-8", "utf-16", "utf-32") else encoding
    assert list(plain_files.read_lines(path, named)) == [*["un café\r\n", "und Bäume\r", "und\n", "\n"] * 5, "Ende"]
    path.write_bytes(text.encode("utf-16-le") + b"\x00\xdc" + "abc".encode("utf-16-le"))  # half a character
    with pytest.raises(DataError, match=r"rows.txt is not utf-16-le \("):
        list(plain_files.read_lines(path, "utf-16-le"))


def test_a_separator_in_a_long_text_is_found_too(tmp_path):
    """Where the sample ends within a row, that row says nothing; a field of any length is read."""
    path = tmp_path / "rows.csv"
    path.write_text("text;label\n" + "".join(f"{'long, ' * 40_000}{row};{row % 2}\n" for row in range(4)))
    assert load(path).label_names == ("0", "1")


def test_few_values_are_classes_whatever_they_look_like(tmp_path):
    stars = table(200).assign(label=[row % 9 / 2 for row in range(200)])
    stars.to_csv(tmp_path / "stars.csv", index=False)
    assert len(load(tmp_path / "stars.csv").label_names) == 9
    sentences = table(200).assign(label=[f"a class of four words {row % 12}" for row in range(200)])
    sentences.to_csv(tmp_path / "sentences.csv", index=False)
    assert len(load(tmp_path / "sentences.csv").label_names) == 12
    intents = table(200).assign(label=[f"intent {row % 80}" for row in range(200)])
    intents.to_csv(tmp_path / "intents.csv", index=False)
    assert len(load(tmp_path / "intents.csv").label_names) == 80


def test_the_row_that_is_named_is_the_one_in_the_file(tmp_path):
    changed(33, "text", "").to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="row 33 "):
        load(tmp_path / "rows.csv", max_train_samples=5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nowhere/deep/down.csv", {}, r"no file or folder nowhere/deep/down\.csv"),
        ("./rows.csw", {}, r"no file or folder \./rows\.csw: did you mean `rows\.csv`"),
        ("picture.png", {}, r"picture\.png is of a kind that is not read here: give \.csv, \.tsv"),
        ("pydocs", {}, "pydocs has no classes: use --task causal_lm or masked_lm"),
        ("tweets", {"dataset_config": "plain"}, "dataset_config `plain` has no meaning for `tweets`"),
        ("tweets", {"train_split": "trian"}, "tweets has no split `trian`: did you mean `train`"),
    ],
)
def test_names_that_mean_nothing_here(name, options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.png").write_bytes(b"png")
    table().to_csv("rows.csv", index=False)
    with pytest.raises(DataError, match=said):
        load(name, **options)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot write .*/file/course/.*: set HF_DATASETS_CACHE to a folder"):
        load("tweets")
