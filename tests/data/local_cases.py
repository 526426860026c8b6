"""Local data sets for tests: made, written, loaded, and looked at."""

import pandas as pd

from course_lib.config import DataConfig
from course_lib.data import DataConnector

WRITERS = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "tsv": lambda frame, path: frame.to_csv(path, index=False, sep="\t"),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "json": lambda frame, path: frame.to_json(path, orient="records"),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "txt": lambda frame, path: path.write_text("\n".join(frame["text"])),
}


def table(size=40, classes=2, texts="text", labels="label"):
    return pd.DataFrame(
        {texts: [f"words of row {row}" for row in range(size)], labels: [row % classes for row in range(size)]}
    )


def written(path, content):
    """The path, where there is now a file of a table (of the kind that its name says), of text or of bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, pd.DataFrame):
        WRITERS[path.suffix[1:]](content, path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load(dataset, seed=42, **options):
    return DataConnector(DataConfig(dataset=str(dataset), **options), seed).load()


def rows_of(data):
    return {split: list(zip(rows["text"], rows["label"], strict=True)) for split, rows in data.splits.items()}


def texts_of(data):
    """Of all splits, sorted."""
    return sorted(text for rows in data.splits.values() for text in rows["text"])


def sizes_of(data):
    return {split: len(rows) for split, rows in data.splits.items()}
