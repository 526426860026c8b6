"""Make the bundled tweets from the raw file: python -m tools.make_tweets RAW_DIR

RAW_DIR holds tweets_GroundTruth.txt from the source package of vaderSentiment 3.3.2
(vaderSentiment/tweets_GroundTruth.txt). The ids to leave out and the licence stand in bundled/.
Running it again gives the same bytes.
"""

import csv
import hashlib
import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from course_lib.data.bundled import FOLDER, LABEL_NAMES, SPLITS
from course_lib.data.cleaning import clean
from course_lib.errors import CourseError, DataError
from course_lib.writing import write_text

RAW_NAME = "tweets_GroundTruth.txt"
RAW_SHA256 = "dfbe7102e2f92579ed8b19df9a3822491880697c67adf712fb66e520cc05102f"
SEED = 2014
TEST_SHARE, VALIDATION_SHARE = 0.12, 0.08
THRESHOLD = 0.5

ABOUT = {
    "source": f"{RAW_NAME} in the source package of vaderSentiment 3.3.2",
    "raw_sha256": RAW_SHA256,
    "licence": "MIT, see LICENSE-vaderSentiment.txt",
    "citation": "C.J. Hutto and E. Gilbert, VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social "
    "Media Text, ICWSM 2014",
    "labels": f"mean of at least 20 human ratings from -4 to 4: negative at {-THRESHOLD} or less, positive at "
    f"{THRESHOLD} or more, neutral between",
    "rows": "HTML entities unescaped, white space folded; ids in left_out_ids.txt left out (profanity, slurs, sexual "
    "or self-harm content); of texts that differ only in case, spacing or punctuation, the first is kept",
    "splits": f"in each class, ordered by the SHA-256 of '{SEED}:id': the first {TEST_SHARE:.0%} are test, the next "
    f"{VALIDATION_SHARE:.0%} validation, the rest train",
}


class Tweet(NamedTuple):
    """One row of the bundled file."""

    split: str
    id: int
    label: str
    text: str


def rated(raw: str, left_out: Iterable[int]) -> Iterator[tuple[int, str, str]]:
    """Id, label and clean text of each raw line `id<TAB>rating<TAB>text` that is kept, in the order of the file."""
    out, seen = set(left_out), set[str]()
    for line in raw.splitlines():
        number, rating, text = line.split("\t")
        text = clean(clean(text))  # some were escaped twice
        bare = "".join(char for char in text.casefold() if char.isalnum())
        if int(number) not in out and bare not in seen:
            seen.add(bare)
            yield int(number), label_of(float(rating)), text


def label_of(rating: float) -> str:
    """The class of a mean rating from -4 to 4."""
    if abs(rating) < THRESHOLD:
        return "neutral"
    return "positive" if rating > 0 else "negative"


def split_tweets(rows: Iterable[tuple[int, str, str]]) -> list[Tweet]:
    """The rows with the split of each, ordered by split and id."""
    tweets, rows = [], list(rows)
    for label in LABEL_NAMES:
        members = sorted(
            (row for row in rows if row[1] == label),
            key=lambda row: hashlib.sha256(f"{SEED}:{row[0]}".encode()).digest(),
        )
        test = round(TEST_SHARE * len(members))
        validation = test + round(VALIDATION_SHARE * len(members))
        for position, row in enumerate(members):
            split = "test" if position < test else "validation" if position < validation else "train"
            tweets.append(Tweet(split, *row))
    return sorted(tweets, key=lambda tweet: (SPLITS.index(tweet.split), tweet.id))


def to_csv(tweets: Iterable[Tweet]) -> str:
    """The bundled file's text."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(Tweet._fields)
    writer.writerows(tweets)
    return out.getvalue()


def make(raw_folder: Path, folder: Path = FOLDER) -> dict[str, Counter[str]]:
    """Write tweets.csv and tweets.json; return the number of rows by split and class.

    Raises:
        DataError: the raw file is not there, or is not that of vaderSentiment 3.3.2.
    """
    path = raw_folder / RAW_NAME
    if not path.is_file():
        raise DataError(f"{path} does not exist", "take it from the source package of vaderSentiment 3.3.2")
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != RAW_SHA256:
        raise DataError(f"{path} is not the file of vaderSentiment 3.3.2 (expected sha256 {RAW_SHA256})")
    left_out = map(int, (folder / "left_out_ids.txt").read_text(encoding="utf-8").split())
    tweets = split_tweets(rated(raw.decode("utf-8"), left_out))
    table = to_csv(tweets)
    counts = {split: Counter(tweet.label for tweet in tweets if tweet.split == split) for split in SPLITS}
    described = {
        **ABOUT,
        "counts": {split: {label: counts[split][label] for label in LABEL_NAMES} for split in SPLITS},
        "sha256": hashlib.sha256(table.encode("utf-8")).hexdigest(),
    }
    write_text(folder / "tweets.csv", table)
    write_text(folder / "tweets.json", json.dumps(described, indent=2) + "\n")
    return counts


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise DataError("one argument is needed", "python -m tools.make_tweets RAW_DIR")
        for split, classes in make(Path(sys.argv[1])).items():
            print(split, sum(classes.values()), dict(classes))
    except CourseError as error:
        sys.exit(str(error))
