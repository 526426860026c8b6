"""The answers of hostile.yaml, which says what they are."""

from dataclasses import dataclass
from pathlib import Path

import yaml

_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
LIES, HANGING_RANKS, BOMBS, PROBES = (_FILE[kind] for kind in ("lies", "hangs", "bombs", "probes"))
FORGED, ALONE = _FILE["forged"], _FILE["alone"]
PRETENDS = {name: source + _FILE["averages alone"] for name, source in _FILE["pretends"].items()}


@dataclass(frozen=True)
class Hostile:
    """An attack: its family, its name, how one sees on the naive grader that it works, and the answer."""

    family: str
    name: str
    works: str
    source: str


def _with_a_total(source: str) -> str:
    return source if "def total" in source else f"{source}def total(values):\n    return 0\n"


ALL = [
    Hostile(each["family"], name, each["works"], _with_a_total(source))
    for each in _FILE["answers"]
    for name, source in each["answers"].items()
]
