"""The cell that a lesson begins with on Colab, run in an environment that has pip and IPython alone."""

import os
import subprocess
import venv

import nbformat
import pytest

from book import open_elsewhere
from book.build import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
LESSON = "02_data_parallel"


def test_its_first_cell_brings_all_that_the_lesson_imports(tmp_path):
    """A clone of this repository stands for GitHub's; packages come from the index that pip is configured to use."""
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "ipython"], check=True, timeout=600)
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode, "it is not bare"
    stored = nbformat.reads(open_elsewhere.notebook(ROOT / "notebooks" / f"{LESSON}.ipynb", "a/b"), 4)
    code = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    imports = next(at for at, source in enumerate(code) if source.count("import ") > 5)
    ran = [*code[: imports + 1], "import os, course_lib; print('at', os.path.realpath('.'), course_lib.__file__)"]
    (tmp_path / "cells.ipy").write_text("\n\n".join(ran))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))} | {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": "https://github.com/a/b",
        "DS_BUILD_OPS": "0",
    }
    done = subprocess.run(
        [python, "-m", "IPython", "cells.ipy"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=2400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    course = os.path.realpath(tmp_path / "course")
    assert f"at {course}/notebooks {course}/course_lib/__init__.py" in done.stdout, done.stdout[-2000:]
