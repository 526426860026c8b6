"""Every kind of local data, every way to cut and name its splits, and every way in which it can be wrong."""

from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml

from course_lib.data import columns, localfiles, plain_files, pydocs
from course_lib.data.cache import column
from course_lib.data.cleaning import clean
from course_lib.errors import DataError
from tests.data.local_cases import WRITERS, load, rows_of, sizes_of, table, texts_of, written


def test_cleaning():
    assert clean("  so &amp; &lt;b&gt;\n\tCafe\u0301 ") == "so & <b> Café"
    assert clean("ÀB  c", lowercase=True) == "àb c"


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if kind != "txt"])
def test_each_kind_of_file_gives_the_same_data(kind, tmp_path):
    data = load(written(tmp_path / f"rows.{kind}", table()))
    assert sorted(sum(rows_of(data).values(), [])) == sorted((f"words of row {row}", row % 2) for row in range(40))
    assert sizes_of(data) == {"train": 32, "validation": 4, "test": 4}
    assert data.label_names == ("0", "1") and data.name == f"rows.{kind}"
    assert data.splits["train"].features == {"text": datasets.Value("string"), "label": datasets.Value("int64")}


@pytest.mark.parametrize("kind", WRITERS)
def test_short_rows_of_a_file_make_few_records(kind, tmp_path):
    """Each record of the cache takes memory in every process that opens it; `datasets` makes one of 1,000 rows."""
    rows = localfiles.read_split([written(tmp_path / f"rows.{kind}", table(25_000))])
    assert rows[-1]["text"].strip() == "words of row 24999" and column(rows, "text").num_chunks <= 3


@pytest.mark.parametrize("splits", [("train", "validation", "test"), ("train", "test")])
def test_a_data_set_of_the_hub_as_a_folder_of_parquet(splits, tmp_path):
    names = ["World", "Sports", "Business", "Sci/Tech"]
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    for split in splits:
        rows = datasets.Dataset.from_pandas(table(60, 4), features=features)
        rows.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    data = load(tmp_path)
    assert data.label_names == tuple(names) and set(data.splits["train"]["label"]) == set(range(4))
    assert set(data.splits) == {"train", "validation", "test"} and len(data.splits["test"]) == 60
    assert [note[:19] for note in data.notes] == ["no validation split"] * (len(splits) == 2)


def test_shards_of_a_split_are_joined_in_order(tmp_path):
    written(tmp_path / "train-00001-of-00002.parquet", table(10))
    written(tmp_path / "train-00000-of-00002.parquet", table(30))
    for split in ("valid", "test"):
        written(tmp_path / f"{split}.parquet", table(10))
    data = load(tmp_path)
    assert list(data.splits["train"]["text"][:]) == [*table(30)["text"], *table(10)["text"]]
    assert data.notes == ("the split `valid` is the validation split",)


def test_csv_columns_are_text_whatever_they_look_like(tmp_path):
    texts = ["1", "NA", "null", "2020-01-01", "007", "None"] * 4
    data = load(written(tmp_path / "rows.csv", pd.DataFrame({"text": texts, "label": list("aabbab") * 4})))
    assert texts_of(data) == sorted(texts)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["pos", "neg"], ("neg", "pos")),
        ([10, 9], ("9", "10")),
        ([1.0, 0.0], ("0", "1")),
        (pd.Categorical(["b", "a"]), ("a", "b")),
    ],
)
def test_classes_are_named_and_numbered_in_order(labels, names, tmp_path):
    for split in ("train", "validation"):
        written(tmp_path / f"{split}.parquet", pd.DataFrame({"text": ["first", "second"], "label": labels}))
    data = load(tmp_path)
    assert data.label_names == names and rows_of(data)["train"] == [("first", 1), ("second", 0)]


def test_columns_are_found_by_usual_names_and_taken_by_given_ones(tmp_path):
    assert load(written(tmp_path / "usual.csv", table(texts="Review", labels="sentiment"))).label_names == ("0", "1")
    own = written(tmp_path / "own.csv", table(texts="body", labels="stars"))
    assert load(own, text_column="body", label_column="stars").label_names == ("0", "1")


