"""The catalogue's tables of models and hardware, as plain data."""

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def read(name: str) -> dict[str, Any]:
    """A table of ``catalogue/`` by its name: ``models``, ``hardware``.

    NAME.json is read where it lies there, which is so in the book's pages alone: a browser's Python has no YAML.
    """
    folder = resources.files("course_lib.planning").joinpath("catalogue")
    if (file := folder.joinpath(f"{name}.json")).is_file():
        return json.loads(file.read_text(encoding="utf-8"))
    import yaml

    text = folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
