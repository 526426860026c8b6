"""Keeps keys and tokens out of whatever is written: logs, configs, trackers, errors."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from course_lib.errors import ConfigError

HIDDEN = "***"
_SECRET_NAME = re.compile(r"(?i)(^|[_-])(token|api_?key|access_?key|secret|secret_?key|password|passwd|credentials?)$")
_SHAPES = (  # how the services write their keys
    re.compile(r"\bhf_[A-Za-z0-9]{16,}"),
    re.compile(r"\bwandb_v1_\w{16,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{20,}"),
    re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[A-Za-z0-9._~+/-]{8,}"),
    re.compile(r"(?i)(?<=key=)[^\s\"'&]{8,}"),
    re.compile(r"(?i)(?<=token=)[^\s\"'&]{8,}"),
    re.compile(r"(?i)(?<=secret=)[^\s\"'&]{8,}"),
    re.compile(r"(?i)(?<=password=)[^\s\"'&]{4,}"),
)


def is_secret(name: str) -> bool:
    """Whether a variable or field of that name holds a key: ``HF_TOKEN``, ``WANDB_API_KEY``, ``password``."""
    return _SECRET_NAME.search(name) is not None


def redact(text: str) -> str:
    """The text without the keys in this process's environment, and without whatever has the shape of a key."""
    secrets = {value for name, value in os.environ.items() if len(value) >= 8 and is_secret(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for shape in _SHAPES:
        text = shape.sub(HIDDEN, text)
    return text


def redacted(value: Any) -> Any:
    """The same mappings, lists and plain values, with every string redacted and secret fields hidden."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if is_secret(str(name)) and isinstance(inner, str) and inner else redacted(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value


def read_env_file(path: str | Path) -> dict[str, str]:
    """Variables of a file of ``NAME=value`` lines, as shells and Docker read them; ``#`` begins a comment line.

    Raises:
        ConfigError: no such file, or a line of another form. The line itself is not shown.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read env_file {path} ({getattr(error, 'strerror', 'it is not UTF-8')})",
            "give a file of NAME=value lines",
        ) from None
    secrets = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not name.strip().isidentifier():
            raise ConfigError(f"line {number} of env_file {path} is not NAME=value", "mend it, or begin it with #")
        secrets[name.strip()] = value.strip().strip("\"'")
    return secrets
