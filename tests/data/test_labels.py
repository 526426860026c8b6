"""Labels as people write them: which spellings are one class, which codes mean none, and what a score is over."""

import json

import pandas as pd
import pyarrow as pa
import pytest

from course_lib.data.class_names import Classes
from course_lib.data.split_facts import SplitFacts, repeated
from course_lib.errors import DataError
from course_lib.training.run import with_labels_of
from tests.data import local_cases
from tests.data.local_cases import written


def load(folder, train, validation=None, test=None, kind="csv", **options):
    """A data set of some labels per split; validation and test have those of the training split by default."""
    for split, labels in (("train", train), ("validation", validation or train), ("test", test or train)):
        texts = [f"{split} row {row}" for row in range(len(labels))]
        written(folder / f"{split}.{kind}", pd.DataFrame({"text": texts, "label": labels}))
    return local_cases.load(folder, **options)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([-1, 0, 1], ("-1", "0", "1")),
        (["0.0", "10.0", "2.0", "1"], ("0", "1", "2", "10")),
        (["1.5", "10.5", "2.0"], ("1.5", "2.0", "10.5")),
        (["007", "7", "10"], ("007", "7", "10")),
        (["b", "B "], ("B", "b")),
        (["+1", "-1"], ("-1", "1")),
        (["1e3", "2"], ("1e3", "2")),
        (["né", "oui", "ne\u0301", "né"], ("né", "oui")),  # composed and decomposed
    ],
)
def test_codes_and_numbers_are_classes_in_their_order(labels, names, tmp_path):
    assert load(tmp_path, labels * 10).label_names == names


UNSEEN = {
    "a no-break space": "pos\u00a0",
    "a blank": " pos",
    "nothing wide": "p\u200bos",
    "a mark": "\ufeffpos",
    "NUL": "pos\x00",
    "a soft hyphen": "po\u00ads",
}


@pytest.mark.parametrize("how", UNSEEN)
def test_classes_that_differ_by_what_nobody_sees_are_one(how, tmp_path):
    """Within a split, where it is said with the counts, and between two."""
    data = load(tmp_path, ["neg", "pos"] * 9 + [UNSEEN[how]], ["neg", UNSEEN[how]], kind="parquet")
    assert data.label_names == ("neg", "pos") and list(data.splits["validation"]["label"]) == [0, 1]
    assert "class `pos` is written in 2 ways that mean the same (9 as 'pos', 1 as " in data.notes[0]
    assert how == "a blank" or UNSEEN[how] not in data.notes[0], "it would not be seen there either"


def test_a_label_of_nothing_that_shows_is_missing(tmp_path):
    with pytest.raises(DataError, match="row 4 .* of the train split has no label"):
        load(tmp_path, ["a", "b", "a", "b", "\u200b\xa0"], kind="parquet")


@pytest.mark.parametrize(
    ("train", "other"), [(["0", "1"], ["0.0", "1.0"]), (["0.0", "1.0"], ["0", "1"]), (["1", "2"], [" 1", "2.00"])]
)
def test_a_number_is_the_same_class_however_it_is_written(train, other, tmp_path):
    data = load(tmp_path, train * 9, other * 2, other)
    assert list(data.splits["test"]["label"]) == [0, 1]


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        (["true", "false"], ["True", "False"], "`True` in row 0 .* does not occur .*: write it as the training split"),
        ([0, 1], [0, -1], "`-1` in row 1 .* does not occur .*: it often stands for no label: leave such rows out"),
        ([0, 1], [-1, -1], "the test split has no labels: every row has `-1`: name another split with --test_split"),
        (["a", "b"], ["?", "?"], "the test split has no labels: every row has `[?]`"),
        (["a", "b"], ["a", "c"], r"`c` in row 1 \(from 0\) of the test split .*: add training rows of that class"),
        ([1, 1], [1, 1], "every row of the training split has the label `1`"),
    ],
)
def test_labels_that_cannot_be_used_are_refused_with_what_is_so(train, test, said, tmp_path):
    with pytest.raises(DataError, match=said):
        load(tmp_path, train * 5, train, test)


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["a", "b", "nan"], "10 training rows have the class `nan`, which often stands for no label"),
        ([0, 1, 2, -1], "10 training rows have the class `-1`"),
        ([0, 1, -100], "have the class `-100`"),
        ([-1, 0, 1], None),
        (["a", "b"], None),
    ],
)
def test_what_a_reader_of_labels_would_overlook_is_said(labels, said, tmp_path):
    notes = load(tmp_path, labels * 10).notes
    assert notes == () if said is None else any(said in note for note in notes), notes


def test_names_that_a_data_set_gives_are_as_they_are():
    classes = Classes({"pos": 1}, ["neg", "pos ", "pos"])
    assert classes.names == ("neg", "pos ", "pos") and classes.number_of("pos") == 2
    assert classes.number_of("neg") is None, "the training split has none"


def test_a_trained_models_classes_are_met_by_other_spellings(tmp_path):
    data = load(tmp_path, ["1.0", "0.0"] * 5)
    assert list(with_labels_of(data, {"1": 0, "0": 1}).splits["test"]["label"]) == [0, 1] * 5
    with pytest.raises(DataError, match="class `0` .* is none of the model's"):
        with_labels_of(data, {"1": 0, "2": 1})


def test_a_split_is_told_in_one_line():
    facts = SplitFacts(1200, {"neg": 1200, "pos": 0}, 3, 128, 50_000, 60, 2_500)
    assert facts.line("test") == (
        "1,200 rows: neg 1,200, pos 0; 3 rows of the training split too; 60 rows (5.0%) cut "
        "at 128 tokens, which leaves out 5.0% of the tokens"
    )
    many = SplitFacts(90, {f"c{number}": number for number in range(10)}, 0, 128, 900, 0, 0)
    told = many.line("train")
    assert told.endswith(": 10 classes: c9 9, c8 8, c7 7, c6 6, c5 5, c4 4, c3 3, c2 2, … and none of 1 classes")
    text = SplitFacts(4, {}, 1, 64, 1000, 0, 40)
    assert text.line("train").endswith("; 1 row again; the last 40 tokens (4.0% of the tokens) fill no block of 64")
    json.dumps(facts.as_dict())


def test_rows_that_the_training_split_has_too_are_counted(tmp_path):
    for split, texts in (("train", "abcab"), ("validation", "xyz"), ("test", "axab")):
        written(tmp_path / f"{split}.csv", pd.DataFrame({"text": list(texts), "label": [0, 1, 0, 1, 0][: len(texts)]}))
    splits = local_cases.load(tmp_path).splits
    assert repeated(splits) == {"train": 2, "validation": 0, "test": 3}


def test_a_label_is_whatever_type_its_column_has(tmp_path):
    """One data set whose splits are of different kinds of file: numbers in Parquet, text in CSV."""
    frame = pd.DataFrame({"text": list("abcd"), "label": [0, 1, 0, 1]})
    written(tmp_path / "train.parquet", frame)
    written(tmp_path / "validation.csv", frame.astype({"label": str}))
    written(tmp_path / "test.jsonl", frame.astype({"label": float}))
    data = local_cases.load(tmp_path)
    assert all(list(rows["label"]) == [0, 1, 0, 1] for rows in data.splits.values())
    assert pa.types.is_int64(data.splits["test"].features.arrow_schema.field("label").type)
