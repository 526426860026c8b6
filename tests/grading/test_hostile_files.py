"""The tenth family: hostile files. Each harms a reader without defences; ours says what is wrong and reads on."""

import json
import os
import stat
import tracemalloc

import nbformat
import pytest

from course_lib.errors import CourseError
from course_lib.grading import submissions
from course_lib.grading.submissions import read_submissions
from tests.grading.conftest import RIGHT
from tests.grading.toys import toy_tasks

TASKS = {"toy.total": toy_tasks.TOTAL}


def cell(source, grade_id="toy-total", **marks):
    return nbformat.v4.new_code_cell(source, metadata={"nbgrader": {"grade_id": grade_id, "solution": True} | marks})


def notebook(*cells):
    return json.dumps({"cells": list(cells), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


# What an undefended reader does, and by what one sees the harm.


def breaks(path):
    """A reader that takes every cell of whatever is there."""
    try:
        "".join("".join(each["source"]) for each in json.loads(path.read_text())["cells"])
    except (Exception, RecursionError):
        return True
    return False


def eats_memory(path):
    tracemalloc.start()
    breaks(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak > 150 << 20


def waits(path):
    """A reader that opens a pipe waits for its writer for ever: non-blocking, one sees that it is one."""
    return stat.S_ISFIFO(os.stat(path).st_mode)


def leaks(path):
    return "root:" in path.read_text()


def large_notebook(path):
    with path.open("wb") as out:
        out.truncate(200 << 20)


FILES = {
    "not a notebook": ("x.ipynb", b"hello", breaks, "not a notebook"),
    "half a notebook": ("x.ipynb", notebook(cell(RIGHT))[:-9], breaks, "not a notebook"),
    "a list": ("x.ipynb", b"[]", breaks, "not a notebook"),
    "cells that are numbers": ("x.ipynb", b'{"cells": [1, 2]}', breaks, "not a notebook"),
    "empty": ("x.ipynb", b"", breaks, "not a notebook"),
    "wrong encoding": ("x.ipynb", '{"cells": "é"}'.encode("utf-16"), breaks, "UTF-8"),
    "nested to the sky": ("x.ipynb", b"[" * 200_000, breaks, "nested"),
    "an endless number": ("x.ipynb", b'{"cells": ' + b"9" * 10_000 + b"}", breaks, "not a notebook"),
    "200 MB": ("x.ipynb", large_notebook, eats_memory, "200 MiB"),
    "a pipe": ("x.ipynb", os.mkfifo, waits, "ordinary"),
    "a zip": ("x.zip", b"PK\x03\x04", breaks, "unpack it first"),
    "a link to a file of ours": ("x.py", lambda path: path.symlink_to("/etc/passwd"), leaks, "link"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_harms_the_naive_reader_and_nobody_here(name, tmp_path):
    filename, content, harms, said = FILES[name]
    hall = tmp_path / "hall"
    (hall / "mallory").mkdir(parents=True)
    path = hall / "mallory" / filename
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    (hall / "alice.py").write_text(RIGHT)
    assert harms(path)

    tracemalloc.start()
    alice, mallory = read_submissions([hall], TASKS)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20, "no more than an honest one takes"
    tracemalloc.stop()
    assert alice.answers == {"toy.total": RIGHT} and not alice.problems
    assert not mallory.answers
    assert len(mallory.problems) == 1 and said in mallory.problems[0]
    assert {left.name for left in hall.rglob("*")} == {"mallory", filename, "alice.py"}


def test_only_answer_cells_count(tmp_path):
    other = {"cell_type": "code", "source": "raise SystemExit", "metadata": {}}
    check = cell("check('toy.total', total)", "toy-total-check", solution=False, grade=True)
    path = tmp_path / "alice.ipynb"
    path.write_bytes(notebook(other, cell("import math"), cell(RIGHT.splitlines(True)), check, other))
    (alice,) = read_submissions([path], TASKS)
    assert alice.answers == {"toy.total": "import math\n\n" + RIGHT}


@pytest.mark.parametrize(
    "changed",
    [
        cell(RIGHT, "toy-other"),
        cell(RIGHT, solution=False),
        cell(RIGHT) | {"cell_type": "markdown"},
        cell(RIGHT) | {"metadata": {}},
    ],
    ids=["other name", "not a solution", "markdown", "no metadata"],
)
def test_changed_metadata_gives_no_answer(tmp_path, changed):
    path = tmp_path / "alice.ipynb"
    path.write_bytes(notebook(changed))
    (alice,) = read_submissions([path], TASKS)
    assert not alice.answers


def test_whose_is_what(tmp_path):
    files = {
        "nbgrader/submitted/anna/90_toys/90_toys.ipynb": notebook(cell(RIGHT)),
        "flat/berta.ipynb": notebook(cell(RIGHT)),
        "flat/carl.py": RIGHT.encode(),
        "folders/emil/90_toys.py": RIGHT.encode(),
        "folders/frieda/deep/x.ipynb": notebook(cell(RIGHT)),
        "gustav/90_toys.ipynb": notebook(cell(RIGHT)),
        "nbgrader/submitted/anna/90_toys/timestamp.txt": b"2026-11-21 10:00:00 UTC\n",
        "flat/evil = cmd.py": RIGHT.encode(),
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    answers = read_submissions([tmp_path / place for place in ("nbgrader", "flat", "folders", "gustav")], TASKS)
    names = [submission.learner for submission in answers if not submission.learner.startswith("evil")]
    assert names == ["anna", "berta", "carl", "emil", "frieda", "gustav"]
    assert all(submission.answers["toy.total"] == RIGHT and not submission.problems for submission in answers)
    assert answers[0].stamps == {"90_toys": "2026-11-21 10:00:00 UTC"}


@pytest.mark.parametrize("name", ["../../etc", "..", "=1+1", "a/b", "<script>", "a\0b", "", "a\nb", "." * 300])
def test_a_learner_is_a_safe_name(name):
    safe = submissions.learner_id(name)
    assert safe and safe not in (".", "..") and not set(safe) & set("/\\<>\0\n\"'&=")
    assert safe != submissions.learner_id(name + "x")


def test_a_name_that_no_terminal_takes(tmp_path):
    folder = os.fsencode(tmp_path / "hall") + b"/mallory\xff\x1b[31m"
    os.makedirs(folder)
    with open(folder + b"/x\xff.ipynb", "wb") as out:
        out.write(b"no")
    (mallory,) = read_submissions([tmp_path / "hall"], TASKS)
    (problem,) = mallory.problems
    assert problem.startswith("mallory??[31m/x?.ipynb: is not a notebook of format 4")
    assert mallory.learner.isprintable()


def test_two_answers_to_one_task_are_told(tmp_path):
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "a.py").write_text(RIGHT)
    (tmp_path / "anna" / "b.py").write_text("def total(values): return 0\n")
    (anna,) = read_submissions([tmp_path], TASKS)
    assert anna.answers == {"toy.total": RIGHT}
    assert anna.problems == ["anna/b.py: toy.total is in anna/a.py too, which counts"]


def test_nothing_to_grade_is_said(tmp_path):
    with pytest.raises(CourseError, match="nothing to grade"):
        read_submissions([tmp_path], TASKS)
    with pytest.raises(CourseError, match="no submission"):
        read_submissions([tmp_path / "absent"], TASKS)
