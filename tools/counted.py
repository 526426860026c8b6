"""Counts the planner's bundled models anew: ``python tools/counted.py`` writes planning/catalogue/counted.json.

Each is built on the meta device from its config in models.yaml; a line has its sizes where they are not the defaults,
and what is different without the layer that gives logits.
"""

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from course_lib.planning import models
from course_lib.writing import write_text

TABLE = Path(models.__file__).parent / "catalogue" / "counted.json"


def table() -> str:
    """The file's text."""
    lines = []
    for name, config in models.bundled().items():
        sizes = {key: value for key, value in config.items() if key != "also"}
        whole, base = (asdict(models.from_config(sizes, name, head)) for head in (True, False))
        defaults = {field.name: field.default for field in fields(models.Model) if field.default is not MISSING}
        told = {key: value for key, value in whole.items() if key != "name" and value != defaults.get(key, MISSING)}
        row = {"model": told, "without logits": {key: base[key] for key in base if base[key] != whole[key]}}
        lines.append(f"{json.dumps(name)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    write_text(TABLE, table())
