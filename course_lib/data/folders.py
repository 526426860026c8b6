"""Finds the files of each split of a local data set: in a folder, a clone of a data set of the Hub, what was saved."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import datasets
from datasets.utils import logging

from course_lib.data.plain_files import OPENERS
from course_lib.errors import DataError

KINDS = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
}
"""How a file is read, by its suffix."""

BINARY = ("parquet", "arrow")

SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]{8,})?$")
"""Part of a split, as the Hub names it: with a sum of its contents, or without."""

SAVED = ("dataset_dict.json", "state.json")
"""Of one of these a folder has one that ``save_to_disk`` has written."""


def kind_of(path: Path) -> str | None:
    """Kind of a file of such a name, by which it is read; None for files that are not."""
    suffix = path.suffix.lower()
    kind = KINDS.get(Path(path.stem).suffix.lower() if suffix in OPENERS else suffix)
    return None if kind in BINARY and suffix in OPENERS else kind  # such files are compressed within


def looks_local(name: str) -> bool:
    """Whether a name that nothing has is that of a file or folder, and not of a data set on the Hub."""
    return kind_of(Path(name)) is not None or name.startswith((".", "/", "~")) or name.count("/") > 1


def find_splits(path: Path, configuration: str | None = None) -> Mapping[str, Sequence[Path]]:
    """Files of each split: one file is the split `train`; in a folder, each file is the split that it is named after.

    ``train-00000-of-00002.parquet`` is a part of the split `train`. A folder with data in folders of its own, or with a
    README that says where, is taken for a clone of a data set on the Hub, and read as that.

    Args:
        path: a file or a folder.
        configuration: of a clone that has several.
    Raises:
        DataError: there is no file of a known kind, or a split stands there in several kinds.
    """
    if path.is_file():
        if kind_of(path) is None:
            raise DataError(
                f"{path} is of a kind that is not read here",
                f"give {', '.join(KINDS)} or a folder of such files: unpack archives, and convert tables, as "
                "pandas.read_excel(FILE).to_csv(NEW, index=False) does",
            )
        return {"train": [path]}
    with reading(str(path), "a folder"):
        entries = sorted(path.iterdir())
    splits: dict[str, list[Path]] = {}
    for file in entries:
        if file.is_file() and not file.name.startswith(".") and kind_of(file):
            stem = Path(file.stem).stem if file.suffix.lower() in OPENERS else file.stem
            splits.setdefault(SHARD.sub("", stem), []).append(file)
    readme = path / "README.md"
    card = readme.read_text(encoding="utf-8", errors="replace").partition("\n---")[0] if readme.is_file() else ""
    if configuration or (card.startswith("---") and "\nconfigs:" in card) or not splits:
        splits = _of_clone(path, configuration) or splits
    if not splits:
        raise DataError(
            f"folder {path} holds no data", f"it needs train, validation and test files ({', '.join(KINDS)})"
        )
    for split, files in splits.items():
        if len({kind_of(file) for file in files}) > 1:
            raise DataError(
                f"folder {path} holds the split `{split}` more than once ({', '.join(file.name for file in files)})",
                "keep one of them",
            )
    return splits


def _of_clone(path: Path, configuration: str | None) -> dict[str, list[Path]]:
    """The files of each split of a folder that is laid out as data sets on the Hub are."""
    try:
        with quiet():
            builder = datasets.load_dataset_builder(str(path), configuration)
    except FileNotFoundError:  # no file that it knows
        return {}
    except Exception as error:  # whatever a foreign folder makes of its reader is that folder's fault
        raise unreadable(
            str(path), error, f"{path} cannot be read as a clone of a data set of the Hub", "mend its README"
        ) from error
    files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
    known = {str(split): [Path(file) for file in listed if kind_of(Path(file))] for split, listed in files.items()}
    return {split: listed for split, listed in known.items() if listed}


def unreadable(name: str, error: Exception, what: str, instead: str) -> DataError:
    """What `datasets` says of a data set that it cannot load, in one line.

    Args:
        name: of the data set, which has several configurations perhaps.
        error: what was raised.
        what: else.
        instead: likewise.
    """
    listed = re.search(r"\[.*\]", str(error))
    if "onfig" in str(error) and listed:
        return DataError(f"{name} has the configurations {listed[0]}", "choose one with --dataset_config")
    return DataError(f"{what} ({first_line(error)})", instead)


def is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` has written a folder."""
    return any((path / name).is_file() for name in SAVED)


def load_saved(path: Path) -> Mapping[str, datasets.Dataset]:
    """The splits of a folder that ``save_to_disk`` has written; one data set alone is the split `train`.

    Raises:
        DataError: it cannot be read.
    """
    with reading(str(path), "a folder of save_to_disk"):
        loaded = datasets.load_from_disk(str(path))
    return loaded if isinstance(loaded, datasets.DatasetDict) else {"train": loaded}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing that `datasets` logs, for the block: it logs what it then raises."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def reading(shown: str, kind: str) -> Iterator[None]:
    """Turn whatever a file makes of its reader into one clear line."""
    try:
        yield
    except DataError:
        raise
    except (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DataError(f"cannot read {error.filename or shown}: {error.strerror}") from None
    except Exception as error:
        raise DataError(
            f"{shown} cannot be read as {kind} ({first_line(error)})",
            "is it whole? Copy or download it again, or write it anew",
        ) from error


def first_line(error: BaseException) -> str:
    """First line of an error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
