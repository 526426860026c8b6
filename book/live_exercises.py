"""The page of exercises that are checked in the browser: text and first code from the notebooks, and an editor."""

import html
import re
from pathlib import Path

import nbformat

from book.live.exercises import TASKS
from course_lib.grading.task import Task

ROOT = Path(__file__).resolve().parents[1]
LIVE = "../_static/live"
HEAD = f"""# Exercises in the page

The exercises of lessons 07 and 09 that are arithmetic. Write an answer, press Check, and their own checker
runs it and says what it says in the notebook: Python in your browser, nothing to install. Nothing leaves it;
what you write is kept in this browser. Ctrl+Enter checks too, and Stop ends an answer that runs for ever.

[`pipeline.run`](../exercises/07_pipeline_schedules.ipynb), which needs ranks and torch, is in the notebook alone.

```{{raw}} html
<link rel="stylesheet" href="{LIVE}/live.css">
<div id="exercises" class="live"><p class="live-body" hidden>Python is ready: write, and press Check.</p></div>
<script src="{LIVE}/live.js"></script>
<script src="{LIVE}/files.js"></script>
```
"""
EDITOR = """```{{raw}} html
<div class="live-exercise" data-task="{name}">
<label>your answer to {name}<textarea rows="{rows}" spellcheck="false" autocapitalize="off" autocomplete="off" disabled>
{code}</textarea></label>
<p><button type="button" name="check" disabled>Check</button> <button type="button" disabled>Stop</button>
<button type="button" disabled>Begin anew</button></p>
<div class="live-report" role="status" tabindex="0" hidden></div>
</div>
```
"""


def pages() -> dict[str, str]:
    """The page by its path."""
    parts, lesson = [HEAD], ""
    for task in TASKS.values():
        if task.lesson != lesson:
            lesson = task.lesson
            parts.append(
                f"## Lesson {lesson[:2]}\n\nFrom [the notebook](../exercises/{lesson}.ipynb); "
                f"[the lesson](../notebooks/{lesson}.ipynb).\n"
            )
        said, code = of_notebook(task)
        parts += [
            re.sub(r"^## \d+\. ", "### ", said) + "\n",
            EDITOR.format(name=task.name, rows=code.count("\n") + 8, code=html.escape(code)),
        ]
    parts.append(f'```{{raw}} html\n<script src="{LIVE}/exercises.js"></script>\n```\n')
    return {"live/exercises.md": "\n".join(parts)}


def of_notebook(task: Task) -> tuple[str, str]:
    """What a task's notebook says of it, and the code that an answer begins with."""
    cells = nbformat.read(ROOT / "exercises" / f"{task.lesson}.ipynb", as_version=4).cells
    ids = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in cells]
    place = ids.index(task.grade_id)
    return cells[place - 1].source, cells[place].source
