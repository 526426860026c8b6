"""Finds a model by name: in a folder, a package, the Hub or its cache; a clear error where it is nowhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from course_lib.config import ModelConfig
from course_lib.errors import ModelError, nearest
from course_lib.modeling import checkpoint_files, minilm, presets
from course_lib.system import hub_reachable


@dataclass(frozen=True)
class Origin:
    """A place that transformers can read a model from."""

    path: str
    """Folder or Hub name."""
    source: str
    """One line for people: where it is, and what was verified."""
    options: dict[str, Any]
    """How transformers must look for it: revision, local_files_only."""


def locate(config: ModelConfig) -> Origin:
    """The place that a name means: MiniLM's files, a local folder, or a model on the Hub, in this order.

    Raises:
        ModelError: there is no such model, or it is out of reach.
    """
    name = config.model
    if not name:
        raise ModelError("model is empty", "give a preset, a local folder or a Hub name: " + ", ".join(presets.NAMES))
    if name == minilm.NAME:
        refuse_revision(config, "a preset")
        folder, source = minilm.find()
        return Origin(str(folder), source, {"local_files_only": True})
    if Path(name).expanduser().exists() or not _could_be_on_hub(name):
        refuse_revision(config, "a local folder")
        return local(name)
    problem = hub_reachable.problem()
    options = {"revision": config.revision or "main", "local_files_only": problem is not None}
    _check_on_hub(name, options, problem)
    return Origin(name, f"{name} at {options['revision']} from the Hub{'’s local cache' if problem else ''}", options)


def local(folder: str | Path) -> Origin:
    """A folder in Hugging Face form.

    Raises:
        ModelError: it is not there, or holds no whole model.
    """
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise ModelError(
            f"model folder {folder} is a file",
            "give the folder with config.json, the weights and the tokenizer, which save_pretrained writes",
        )
    if not path.exists():
        raise ModelError(
            f"model folder {folder} does not exist",
            "give a folder with config.json, a Hub name, or a preset: " + ", ".join(presets.NAMES),
        )
    checkpoint_files.check(path)
    return Origin(str(path), f"folder {folder}", {"local_files_only": True})


def refuse_revision(config: ModelConfig, what: str) -> None:
    """Only a model on the Hub has revisions."""
    if config.revision:
        raise ModelError(
            f"revision `{config.revision}` has no meaning for `{config.model}`, which is {what}",
            "leave it out, or give a Hub name",
        )


def _could_be_on_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _check_on_hub(name: str, options: dict[str, Any], problem: str | None) -> None:
    """Ask for the smallest file first: the Hub client's errors say what is wrong, transformers' no longer do."""
    presets_hint = nearest(name, presets.NAMES)
    try:
        hf_hub_download(name, "config.json", **options)
    except GatedRepoError as error:
        raise ModelError(
            f"model `{name}` is gated",
            f"accept its terms at {constants.ENDPOINT}/{name}, then run `hf auth login` or set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"model `{name}` is no preset, no local folder, and not on the Hub",
            f"{presets_hint} (a private model needs `hf auth login` or HF_TOKEN)",
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"model `{name}` has no revision `{options['revision']}`",
            "give a branch, tag or commit, or leave it out for main",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"model `{name}` is no preset, no local folder and not in the local cache, and the Hub "
            f"cannot be reached ({problem or error})",
            presets_hint,
        ) from error
    except EntryNotFoundError as error:
        _refuse_adapter(name, options)
        raise ModelError(
            f"`{name}` on the Hub has no config.json, so transformers cannot load it",
            "give a model in transformers' format",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"model `{name}` could not be fetched from the Hub ({error})",
            "try again, or give a preset or a local folder",
        ) from error


def _refuse_adapter(name: str, options: dict[str, Any]) -> None:
    """Say of a repository without config.json that it holds an adapter, where it does."""
    try:
        file = hf_hub_download(name, "adapter_config.json", **options)
    except (HfHubHTTPError, OSError):
        return
    base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise checkpoint_files.adapter(name, base)