@pytest.mark.parametrize(
    ("task", "before", "wanted"),
    [
        ("causal_lm", "\ufeff", ["first line\n", "second\n", "third\n\n"]),
        ("masked_lm", "", ["first\nparagraph\n\n", "second one\r\n\r\n", "third\n"]),
    ],
    ids=["lines", "paragraphs"],
)
def test_plain_text_is_lines_or_paragraphs(task, before, wanted, tmp_path):
    data = load(written(tmp_path / "rows.txt", before + "".join(wanted)), task=task, validation_fraction=0.33)
    assert texts_of(data) == wanted
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
    path = written(tmp_path / "rows.csv", table(20).assign(text="A &amp;  b"))
    assert load(path).splits["train"]["text"][0] == "A & b"
    assert load(path, lowercase=True).splits["train"]["text"][0] == "a & b"
    assert load(path, clean_text=False, lowercase=True).splits["train"]["text"][0] == "a &amp;  b"


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
    path = written(tmp_path / "rows.csv", table(100))
    data, again, other = (load(path, seed, validation_fraction=0.2) for seed in (1, 1, 2))
    for split, size in (("train", 30), ("validation", 10), ("test", 10)):
        assert Counter(data.splits[split]["label"]) == {0: size, 1: size}
    assert texts_of(data) == sorted(table(100)["text"])
    assert rows_of(data) == rows_of(again) != rows_of(other)
    assert data.fingerprint == again.fingerprint != other.fingerprint
    cut_off = "split: 20 rows (20% in each class, seed 1) are cut from the training split"
    assert data.notes == (f"no validation {cut_off}", f"no test {cut_off}")


def test_a_test_split_alone_leaves_the_validation_rows_as_they_were(tmp_path):
    """Runs on data that have a test split go on with the rows that they had."""
    train, _ = (written(tmp_path / f"{split}.csv", table(100)) for split in ("train", "test"))
    with_test, alone = load(tmp_path), load(train)
    assert sizes_of(with_test) == {"train": 90, "validation": 10, "test": 100}
    assert rows_of(with_test)["validation"] == rows_of(alone)["validation"]


def test_few_rows_make_no_test_split_and_that_is_said(tmp_path):
    data = load(written(tmp_path / "rows.csv", table(4)))
    assert sizes_of(data) == {"train": 2, "validation": 1, "test": 1}
    data = load(written(tmp_path / "rows.csv", table(3)))
    assert list(data.splits) == ["train", "validation"]
    assert data.notes[1].startswith("no test split, and 3 rows are too few to cut one: the validation split, by which")


def test_samples_are_limited_to_the_first_rows_of_each_split(tmp_path):
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.csv", table(50))
    data = load(tmp_path, max_train_samples=10, max_eval_samples=5)
    assert sizes_of(data) == {"train": 10, "validation": 5, "test": 5} and data.notes == ()
    assert list(data.splits["train"]["text"][:3]) == ["words of row 0", "words of row 1", "words of row 2"]


@pytest.mark.parametrize("classes", [2, 5])
def test_a_limit_of_sorted_rows_takes_every_class(classes, tmp_path):
    for split in ("train", "validation", "test"):
        written(tmp_path / f"{split}.csv", table(50, classes).sort_values("label", kind="stable"))
    data, again = [load(tmp_path, max_train_samples=10, max_eval_samples=10) for _ in range(2)]
    for rows in data.splits.values():
        assert Counter(rows["label"]) == dict.fromkeys(range(classes), 10 // classes)
    assert len(data.notes) == 3 and data.fingerprint == again.fingerprint
    assert "the first 10 rows of the test split have 1 of its" in data.notes[2]
    assert load(tmp_path, max_train_samples=1).notes == (f"the training rows have 1 of the {classes} classes",)


def test_splits_go_by_the_names_that_are_given(tmp_path):
    for split in ("learn", "check"):
        written(tmp_path / f"{split}.csv", table(50))
    data = load(tmp_path, train_split="learn", validation_split="check", test_split="check")
    assert list(data.splits) == ["train", "validation", "test"]
    assert data.notes == ("validation and test are the same split, `check`",)


def test_the_fingerprint_names_texts_labels_and_order(tmp_path):
    frame = table(40)
    others = frame[::-1], frame.assign(label=1 - frame["label"]), frame.assign(text=frame["text"] + "!")
    prints = [load(written(tmp_path / "rows.csv", variant)).fingerprint for variant in (frame, *others)]
    assert len(set(prints)) == 4
    assert load(written(tmp_path / "same.parquet", frame)).fingerprint == prints[0]


# The machine's own Python


def test_pydocs(monkeypatch):
    monkeypatch.setattr(pydocs, "documents", lambda: (f"topic {number}\n\nis   this" for number in range(30)))
    monkeypatch.setattr(pydocs.sysconfig, "get_path", lambda _: "of this test")
    data = load("pydocs", task="causal_lm")
    assert sizes_of(data) == {"train": 24, "validation": 3, "test": 3}
    assert "PSF licence" in data.source and data.splits["train"]["text"][0] == "topic 0 is this"


def test_the_documents_of_this_python():
    documents = list(pydocs.documents())
    assert len(documents) > 400 and sum(map(len, documents)) > 1_500_000
    assert documents[0].startswith('The "assert" statement')
    assert len(set(documents)) == len(documents)


# What can be wrong


REFUSED = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case['file']}: {case['said'][:40]}")
def test_a_file_that_is_no_data_set_is_refused_in_one_line(case, tmp_path):
    content = case["text"] if isinstance(case["text"], bytes) else case["text"].encode(case.get("as", "utf-8"))
    path = written(tmp_path / case["file"], content)
    with pytest.raises(DataError, match=case["said"]) as caught:
        load(tmp_path if case.get("folder") else path, **case.get("options", {}))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def changed(row, column, value):
    frame = table().astype(object)
    frame.loc[row, column] = value
    return frame


