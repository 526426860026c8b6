"""The bundled tweets: what they are, that they are whole, and how they were made."""

import hashlib
import json
import shutil
from collections import Counter

import pytest

from course_lib.data import bundled
from course_lib.data.cleaning import clean
from course_lib.errors import DataError
from tests.data.local_cases import load, sizes_of
from tools import make_tweets


@pytest.fixture(scope="module")
def tweets():
    return bundled.load_tweets()


def test_counts_are_those_of_the_manifest(tweets):
    manifest = bundled.manifest()
    counted = {split: Counter(bundled.LABEL_NAMES[label] for label in rows["label"]) for split, rows in tweets.items()}
    assert counted == manifest["counts"]
    assert "MIT" in manifest["licence"] and "ICWSM 2014" in manifest["citation"]
    assert "MIT License" in (bundled.FOLDER / "LICENSE-vaderSentiment.txt").read_text()
    assert sum(file.stat().st_size for file in bundled.FOLDER.iterdir()) < 450_000


def test_no_text_and_no_id_is_there_twice_and_none_that_was_left_out(tweets):
    texts = [text for rows in tweets.values() for text in rows["text"]]
    ids = [number for rows in tweets.values() for number in rows["id"]]
    assert len(texts) == len(ids) == 3793
    assert len({"".join(filter(str.isalnum, text.casefold())) for text in texts}) == len(set(ids)) == len(texts)
    left_out = set(map(int, (bundled.FOLDER / "left_out_ids.txt").read_text().split()))
    assert len(left_out) == 287 and not left_out & set(ids)
    assert all(text == clean(text) for text in texts)


def test_a_damaged_file_is_named(tmp_path):
    folder = shutil.copytree(bundled.FOLDER, tmp_path / "bundled")
    with open(folder / "tweets.csv", "a") as file:
        file.write("train,9999,neutral,one more\n")
    with pytest.raises(DataError, match=r"bundled/tweets\.csv is damaged .sha256 .*: install the course again"):
        bundled.load_tweets(folder)


def test_they_load_by_their_name():
    data = load("tweets")
    assert data.label_names == ("negative", "neutral", "positive")
    assert sizes_of(data) == {"train": 3035, "validation": 303, "test": 455}
    assert data.notes == () and "MIT" in data.source and "ICWSM 2014" in data.source
    assert data.splits["train"].column_names == ["text", "label"]


def test_ratings_become_classes_and_texts_become_clean_and_unique():
    raw = "1\t0.5\tGood &amp; fine\n2\t-0.5\tbad\n3\t0.49\tso   so\n4\t3\tGOOD, &amp; fine!!\n5\t2\tleft out"
    assert list(make_tweets.rated(raw + "\n6\t-0.49\tcan&amp;#39;t say", left_out=[5])) == [
        (1, "positive", "Good & fine"),
        (2, "negative", "bad"),
        (3, "neutral", "so so"),
        (6, "neutral", "can't say"),
    ]


def test_the_split_depends_on_the_ids_alone_and_is_stratified():
    rows = [(number, bundled.LABEL_NAMES[number % 3], f"text {number}") for number in range(300)]
    tweets = make_tweets.split_tweets(rows)
    assert make_tweets.split_tweets(reversed(rows)) == tweets
    for label in bundled.LABEL_NAMES:
        counted = Counter(tweet.split for tweet in tweets if tweet.label == label)
        assert counted == {"train": 80, "validation": 8, "test": 12}


def test_the_script_writes_the_same_bytes_twice_and_what_the_loader_reads(tmp_path, monkeypatch):
    raw = "\n".join(f"{number}\t{number % 7 - 3}\ttext number {number}, &quot;quoted&quot;" for number in range(100))
    (tmp_path / make_tweets.RAW_NAME).write_text(raw)
    (tmp_path / "left_out_ids.txt").write_text("0\n7\n")
    monkeypatch.setattr(make_tweets, "RAW_SHA256", hashlib.sha256(raw.encode()).hexdigest())
    written = []
    for _ in range(2):
        make_tweets.make(tmp_path, tmp_path)
        written.append([(tmp_path / name).read_bytes() for name in ("tweets.csv", "tweets.json")])
    assert written[0] == written[1]
    read = bundled.load_tweets(tmp_path)
    assert sum(map(len, read.values())) == 98
    assert read["train"][0]["text"].endswith('"quoted"')
    counted = Counter(bundled.LABEL_NAMES[label] for label in read["test"]["label"])
    assert json.loads(written[0][1])["counts"]["test"] == counted


def test_the_script_refuses_another_raw_file(tmp_path):
    (tmp_path / make_tweets.RAW_NAME).write_text("1\t2\tthree\n")
    with pytest.raises(DataError, match="is not the file of vaderSentiment 3.3.2"):
        make_tweets.make(tmp_path)
