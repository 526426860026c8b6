"""Players of recorded ranks: the page that lists them, a lesson's own, and the scripts that bring the recordings."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from book.command_pages import escaped

ROOT = Path(__file__).resolve().parents[1]
RECORDINGS = Path(__file__).parent / "recordings"
FILES = {"tools/recordings.py", "course_lib/metering/recorder.py"}
"""What its page links to, relative to the repository's root."""
HEADING = "The ranks, side by side"
LANE, BELOW = 69, 560
"""Pixels of a player: for each rank, and for all else."""
INTRODUCTION = """# Ranks side by side

What real ranks did, recorded line by line on one clock, and played: a lane for each rank, arrows for messages, a line
down the lanes for a collective, hatched where a rank waits. The times are those of the machine that made the
recording, with more ranks than cores at that; following the lines takes some 20 µs each.

[tools/recordings.py](source:tools/recordings.py) has what is recorded, and
[metering/recorder.py](source:course_lib/metering/recorder.py) what records it.
"""


def recordings() -> dict[str, dict[str, Any]]:
    """All recordings by name, those of a lesson one after the other."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDINGS.glob("*.json"))}


def files() -> dict[str, bytes]:
    """The scripts that bring the recordings, by their path among the sources."""
    made = {}
    for name, recording in recordings().items():
        for part in recording["code"]:
            part["html"] = coloured(part["lines"])
        data = json.dumps(recording, ensure_ascii=False, separators=(",", ":"))
        made[f"_static/recordings/{name}.js"] = f"courseRecording({json.dumps(name)}, {data});\n".encode()
    return made


def coloured(lines: list[str]) -> list[str]:
    """Source lines as HTML, in the classes of the book's listings, less the indentation of all of them."""
    lexer = PythonLexer(stripnl=False, ensurenl=True)
    html = highlight(textwrap.dedent("\n".join(lines)), lexer, HtmlFormatter(nowrap=True)).split("\n")[: len(lines)]
    return html + [""] * (len(lines) - len(html))


def page() -> dict[str, str]:
    """The page with all players, by its path."""
    parts = [INTRODUCTION]
    for name, recording in recordings().items():
        lesson = next(path for path in (ROOT / "notebooks").glob(f"{name[:2]}_*.ipynb"))
        parts.append(
            f"## {escaped(recording['title'])}\n\n{escaped(recording['says'])} Lesson "
            f"[{name[:2]}](../notebooks/{lesson.name}).\n\n{player(name, recording)}\n"
        )
    return {"live/ranks.md": "\n".join(parts)}


def player(name: str, recording: dict[str, Any]) -> str:
    """A player as Markdown, for a page in a folder of the book."""
    height = len(recording["ranks"]) * LANE + BELOW
    return (
        f'```{{raw}} html\n<div class="ranks" id="ranks-{name}" data-name="{name}" '
        f'data-source="../_static/recordings/{name}.js" style="min-height: {height}px">'
        f'<p><button type="button">Play the ranks</button></p></div>\n```'
    )


def with_players(text: str, page: Path) -> str:
    """A notebook's text with the players of its lesson at its end, or before what comes after the lesson.

    Args:
        text: of a notebook that is a page of the book.
        page: its path in the book.
    """
    own = {name: recording for name, recording in recordings().items() if page.name.startswith(name[:3])}
    if page.parts[0] != "notebooks" or not own:
        return text
    notebook = nbformat.reads(text, as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("\n".join(_section(own)), id="ranks-side-by-side"))
    return nbformat.writes(notebook) + "\n"


def _section(own: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield (
        f"## {HEADING}\n\nThis lesson's code on real ranks, recorded and played: step with the arrow keys, or press "
        "▶. [All recordings](../live/ranks.md)\n"
    )
    for name, recording in own.items():
        yield f"### {escaped(recording['title'])}\n\n{escaped(recording['says'])}\n\n{player(name, recording)}\n"
