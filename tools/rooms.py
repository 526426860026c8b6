"""Draws the rooms of course_lib from the import contract in pyproject.toml, into docs/pictures/rooms.svg.

python tools/rooms.py
"""

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

from course_lib.writing import write_text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/pictures/rooms.svg"
WIDTH, GAP, MARGIN = 920, 8, 16
ALONE, OTHER, EDGE, INK, FAINT = "#dbe9f6", "#f4f4f4", "#8a8a8a", "#1a1a1a", "#555555"
"""Fill of the rooms that need torch alone, and of the others; lines; text."""


def layers() -> list[list[str]]:
    """The rooms of each layer, the uppermost first, as the contract has them."""
    contracts = {each["id"]: each for each in _contracts()}
    return [[name.strip() for name in layer.split(":")] for layer in contracts["layers"]["layers"]]


def alone() -> set[str]:
    """The rooms that need torch alone."""
    contracts = {each["id"]: each for each in _contracts()}
    return {name.removeprefix("course_lib.") for name in contracts["torch-alone"]["source_modules"]}


def _contracts() -> list[dict]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return project["tool"]["importlinter"]["contracts"]


def about(room: str) -> str:
    """What a room is, by the first line of its docstring."""
    folder = ROOT / "course_lib" / room
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
    return first.rstrip(".").replace("`", "")


def drawing() -> str:
    """The picture, as SVG: a row for each layer, a box for each room."""
    torch_alone = alone()
    says = "A room imports from the rows below its own; within a row in one direction only."
    parts, top = [_text(MARGIN, MARGIN + 12, says, 13, INK)], MARGIN + 26
    for rooms in layers():
        width = (WIDTH - 2 * MARGIN - GAP * (len(rooms) - 1)) / len(rooms)
        captions = [_wrapped(about(room), width - 20) for room in rooms]
        height = 30 + 14 * max(map(len, captions))
        for place, (room, lines) in enumerate(zip(rooms, captions, strict=True)):
            left = MARGIN + place * (width + GAP)
            fill = ALONE if room in torch_alone else OTHER
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{height}" rx="4" fill="{fill}" '
                f'stroke="{EDGE}"/>'
            )
            parts.append(_text(left + 10, top + 18, room, 13, INK, weight="bold"))
            parts += [_text(left + 10, top + 35 + 14 * number, line, 11, FAINT) for number, line in enumerate(lines)]
        top += height + GAP
    parts.append(f'<rect x="{MARGIN}" y="{top + 2}" width="14" height="12" fill="{ALONE}" stroke="{EDGE}"/>')
    says = "needs torch alone: can be used without the rest of the course"
    parts.append(_text(MARGIN + 20, top + 12, says, 11, FAINT))
    height = top + 12 + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: int, colour: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'


def _wrapped(text: str, width: float) -> list[str]:
    """Up to two lines of what fits at 11 pixels, where a letter of the widest font takes 6.4 on the average."""
    return textwrap.wrap(text, int(width / 6.4), max_lines=2, placeholder=" …")


if __name__ == "__main__":
    write_text(PICTURE, drawing())
    print(PICTURE.relative_to(ROOT))
