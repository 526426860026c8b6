"""The tweets that ship with the course: 3,793 short texts, rated by people; see bundled/tweets.json."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pandas as pd

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
    frame = pd.read_csv(io.BytesIO(content), keep_default_na=False)
    frame["label"] = frame["label"].map(LABEL_NAMES.index)
    return {
        split: datasets.Dataset.from_pandas(
            frame.loc[frame["split"] == split, list(features)],
            features=features,
            split=datasets.NamedSplit(split),
            preserve_index=False,
        )
        for split in SPLITS
    }
