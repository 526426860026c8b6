"""The lessons' titles and questions and the exercises' points, as a script for the page "My progress"."""

import json
import re
from pathlib import Path
from typing import Any

import nbformat

from book import front_page
from book.stored_questions import questions_of

ROOT = Path(__file__).resolve().parents[1]
NAME = "course-contents.js"


def script() -> str:
    """JavaScript that sets ``courseContents``: a page opened from a file can load it, but fetch nothing."""
    return f"window.courseContents = {json.dumps(contents(), ensure_ascii=False)};\n"


def contents() -> dict[str, list[dict[str, Any]]]:
    """Lessons with their title and names of questions; exercises with their lesson, page, title and points."""
    lessons, exercises = [], []
    for lesson in front_page.lessons():
        found = questions_of(nbformat.read(ROOT / lesson.path, as_version=4).cells).values()
        asked = [{"name": one.name, "id": one.anchor, "ask": one.ask.replace("`", "")} for one in found]
        lessons.append(
            {"lesson": Path(lesson.path).stem, "title": f"{lesson.number:02} · {lesson.question}", "questions": asked}
        )
    for path in sorted((ROOT / "exercises").glob("[0-9]*.ipynb")):
        title = ""
        for cell in nbformat.read(path, as_version=4).cells:
            if heading := re.search(r"^## \d+\. (.+)", cell.source, re.MULTILINE):
                title = heading[1]
            if checked := re.match(r'check\("([^"]+)"', cell.source):
                exercises.append(
                    {"name": checked[1], "lesson": path.stem, "title": title, "points": cell.metadata.nbgrader.points}
                )
    return {"lessons": lessons, "exercises": exercises}
