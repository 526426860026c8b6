"""Pushes a trained model to the Hugging Face Hub: refuses early what would fail, and can be repeated after a failure.

The token comes from ``HF_TOKEN`` or from ``hf auth login`` and is handed to the Hub's client alone.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from course_lib.errors import CourseError, ModelError
from course_lib.modeling import checkpoint_files, lora_files
from course_lib.system import hub_reachable
from course_lib.tracking.redact import redact

CARD = "README.md"
HTTPError: Any = HfHubHTTPError.__base__  # of the client: httpx in huggingface-hub 1, httpx2 in 2


class HubError(CourseError):
    """The Hub cannot be written to; what was trained is still where it was."""


def prepare(repo: str, *, private: bool = False) -> str:
    """Make sure that the repository is there and may be written to, before hours are spent on what it is to hold.

    Args:
        repo: ``NAME``, of the token's owner, or ``OWNER/NAME``.
        private: for a repository that is not there yet; one that is stays as it is.
    Returns:
        ``OWNER/NAME``.
    Raises:
        HubError: no token, no right, no network, or no such name.
    """
    with _said(repo, "nothing was trained yet"):
        token = _reachable(repo)
        return HfApi().create_repo(repo, private=private, exist_ok=True, token=token).repo_id


def push(folder: Path, repo: str, *, private: bool = False, message: str = "Trained model") -> str:
    """Send a model's folder as one commit; files that are there already are not sent again.

    Args:
        folder: with ``config.json``, or an adapter, as
            :func:`course_lib.training.checkpoints.model_folder.write_model` leaves it.
            In the card that is sent, the folder's name is the repository's.
        repo: as for :func:`prepare`.
        private: as for :func:`prepare`.
        message: of the commit.
    Returns:
        The commit's address.
    Raises:
        HubError: the reason, and how to go on; the folder is untouched.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise HubError(f"{folder} holds no model", "give a folder with config.json, such as runs/NAME/model")
    try:
        alone = lora_files.is_adapter(folder)
        checkpoint_files.check_finite([folder / lora_files.WEIGHTS] if alone else checkpoint_files.check(folder))
    except ModelError as error:
        raise HubError(error.what, error.instead) from None
    with _said(repo, f"the model is whole in {folder}; go on with `course push {folder} --push_to_hub {repo}`"):
        token = _reachable(repo)
        api = HfApi()
        full = api.create_repo(repo, private=private, exist_ok=True, token=token).repo_id
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CARD]
        operations = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
        card = folder / CARD
        if card.exists():
            text = card.read_text(encoding="utf-8").replace(str(folder), full)
            operations.append(CommitOperationAdd(CARD, redact(text).encode()))
        return api.create_commit(full, operations, commit_message=message, token=token).commit_url


def _reachable(repo: str) -> str:
    """The token, where the name is one and the Hub answers; its client alone would try again for 23 s."""
    validate_repo_id(repo)
    token = get_token()
    if not token:
        raise HubError(
            "push_to_hub needs a token of the Hub, and there is none", "set HF_TOKEN, or log in with `hf auth login`"
        )
    if constants.is_offline_mode():
        raise OfflineModeIsEnabled
    if problem := hub_reachable.problem(timeout=5.0):
        raise ConnectionError(problem)
    return token


@contextlib.contextmanager
def _said(repo: str, safe: str) -> Iterator[None]:
    """One line for whatever the Hub's client raises about ``repo``; ``safe`` says what was not lost, and what to do."""
    try:
        yield
    except HFValidationError as error:
        raise HubError(
            f"push_to_hub `{repo}` is no name of a repository ({_first_line(error)})", "write NAME or OWNER/NAME"
        ) from None
    except OfflineModeIsEnabled:
        raise HubError(f"cannot push to {repo}: HF_HUB_OFFLINE forbids the network", f"unset it; {safe}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        reason = {
            401: "the Hub does not know the token",
            403: "the token has no right to write there",
            404: "there is no such repository or owner, or the token may not see it",
        }.get(status, f"the Hub answered {status}: {_first_line(error)}")
        raise HubError(f"cannot push to {repo}: {reason}", safe) from None
    except (HTTPError, OSError) as error:
        raise HubError(
            f"cannot push to {repo}: {constants.ENDPOINT} cannot be reached ({_first_line(error)})", safe
        ) from None
    except RuntimeError as error:
        if not isinstance(error.__cause__, HTTPError | OSError):
            raise
        raise HubError(
            f"cannot push to {repo}: the upload broke off ({_first_line(error)} {_first_line(error.__cause__)})", safe
        ) from None


def _first_line(error: BaseException) -> str:
    return redact((str(error) or type(error).__name__).strip().splitlines()[0])[:200]