STARS = table(60).assign(label=np.linspace(0, 1, 60), stars=[1, 2, 3] * 20)
SENTENCES = table(60).assign(label=[f"it is about row {row}" for row in range(60)])
IDENTIFIERS = table(60).assign(label=[f"id{row}" for row in range(60)])


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        ({"train.csv": STARS}, {}, "`label` .* has 60 different values in 60 rows .*regression is not.*: stars would"),
        ({"train.csv": SENTENCES}, {}, "texts, not classes: name a column of classes .*; no other column here would"),
        ({"train.csv": IDENTIFIERS}, {}, "nearly as many as rows, so no classes"),
        (
            {"train.csv": table(60)},
            {"text_column": "label", "label_column": "text"},
            "column `label` looks like the classes: are the two swapped. Give --text_column text --label_col",
        ),
        ({"train.csv": table()}, {"validation_fraction": 0.5}, "cut off twice.*give less than 0.5"),
        ({"train.csv": table(), "validation.csv": table(0)}, {}, r"validation\.csv has no rows"),
        ({"train.csv": changed(7, "label", None)}, {}, r"row 7 \(from 0\) of the train split has no label in column"),
        ({"train.csv": changed(11, "text", None)}, {}, r"row 11 \(from 0\) of the train split has no text"),
        ({"train.jsonl": changed(12, "text", " &nbsp; ")}, {}, "row 12 .* has no text in column `text`"),
        ({"train.csv": table().assign(text=" ")}, {"task": "causal_lm"}, "has no text in column `text`"),
        ({"train.csv": changed(33, "text", "")}, {"max_train_samples": 5}, "row 33 "),  # as the file counts
        ({"train.csv": table(), "dev.csv": table()}, {"validation_split": "dew"}, "no split `dew`: did you mean `dev`"),
        ({"test.csv": table()}, {}, "has no split `train`: choose from `test`"),
        ({"train.csv": table(2)}, {}, "has 2 rows, too few to cut a validation split from"),
        (
            {"train.csv": table(), "train.jsonl": table()},
            {},
            r"holds the split `train` more than once \(train\.csv, train\.jsonl\): keep one of them",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_tables_and_splits_that_cannot_be_used_are_named(files, options, said, tmp_path):
    for name, frame in files.items():
        written(tmp_path / name, frame)
    with pytest.raises(DataError, match=said) as caught:
        load(tmp_path, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_found_or_named(separator, tmp_path):
    frame, path = table().assign(text=[f"so, {row}; a|b\tand “more”" for row in range(40)]), tmp_path / "rows.csv"
    frame.to_csv(path, index=False, sep=separator)
    found = load(path, clean_text=False)
    assert sorted(sum(rows_of(found).values(), [])) == sorted(zip(frame["text"], frame["label"], strict=True))
    assert rows_of(load(path, separator={"\t": "tab"}.get(separator, separator), clean_text=False)) == rows_of(found)
    with pytest.raises(DataError, match="columns|line 2"):
        load(path, separator="|" if separator != "|" else ";")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "cp1252"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "txt"])
def test_encodings_are_found_by_their_mark_or_named(encoding, kind, tmp_path):
    frame = table().assign(text=[f"un café, {row}" for row in range(40)])
    lines = frame.to_json(orient="records", lines=True, force_ascii=False)
    text = {"csv": frame.to_csv(index=False), "jsonl": lines, "txt": "\n".join(frame["text"])}[kind]
    path = written(tmp_path / f"rows.{kind}", text.encode(encoding))
    data = load(path, task="causal_lm", encoding="cp1252" if encoding == "cp1252" else None)
    assert [text.removesuffix("\n") for text in texts_of(data)] == sorted(frame["text"])


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
    rows = "".join(f"{'long, ' * 40_000}{row};{row % 2}\n" for row in range(4))
    assert load(written(tmp_path / "rows.csv", "text;label\n" + rows)).label_names == ("0", "1")


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (9, [row % 9 / 2 for row in range(200)]),
        (12, [f"a class of four words {row % 12}" for row in range(200)]),
        (80, [f"intent {row % 80}" for row in range(200)]),
    ],
)
def test_few_values_are_classes_whatever_they_look_like(classes, labels, tmp_path):
    assert len(load(written(tmp_path / "rows.csv", table(200).assign(label=labels))).label_names) == classes


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
