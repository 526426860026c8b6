"""The front page's map of the lessons, from the lessons themselves and the README's table of them."""

import re
from pathlib import Path
from typing import NamedTuple

import nbformat

from book import open_elsewhere
from book.moving_picture import drawing

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    ("start", "Start", 0, 0),
    ("replicas", "One model on every rank", 1, 4),
    ("cuts", "The model, cut up", 5, 8),
    ("costs", "What it costs, what breaks", 9, 10),
    ("work", "At work", 11, 13),
    ("further", "One question more", 14, 99),
)
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
    table = dict(
        re.findall(
            r"^\| \[[^\]]+\]\((notebooks/\S+?\.ipynb)\) \| [^|]+ \| ([^|]+) \|$",
            (ROOT / "README.md").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
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


def part_of(number: int) -> str:
    """Class of the part that a lesson belongs to."""
    return next(name for name, _, first, last in PARTS if first <= number <= last)


def filled(page: str) -> str:
    """The front page with its picture, where to get the course, its map and its table of contents."""
    every = lessons()
    listed, toctree = [], []
    for name, title, first, last in PARTS:
        part = [lesson for lesson in every if first <= lesson.number <= last]
        listed += [f":::::{{div}} part part-{name}\n**{title}**\n"]
        for lesson in part:
            listed.append(
                f"1. [{lesson.number:02} · {lesson.question}]({lesson.path})<br>"
                f"{lesson.measures[:1].upper() + lesson.measures[1:]} *{lesson.time}*"
            )
        listed.append("\n:::::\n")
        toctree += [lesson.path[:-6] for lesson in part]
    fillings = {
        "map": "\n".join(listed),
        "lessons": "\n".join(toctree),
        "picture": f"```{{raw}} html\n{drawing()}\n```",
        "get": where_to_get(open_elsewhere.REPOSITORY),
    }
    for name, text in fillings.items():
        page = page.replace(f"<!-- {name} -->", text)
    return page


def where_to_get(repository: str) -> str:
    """Markdown that says how to get the course.

    Args:
        repository: OWNER/NAME on GitHub; empty where the book is built from a checkout, which its reader then has.
    """
    if not repository:
        return (
            "This book was built from a checkout of the course, which its reader has. In its folder:\n\n"
            "```bash\nmake lab     # sets up .venv, opens JupyterLab at lesson 00 with the exercises beside it\n"
            "make train   # fine-tunes MiniLM on 2 processes (or on every GPU), ends with a table\n```\n\n"
            "`pip install .` there brings its tools into an environment of yours "
            "([what they need](docs/setup.md#without-the-course))."
        )
    address = f"https://github.com/{repository}"
    elsewhere = open_elsewhere.places("00_start_here", repository)
    return (
        f"```bash\ngit clone {address} course && cd course\n"
        "make lab     # sets up .venv, opens JupyterLab at lesson 00 with the exercises beside it\n"
        "make train   # fine-tunes MiniLM on 2 processes (or on every GPU), ends with a table\n```\n\n"
        f"Nothing to install: open lesson 00 in [Colab]({elsewhere['Colab']}), as every lesson's margin offers, "
        f"or the whole course in [Codespaces]({elsewhere['Codespaces']}). Its tools alone, for trainings of yours: "
        f"`pip install git+{address}` ([what they need](docs/setup.md#without-the-course))."
    )
