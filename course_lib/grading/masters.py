"""The master notebooks: what learners get of them, and the sources of their answer cells.

`solutions/NN_topic.ipynb` are in nbgrader's format. `exercises/` is made from them by nbgrader's own preprocessors:
what stands between ``### BEGIN SOLUTION`` and ``### END SOLUTION`` becomes a stub, hidden tests vanish.
"""

import re
from pathlib import Path

import nbformat

from course_lib.errors import DataError
from course_lib.grading.cells import python_of
from course_lib.grading.tasks import TASKS
from course_lib.writing import write_text

STUB = 'raise NotImplementedError("write your answer here")'
MARKS = re.compile(r"^[ \t]*### (?:BEGIN|END) SOLUTION\n?", re.MULTILINE)


def masters(folder: Path) -> list[Path]:
    """The master notebooks of a folder, in order.

    Raises:
        DataError: there are none.
    """
    notebooks = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise DataError(f"no master notebooks in {folder}", "run it in a clone of the course: wheels don't have them")
    return notebooks


def answers(path: Path) -> dict[str, str]:
    """The full answers of a master notebook: the source of each answer cell by task name."""
    return answers_of(path.read_text(encoding="utf-8"))


def answers_of(text: str) -> dict[str, str]:
    """The sources of a notebook's answer cells by task name, as Python, less the marks of a master."""
    names = {task.grade_id: name for name, task in TASKS.items()}
    cells = [(cell.metadata.get("nbgrader", {}), cell.source) for cell in nbformat.reads(text, as_version=4).cells]
    return {
        names.get(about["grade_id"], about["grade_id"]): python_of(MARKS.sub("", source)).text
        for about, source in cells
        if about.get("solution")
    }


def released(path: Path) -> str:
    """The learners' notebook that a master makes, as text; the same for the same master.

    Source: the preprocessors of ``nbgrader generate_assignment``, less those that keep its database.

    Raises:
        DataError: nbgrader is not installed.
    """
    try:  # its modules take the better part of a second
        from nbgrader.preprocessors import (
            CheckCellMetadata,
            ClearHiddenTests,
            ClearOutput,
            ClearSolutions,
            ComputeChecksums,
            LockCells,
        )
    except ModuleNotFoundError as missing:
        raise DataError(f"no module {missing.name}", 'pip install -e ".[grading]"') from None
    from traitlets.config import Config

    config = Config({"ClearSolutions": {"code_stub": {"python": STUB}}})
    notebook, resources = nbformat.read(path, as_version=4), {"unique_key": path.stem}
    for step in (
        LockCells,
        ClearSolutions,
        ClearOutput,
        CheckCellMetadata,
        ComputeChecksums,
        ClearHiddenTests,
        ComputeChecksums,
        CheckCellMetadata,
    ):
        notebook, resources = step(config=config, parent=None).preprocess(notebook, resources)
    return nbformat.writes(notebook) + "\n"


def release(solutions: Path, out: Path) -> list[Path]:
    """Write the learners' notebooks of all masters into a folder; those that are there are replaced.

    Raises:
        DataError: no masters.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in masters(solutions):
        write_text(out / path.name, released(path))
        written.append(out / path.name)
    return written
