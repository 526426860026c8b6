"""Lessons to open elsewhere: each begins with the one cell that a machine without the course needs."""

import os
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "")
"""OWNER/NAME, where the book is built by the repository's workflow; a book built elsewhere has no such buttons."""
BRANCH = "gh-pages"
"""The branch that the workflow publishes the book on, and these notebooks with it."""
EXTRAS = "train,notebooks,tracking,sagemaker,grading,kernels"
CELL = """\
# Fetches the course and installs what it needs, which takes some minutes. Leave it out where you have the course.
import os
import sys

if not os.path.isdir("../course_lib"):
    if not os.path.isdir("course"):
        !git clone --quiet --depth 1 https://github.com/{repository} course
        %pip install --quiet -c course/constraints.txt -e "course[{extras}]"
    %cd course/notebooks
sys.path.insert(0, os.path.abspath(".."))  # this Python began before the course was installed"""


def notebook(path: Path, repository: str) -> str:
    """A lesson without outputs, behind the cell that fetches the course.

    Args:
        path: of the stored notebook.
        repository: OWNER/NAME on GitHub.
    """
    lesson = nbformat.read(path, as_version=4)
    for cell in lesson.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    first = nbformat.v4.new_code_cell(CELL.format(repository=repository, extras=EXTRAS), id="fetch-the-course")
    lesson.cells.insert(0, first)
    return nbformat.writes(lesson) + "\n"


def buttons(lesson: str, repository: str) -> str:
    """Markdown that says where a lesson can be run.

    Args:
        lesson: name of the notebook, without its suffix.
        repository: OWNER/NAME on GitHub; empty: on the reader's machine alone.
    """
    here = "**Run it**: [JupyterLab on your machine](../docs/setup.md)"
    return f"{here} · [Colab]({places(lesson, repository)['Colab']})" if repository else here


def places(lesson: str, repository: str) -> dict[str, str]:
    """Addresses at which a lesson, or the whole course, opens in a browser, by the place's name."""
    return {
        "Colab": f"https://colab.research.google.com/github/{repository}/blob/{BRANCH}/open/{lesson}.ipynb",
        "Codespaces": f"https://codespaces.new/{repository}",
    }
