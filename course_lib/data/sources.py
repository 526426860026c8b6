"""Finds where a data set is: bundled, this machine's Python, a local file or folder, or the Hub."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import datasets
from huggingface_hub import DatasetInfo, HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from course_lib.config import DataConfig
from course_lib.config.learning import OFFLINE_NAMES
from course_lib.data import bundled, folders, localfiles
from course_lib.data.cache import progress_bars
from course_lib.data.pydocs import load_pydocs
from course_lib.errors import DataError, near, nearest
from course_lib.system import hub_reachable


@dataclass(frozen=True)
class Known:
    """A data set on the Hub that people ask for by name."""

    repository: str
    citation: str


KNOWN = {
    "dair-ai/emotion": Known("dair-ai/emotion", "Saravia et al., CARER, EMNLP 2018"),
    "imdb": Known("stanfordnlp/imdb", "Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011"),
    "ag_news": Known("fancyzhx/ag_news", "Zhang, Zhao and LeCun, arXiv 1509.01626"),
    "yelp_polarity": Known("fancyzhx/yelp_polarity", "Zhang, Zhao and LeCun, arXiv 1509.01626"),
}
BY_NAME = {**KNOWN, **{known.repository: known for known in KNOWN.values()}, "emotion": KNOWN["dair-ai/emotion"]}


@dataclass(frozen=True)
class Source:
    """A data set that was found, and how to read it."""

    name: str
    described: str
    """One line: where it is from, its licence or citation."""
    splits: Collection[str]
    """Its splits by their own names."""
    read: Callable[[str], datasets.Dataset]
    """Reads one of them."""
    files: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    """Those of each split, where they are local ones that can be read row by row."""
    is_prose: bool = False
    """Whether its line breaks and entities mean nothing, so that a language model need not learn them."""


def find(config: DataConfig) -> Source:
    """The data set that a config names: bundled, a local file or folder, or on the Hub, in this order.

    Raises:
        DataError: there is none, or it is out of reach.
    """
    name = config.dataset
    path = Path(name).expanduser()
    if config.dataset_config is not None and (name in OFFLINE_NAMES or path.is_file()):
        raise DataError(
            f"dataset_config `{config.dataset_config}` has no meaning for `{name}`",
            "leave it out: only data sets on the Hub, and clones of them, have configurations",
        )
    if name in OFFLINE_NAMES:
        _refuse_meaningless(config)
        return _tweets() if name == "tweets" else _pydocs(config)
    if path.exists():
        return _local(config, path)
    if folders.looks_local(name):
        close = near(path.name, [entry.name for entry in path.parent.glob("*")])
        raise DataError(
            f"no file or folder {name}",
            f"did you mean `{path.parent / close[0]}`?" if close else f"{path.parent} has no file of a name like it",
        )
    _refuse_meaningless(config)
    return _hub(name, config.dataset_config)


def _local(config: DataConfig, path: Path) -> Source:
    """A file, a folder of them, or a folder that ``save_to_disk`` has written."""
    described = f"local {'folder' if path.is_dir() else 'file'} {config.dataset}"
    if folders.is_saved(path):
        _refuse_meaningless(config)
        saved = folders.load_saved(path)
        return Source(path.resolve().name, described, saved, lambda split: saved[split])
    files = folders.find_splits(path, config.dataset_config)
    _refuse_meaningless(config, {folders.kind_of(file) or "" for part in files.values() for file in part})
    options = localfiles.Options(config.encoding, config.separator, config.quoting)
    return Source(
        path.resolve().name, described, files, lambda split: localfiles.read_split(files[split], options), files=files
    )


def _refuse_meaningless(config: DataConfig, kinds: Collection[str] = ()) -> None:
    """Refuse options of text files where there is none: `kinds` of local files."""
    for option, fits, what in (
        ("separator", "csv" in kinds, "CSV files"),
        ("quoting", bool({"csv", "tsv"} & {*kinds}), "CSV and TSV files"),
        ("encoding", bool({*kinds} - {*folders.BINARY}), "local files of text"),
    ):
        if (value := getattr(config, option)) is not None and not fits:
            raise DataError(
                f"{option} `{value}` has no meaning for `{config.dataset}`", f"leave it out: it is for {what}"
            )


def _tweets() -> Source:
    about, splits = bundled.manifest(), bundled.load_tweets()
    return Source(
        "tweets",
        f"bundled tweets; {about['source']}; {about['licence']}; {about['citation']}",
        splits,
        lambda split: splits[split],
        is_prose=True,
    )


def _pydocs(config: DataConfig) -> Source:
    if config.task == "classification":
        raise DataError("pydocs has no classes", "use --task causal_lm or masked_lm")
    import platform

    return Source(
        "pydocs",
        f"documentation of Python {platform.python_version()} on this machine; PSF licence",
        ("train",),
        lambda split: load_pydocs(),
        is_prose=True,
    )


def _hub(name: str, configuration: str | None) -> Source:
    """A data set on the Hub, or what of it is in the local cache where the Hub cannot be reached."""
    plain, _, revision = name.partition("@")
    known = BY_NAME.get(plain)
    repository = known.repository if known else plain
    problem = hub_reachable.problem()
    if problem:
        where, licence = "from the Hub's local cache", None
        offline = f"{', '.join(OFFLINE_NAMES)} and local files work offline"
        if revision:
            raise DataError(
                f"revision `{revision}` of `{plain}` needs the Hub, which cannot be reached ({problem})", offline
            )
    else:
        info = _look_up(plain, repository, revision)
        where, licence = f"at {str(info.sha)[:12]} from the Hub", info.card_data.license if info.card_data else None
    try:
        with _quiet(offline=problem is not None), progress_bars():
            splits = datasets.load_dataset(repository, configuration, revision=revision or None)
    except Exception as error:  # whatever a foreign data set makes of its reader is that data set's fault
        if problem and isinstance(error, ConnectionError):
            raise DataError(
                f"data set `{name}` is not bundled, no local file or folder and not in the local cache, "
                f"and the Hub cannot be reached ({problem})",
                f"{_near(plain)}{offline}",
            ) from error
        raise folders.unreadable(
            f"data set `{name}`",
            error,
            f"data set `{name}` cannot be loaded",
            "give a data set of CSV, JSON or Parquet files, or a local copy",
        ) from error
    facts = [f"{repository} {where}", known.citation if known else "", f"licence {licence}" if licence else ""]
    return Source(
        plain,
        "; ".join(filter(None, facts)),
        splits,
        lambda split: splits[split],
    )


def _look_up(name: str, repository: str, revision: str) -> DatasetInfo:
    """What the Hub knows of a data set; asked first, because load_dataset hides what is wrong behind its cache."""
    try:
        return HfApi().dataset_info(repository, revision=revision or None, timeout=30)
    except GatedRepoError as error:
        raise DataError(
            f"data set `{name}` is gated",
            f"accept its terms at {constants.ENDPOINT}/datasets/{repository}, then run `hf auth login` or set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise DataError(f"data set `{name}` has no revision `{revision}`", "give a branch, tag or commit") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise DataError(
            f"data set `{name}` is not bundled, no local file or folder, and not on the Hub",
            f"{_near(name)}a private one needs `hf auth login` or HF_TOKEN",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise DataError(
            f"data set `{name}` cannot be fetched from the Hub ({folders.first_line(error)})",
            "try again, or give a local copy",
        ) from error


def _near(name: str) -> str:
    return "" if name in BY_NAME else f"{nearest(name, [*OFFLINE_NAMES, *KNOWN])}; "


@contextmanager
def _quiet(offline: bool) -> Iterator[None]:
    """No warnings of `datasets`; and offline, none of the half minute for which its client tries again."""
    was_offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = offline or was_offline
    try:
        with folders.quiet():
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
