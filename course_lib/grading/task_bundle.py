"""The exercises as tasks for programs: a folder each, with prompt, files, checker and time limit.

OUT/README.md  tasks.json            what it is; all tasks with points, limits and files
OUT/ddp-ring/prompt.md               what to write: all that a program is told
OUT/ddp-ring/workspace/answer.py     what it starts from
OUT/ddp-ring/task.json  check.py     points and limits; ``python check.py workspace/answer.py`` gives the score
OUT/grader/                          the course's package and the hidden cases, which no program may see
"""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import numpy
import torch

from course_lib.errors import ConfigError, DataError
from course_lib.grading import masters
from course_lib.grading.task import Task
from course_lib.grading.watch import Limits
from course_lib.writing import write_text

FORMAT = 1
"""Raised when a field of task.json or of a result changes its meaning."""
LIMITS = Limits(seconds=60.0, memory=4 << 30)
CHECK = '''"""Grade an answer: python check.py workspace/answer.py [--out result.json]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "grader"))

from course_lib.grading.task_check import main  # noqa: E402

sys.exit(main(Path(__file__).resolve().parent))
'''
README = """# {count} tasks in distributed training

Each folder but `grader/` is a task: a program gets `prompt.md` and `workspace/`, and writes `workspace/answer.py`. What
it has written is graded by behaviour on real processes, in a sandbox, by cases of which most are hidden:

```bash
python {first}/check.py {first}/workspace/answer.py --out result.json
```

The score is between 0 and 1; the exit code is 0 at full points, 1 below, 2 where nothing could be graded. What is in
`workspace/answer.py` now scores 0. Needed: Linux, bubblewrap, Python with torch and numpy (written with torch {torch}).
A checker takes up to {seconds:.0f} s and {memory:.0f} GiB per task. Hidden cases are drawn anew each time; `--seed N`
draws the same ones again.

**Give a program neither `grader/` nor `check.py`**: the hidden cases are in them. `tasks.json` lists all tasks with
points, difficulty (1 to 5) and the minutes that a learner takes.
"""
PROMPT = """# {title}

{text}

## What to hand in

Write `answer.py`. It defines `{function}`{ranks}. It starts as

```python
{stub}
```

Points: {points}.

It may import torch, numpy and Python's standard library. It has {seconds:.0f} s and {memory:.0f} GiB for all cases
together. Nothing that it prints or writes is looked at.
"""
ON_RANKS = ", which is called on every one of the 1 to 4 ranks of a process group (gloo, on a CPU)"
_DETAILS = re.compile(r"<details>.*?</details>\n*", re.DOTALL)
_HEADING = re.compile(r"^## (?:\d+\. )?(.*)\n+`[^\n]*points[^\n]*\n+")
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def bundle(course: Path, out: Path, tasks: Mapping[str, Task]) -> list[Path]:
    """Write tasks for programs, all of them or nothing.

    Args:
        course: folder of the course, with solutions/.
        out: to be made; may be there if it is empty.
        tasks: by name.
    Returns:
        The tasks' folders.
    Raises:
        ConfigError: ``out`` is in use, or lies within the package.
        DataError: an exercise has no text or no hidden cases, or a text would give a solution away.
    """
    out, course = out.resolve(), course.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is in use", "name a new folder")
    if out.is_relative_to(course / "course_lib"):
        raise ConfigError(f"{out} lies within what is to be copied", "name a folder outside the course")
    lessons = sorted({task.lesson for task in tasks.values()})
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        inside = Path(folder) / out.name
        about = []
        for lesson in lessons:
            path = course / "solutions" / f"{lesson}.ipynb"
            texts, stubs = prompts(path), masters.answers_of(masters.released(path))
            full = masters.answers(path)
            for name, task in tasks.items():
                if task.lesson == lesson:
                    given = texts.get(name, ""), stubs.get(name, ""), full.get(name, "")
                    about.append(_write_task(inside, task, *given))
        write_text(inside / "tasks.json", json.dumps({"format": FORMAT, "tasks": about}, indent=1) + "\n")
        write_text(
            inside / "README.md",
            README.format(
                count=len(about),
                first=about[0]["id"],
                torch=torch.__version__.split("+")[0],
                seconds=LIMITS.seconds,
                memory=LIMITS.memory / 2**30,
            ),
        )
        _write_grader(course, inside / "grader", lessons)
        if out.exists():
            out.rmdir()
        inside.rename(out)
    return [out / task["id"] for task in about]


def prompts(path: Path) -> dict[str, str]:
    """The text of each exercise of a master notebook by task name, without hints, expected output and links.

    Raises:
        DataError: an answer cell has no text before it.
    """
    texts: dict[str, str] = {}
    text = ""
    names = {task.grade_id: name for name, task in masters.TASKS.items()}
    for cell in nbformat.read(path, as_version=4).cells:
        about = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown":
            text = cell.source
        elif about.get("solution") and about["grade_id"] in names:
            if not _HEADING.match(text):
                raise DataError(
                    f"{path.name} has no text before {about['grade_id']}", "give it a heading and its points"
                )
            body = _DETAILS.sub("", _HEADING.sub("", text))
            texts[names[about["grade_id"]]] = _LINK.sub(r"\1", body).strip()
    return texts


def _write_task(inside: Path, task: Task, text: str, stub: str, solution: str) -> dict[str, Any]:
    """One task's folder; what tasks.json says of it."""
    if not text or masters.STUB not in stub:
        raise DataError(f"{task.lesson} has no text or no stub of {task.name}", "look at its master notebook")
    folder = inside / task.grade_id
    (folder / "workspace").mkdir(parents=True)
    about = {
        "format": FORMAT,
        "id": task.grade_id,
        "name": task.name,
        "title": task.title,
        "lesson": task.lesson,
        "function": task.function,
        "difficulty": task.difficulty,
        "importance": task.importance,
        "minutes": task.minutes,
        "on_ranks": task.needs_ranks,
        "points": dict(task.points),
        "essential": list(task.essential),
        "prompt": "prompt.md",
        "files": ["workspace/answer.py"],
        "check": "python check.py workspace/answer.py",
        "seconds": LIMITS.seconds,
        "memory_gib": LIMITS.memory / 2**30,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    prompt = PROMPT.format(
        title=task.title[0].upper() + task.title[1:],
        text=text,
        function=task.function,
        ranks=ON_RANKS if task.needs_ranks else "",
        stub=stub.strip(),
        seconds=LIMITS.seconds,
        memory=LIMITS.memory / 2**30,
        points=", ".join(f"{name} {points}" for name, points in task.points.items()),
    )
    if solution.strip() in prompt:
        raise DataError(f"the prompt of {task.name} would give its solution away", "look at its marks")
    write_text(folder / "prompt.md", prompt)
    write_text(folder / "workspace" / "answer.py", stub.strip() + "\n")
    write_text(folder / "task.json", json.dumps(about, indent=1) + "\n")
    write_text(folder / "check.py", CHECK)
    return about


def _write_grader(course: Path, grader: Path, lessons: list[str]) -> None:
    """The package and the hidden cases of some lessons, laid out as in the course."""
    shutil.copytree(
        course / "course_lib",
        grader / "course_lib",
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc", ".ipynb_checkpoints"),
    )
    (grader / "solutions" / "hidden").mkdir(parents=True)
    for lesson in lessons:
        source = course / "solutions" / "hidden" / f"{lesson}.py"
        if not source.is_file():
            raise DataError(f"no hidden cases of {lesson}", f"add {source}")
        shutil.copy2(source, grader / "solutions" / "hidden")
