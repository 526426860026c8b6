"""Writes files that are never half there."""

import os
import tempfile
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Write a file beside its place, flush it to disk and rename it, so that it is never half there."""
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
