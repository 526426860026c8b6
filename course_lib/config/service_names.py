"""Names that a tracker's or the Hub's service would refuse, known before a model is loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from course_lib.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """Rule that a name has to obey.

    Attributes:
        wrong: matches what no name may have.
        said: the same in words.
        longest: characters at most.
    """

    wrong: str
    said: str
    longest: int


WANDB_PROJECT = Rule(r"[/\\#?%:\r\n]", "none of / \\ # ? % : may be in it", 128)
WANDB_TEXT = Rule(r"[\r\n]", "it has to be one line", 128)
TRACKIO_TABLES = (
    "system",
    "configs",
    "traces",
    "artifacts",
    "artifact_versions",
    "artifact_aliases",
    "run_artifact_links",
    "external_run_artifact_links",
)
"""Files that trackio keeps beside a project's own, by the end of their names."""
TRACKIO_PROJECT = Rule(
    rf"^registry-|.+_({'|'.join(TRACKIO_TABLES)})$",
    "it keeps names that begin with registry-, or end as those of its own files (_system, _configs ...), to itself",
    200,
)
RULES: dict[tuple[str, str], Rule] = {
    ("wandb", "project"): WANDB_PROJECT,
    ("wandb", "run_name"): WANDB_TEXT,
    ("wandb", "run_group"): WANDB_TEXT,
    ("trackio", "project"): TRACKIO_PROJECT,
    ("tensorboard", "run_name"): Rule(r"[/\\]|^\.\.?$", "it names a folder", 200),
}
"""Rule by tracker and field; a name that is not listed may be any."""
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
LONGEST_TAG = 64


def check(tracker: str, field: str, name: str) -> None:
    """Refuse a name that a tracker would refuse once the run has begun.

    Raises:
        ConfigError: why, and what to give instead.
    """
    rule = RULES.get((tracker, field))
    if rule is None:
        return
    shown = name if len(name) <= 80 else f"{name[:80]}…"
    if not name.strip():
        raise ConfigError(f"{field} is empty, and {tracker} needs a name", f"give --{field} NAME")
    if len(name) > rule.longest:
        raise ConfigError(
            f"{tracker} takes no {field} `{shown}` of {len(name)} characters",
            f"give --{field} one of up to {rule.longest}",
        )
    plain = name if tracker != "trackio" else "".join(c for c in name if c.isalnum() or c in "-_")
    if re.search(rule.wrong, plain):
        team, _, project = name.partition("/")
        of_team = (tracker, field) == ("wandb", "project") and team and not re.search(WANDB_PROJECT.wrong, project)
        raise ConfigError(
            f"{tracker} takes no {field} `{shown}`: {rule.said}",
            f"name the team by WANDB_ENTITY={team} in the environment, and give --project {project}"
            if of_team and project
            else f"give another --{field}",
        )


def check_environment(trackers: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Refuse settings of W&B's own, in the environment or an env_file, that it would refuse late.

    Raises:
        ConfigError: which, and what to set instead.
    """
    if "wandb" not in trackers:
        return
    mode = environ.get("WANDB_MODE")
    if mode and mode not in WANDB_MODES:
        raise ConfigError(f"WANDB_MODE is `{mode}` in the environment", f"set one of {', '.join(WANDB_MODES)}")
    tags = environ.get("WANDB_TAGS")
    for tag in tags.split(",") if tags else ():
        if not 0 < len(tag) <= LONGEST_TAG:
            raise ConfigError(
                f"WANDB_TAGS has a tag of {len(tag)} characters in the environment",
                f"give tags of 1 to {LONGEST_TAG}, with commas between",
            )


def check_repository(name: str) -> None:
    """Refuse what is no name of a repository of the Hub.

    Raises:
        ConfigError: why, and what to give instead.
    """
    from huggingface_hub.errors import HFValidationError  # slow, and only wanted here
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"push_to_hub `{name}` is no name of a repository ({str(error).splitlines()[0]})",
            "write NAME or OWNER/NAME",
        ) from None
