"""The tweets that ship with the course: 3,793 short texts, rated by people; see bundled/tweets.json."""

import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from course_lib.errors import DataError

FOLDER = Path(__file__).with_name("bundled")
LABEL_NAMES = ("negative", "neutral", "positive")
SPLITS = ("train", "validation", "test")


def manifest(folder: Path = FOLDER) -> dict[str, Any]:
    """Origin, licence, citation, rules, counts and checksum of the tweets."""
    return json.loads((folder / "tweets.json").read_text(encoding="utf-8"))


def load_tweets(folder: Path = FOLDER) -> dict[str, datasets.Dataset]:
    """The tweets by split, with columns `id`, `text` and `label` (a ClassLabel).

    Raises:
        DataError: the file is not the one that the manifest describes.
    """
    path, expected = folder / "tweets.csv", manifest(folder)["sha256"]
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise DataError(
            f"{path} is damaged (sha256 {digest[:12]}…, expected {expected[:12]}…)", "install the course again"
        )
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=list(LABEL_NAMES)),
        }
    )
    rows = pa.csv.read_csv(pa.BufferReader(content), pa.csv.ReadOptions(use_threads=False))
    labels = pc.index_in(rows["label"], pa.array(LABEL_NAMES)).cast(pa.int64())
    rows = rows.set_column(rows.column_names.index("label"), "label", labels)
    of_split = {split: rows.filter(pc.equal(rows["split"], split)).select(list(features)) for split in SPLITS}
    return {
        split: datasets.Dataset(
            datasets.table.InMemoryTable(table.cast(features.arrow_schema)),
            datasets.DatasetInfo(features=features),
            datasets.NamedSplit(split),
            fingerprint=f"{digest[:32]}-{split}",
        )
        for split, table in of_split.items()
    }
