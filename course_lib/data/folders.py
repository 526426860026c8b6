"""Finds the files of each split of a local data set: in a folder, a clone of a data set of the Hub, what was saved."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import datasets
from datasets.utils import logging

from course_lib.data.plain_files import COMPRESSED, inner_name
from course_lib.data.tables import NO_ROWS
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

CONVERTED = {
    (".xlsx", ".xls", ".xlsm", ".ods"): "pandas.read_excel({path!r}).to_csv({new!r}, index=False)",
    (".pkl", ".pickle"): "pandas.read_pickle({path!r}).to_parquet({new!r})",
    (".orc",): "pandas.read_orc({path!r}).to_parquet({new!r})",
    (".h5", ".hdf5"): "pandas.read_hdf({path!r}).to_parquet({new!r})",
    (".dta",): "pandas.read_stata({path!r}).to_parquet({new!r})",
    (".sav",): "pandas.read_spss({path!r}).to_parquet({new!r})",
    (".sas7bdat", ".xpt"): "pandas.read_sas({path!r}).to_parquet({new!r})",
    (".xml",): "pandas.read_xml({path!r}).to_parquet({new!r})",
    (".html", ".htm"): "pandas.read_html({path!r})[0].to_parquet({new!r})",
    (".db", ".sqlite", ".sqlite3"): "pandas.read_sql('SELECT …', sqlite3.connect({path!r})).to_parquet({new!r})",
    (".npz", ".npy"): "pandas.DataFrame({{name: numpy.load({path!r})[name] …}}).to_parquet({new!r})",
    (".tar", ".tgz", ".7z", ".rar"): "",
}
"""The line that makes a file of ours of one of another kind, by its suffix; none: it has to be unpacked."""

SHARD = re.compile(r"-\d{5}-of-\d{5}(-[0-9a-f]{8,})?$")
"""Part of a split, as the Hub names it: with a sum of its contents, or without."""

SAVED = ("dataset_dict.json", "state.json")
"""Of one of these a folder has one that ``save_to_disk`` has written."""


def kind_of(path: Path) -> str | None:
    """Kind of a file, by which it is read; None for files that are not."""
    if path.suffix.lower() == ".zip":
        return KINDS.get(Path(inner_name(path)).suffix.lower())
    return kind_of_name(path)


def kind_of_name(path: Path) -> str | None:
    """Kind of a file of such a name, which need not be there; a zip archive may hold any kind."""
    suffix = path.suffix.lower()
    return KINDS.get(Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix)


def looks_local(name: str) -> bool:
    """Whether a name that nothing has is that of a file or folder, and not of a data set on the Hub."""
    suffix = Path(name).suffix.lower()
    foreign = any(suffix in suffixes for suffixes in CONVERTED)
    return (
        kind_of_name(Path(name)) is not None
        or suffix in COMPRESSED
        or foreign
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def find_splits(path: Path, configuration: str | None = None) -> dict[str, list[Path]]:
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
            raise unknown_kind(path)
        return {"train": [path]}
    if not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder", "give one of the two")
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    splits: dict[str, list[Path]] = {}
    for file in entries:
        if file.is_file() and not file.name.startswith(".") and kind_of_name(file):
            stem = file.name.partition(".")[0] if file.suffix.lower() in COMPRESSED else file.stem
            splits.setdefault(SHARD.sub("", stem), []).append(file)
    if configuration or _says_where(path / "README.md") or (not splits and any(entry.is_dir() for entry in entries)):
        splits = _of_clone(path, configuration) or splits
    if not splits:
        other = next((file for file in entries if any(file.suffix.lower() in suffixes for suffixes in CONVERTED)), None)
        if other is not None:
            raise unknown_kind(other)
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


def unknown_kind(path: Path) -> DataError:
    """Way out for a file of another kind."""
    line = next((line for suffixes, line in CONVERTED.items() if path.suffix.lower() in suffixes), None)
    if line == "":
        return DataError(f"{path} is an archive", "unpack it, and give the folder or a file of it")
    suffix = ".csv" if line and "to_csv" in line else ".parquet"
    return DataError(
        f"{path} is of a kind that is not read here" if line else f"{path} is of an unknown kind",
        f"convert it: {line.format(path=str(path), new=str(path.with_suffix(suffix)))}"
        if line
        else f"give {', '.join(KINDS)} or a folder of such files",
    )


def _says_where(readme: Path) -> bool:
    """Whether a data set's card names its files."""
    if not readme.is_file():
        return False
    head = readme.read_text(encoding="utf-8", errors="replace")
    return head.startswith("---") and re.search(r"^configs:", head.partition("\n---")[0], re.MULTILINE) is not None


def _of_clone(path: Path, configuration: str | None) -> dict[str, list[Path]]:
    """The files of each split of a folder that is laid out as data sets on the Hub are."""
    with quiet():
        try:
            builder = datasets.load_dataset_builder(str(path), configuration)
        except FileNotFoundError:  # no file that it knows
            return {}
        except Exception as error:  # whatever a foreign folder makes of its reader is that folder's fault
            listed = re.search(r"\[.*\]", str(error))
            if "onfig" in str(error) and listed:
                raise DataError(
                    f"{path} has the configurations {listed[0]}", "choose one with --dataset_config"
                ) from error
            raise DataError(
                f"{path} cannot be read as a clone of a data set of the Hub ({first_line(error)})",
                "mend its README, or give a file of it",
            ) from error
    files: Mapping[str, Sequence[str]] = builder.config.data_files or {}
    return {str(split): [Path(file) for file in listed] for split, listed in files.items()}


def refuse_folders_of_classes(path: Path, splits: Mapping[str, Sequence[Path]]) -> None:
    """Name texts that lie in a folder per class, as those of IMDB do.

    Raises:
        DataError: they do.
    """
    names = {file.parent.name for files in splits.values() for file in files if kind_of_name(file) == "text"}
    if len(names) > 1 and not names & {"train", "test", "validation"}:
        line = (
            f"pandas.DataFrame([(p.read_text(), p.parent.name) for p in pathlib.Path({str(path)!r})"
            ".rglob('*.txt')], columns=['text', 'label']).to_csv('train.csv', index=False)"
        )
        raise DataError(
            f"{path} holds texts in folders, perhaps one per class ({', '.join(sorted(names)[:5])})",
            f"make a table of each split first: {line}",
        )


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
    """Nothing that `datasets` logs, for the block."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # `datasets` logs what it then raises
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def reading(shown: str, kind: str) -> Iterator[None]:
    """Turn whatever a file makes of its reader into one clear line."""
    with quiet():
        try:
            yield
        except DataError as error:
            if error.what == NO_ROWS:
                raise DataError(f"{shown} has no rows", error.instead) from None
            if shown.partition(" (or")[0] in error.what:
                raise
            raise DataError(f"{shown}: {error.what}", error.instead) from None
        except (PermissionError, FileNotFoundError, IsADirectoryError) as error:
            raise DataError(f"cannot read {error.filename or shown}: {error.strerror}") from None
        except Exception as error:
            raise DataError(
                f"{shown} cannot be read as {kind} ({first_line(error)})",
                "is it whole? Copy or download it again, or write it anew",
            ) from error


def first_line(error: BaseException) -> str:
    """First line of an error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
