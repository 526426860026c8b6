"""The front page's map of the lessons, from the lessons themselves and the README's table of them."""

import re
from pathlib import Path
from typing import NamedTuple

import nbformat

from book.moving_picture import drawing

ROOT = Path(__file__).resolve().parents[1]
PARTS = (("start", "Start", 0, 0), ("replicas", "One model on every rank", 1, 4), ("cuts", "The model, cut up", 5, 8),
         ("costs", "What it costs, what breaks", 9, 10), ("work", "At work", 11, 13),
         ("further", "One question more", 14, 99))
"""Parts of the course, as the end of lesson 00 has them: class, name, first and last lesson."""


class Lesson(NamedTuple):
    """What the map says of a lesson.

    Args:
        path: of the notebook, relative to the repository's root.
        number: 0 for the first.
        question: the lesson's title.
        time: to read and try, in words.
        measures: what one measures in it.
    """

    path: str
    number: int
    question: str
    time: str
    measures: str


def lessons() -> list[Lesson]:
    """All lessons, in order.

    Raises:
        ValueError: a lesson lacks its title or time, or the README's table lacks the lesson.
    """
    table = dict(re.findall(r"^\| \[[^\]]+\]\((notebooks/\S+?\.ipynb)\) \| [^|]+ \| ([^|]+) \|$",
                            (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    found = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        first = nbformat.read(path, as_version=4).cells[0].source
        title = re.match(r"# (\d+) · (.+)", first)
        time = re.search(r"^\*\*Time\*\*:? (?:about )?(\d+ minutes)", first, re.MULTILINE)
        name = str(path.relative_to(ROOT))
        if not title or not time or name not in table:
            raise ValueError(f"{name} needs a title, a time, and a row in the README's table of lessons")
        found.append(Lesson(name, int(title[1]), title[2], time[1], table[name]))
    return found


def filled(page: str) -> str:
    """The front page with its map and its table of contents."""
    every = lessons()
    cards, toctree = [], []
    for name, title, first, last in PARTS:
        part = [lesson for lesson in every if first <= lesson.number <= last]
        cards += [f"### {title}\n", ":::::{grid} 1 2 2 3", f":gutter: 3\n:class-container: part part-{name}\n"]
        for lesson in part:
            cards += [f"::::{{grid-item-card}} {lesson.number:02} · {lesson.question}", f":link: {lesson.path[:-6]}",
                      ":link-type: doc\n", f"{lesson.measures[:1].upper() + lesson.measures[1:]}\n",
                      ":::{card-footer}", lesson.time, ":::", "::::\n"]
        cards.append(":::::\n")
        toctree += [lesson.path[:-6] for lesson in part]
    parts = {"map": "\n".join(cards), "lessons": "\n".join(toctree), "picture": f"```{{raw}} html\n{drawing()}\n```"}
    for name, text in parts.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page
