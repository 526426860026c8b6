"""What Jupyter runs of a learner's cell is graded, with the learner's line numbers; what cannot be run is told."""

import ast
import json

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from course_lib import cli
from course_lib.grading import own_code
from course_lib.grading.cells import python_of
from course_lib.grading.hidden import solutions_folder
from course_lib.grading.submissions import read_submissions
from course_lib.grading.tasks import TASKS

DEF = "def f(x):\n    return x\n"
LIKE_IPYTHON = [
    "!pip install einops\n" + DEF,
    DEF + "\nf?\n",
    "?f\n" + DEF,
    "f??\n" + DEF,
    "%timeit f(1)\n" + DEF,
    "%matplotlib inline\n%load_ext autoreload\n" + DEF,
    "files = !ls\n" + DEF,
    "a, b = !ls\nz = 1",
    "x = %pwd\nz = 1",
    "if True:\n    !ls \\\n    -l\n    z = 1\n",
    '!echo "it\'s ("\n' + DEF,
    "!!ls\n" + DEF,
    "np.arr*?\n" + DEF,
    "x = f?\nz = 1",
    "lambda x: \\\n x?\nz = 1",
    'text = """what?\n!ls\n%time\n"""\nz = 1',
    "x = (1 %\n2)\nz = 1",
    "s = 'a?'\n'is it?'\nz = 1",
    "z = 1 # why?",
    "a = 7\na %= 3",
    "x = f'{1!r}'",
    "# it's\n!ls\nz = 1",
    "assert 'x = %d' % 3 == 'x = 3'",
    ">>> def f(x):\n...     return x\n",
    "In [1]: x = 1\n   ...: y = 2",
    "    def f(x):\n        return x\n",
    "\n\n    def f(x):\n        return x\n",
    "await f(1)\n" + DEF,
    DEF + "\f",
    "x = '中文 🙂'\n!ls 中文\nz = 1",
    "é = 1\né?\n",
]
"""Cells that mean the same to IPython, except for what it runs and we leave out."""


def statements(source, told_apart):
    """Statements of a text, less those that stand for IPython's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            found += (
                [ast.unparse(one) for one in body if not told_apart(ast.unparse(one))] if isinstance(body, list) else []
            )
    return found


@pytest.mark.parametrize("cell", LIKE_IPYTHON)
def test_what_is_python_is_what_ipython_takes_for_it(cell):
    made = python_of(cell)
    assert made.text.count("\n") == cell.count("\n")
    theirs = TransformerManager().transform_cell(cell)
    wanted = statements(theirs, lambda text: "get_ipython" in text)
    assert statements(made.text, lambda text: "pass" in text or "= None" in text) == wanted
    left_out = theirs.count("get_ipython()")
    assert len(made.skipped) == left_out, made.skipped


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%time\n" + DEF, 2),
        ("\n%%capture out\n%%time\n\n" + DEF, 5),
        ("%%timeit -n 1\n    def f(x):\n        return x", 2),
        (",f a b\n/f 1\n" + DEF, 3),
        ("%%wandb\n%time y = 1\n" + DEF, 3),
        ("!ls \\\n -l\n\n" + DEF, 4),
        ("x = 1\u00a0+ 2\n" + DEF, 2),
        ("%time def_ = (1,\n  2)\n" + DEF, 3),
        ("%prun -s time y = 1\n" + DEF, 2),
        ("!ls\r\n" + DEF.replace("\n", "\r\n"), 2),
    ],
)
def test_lines_stay_where_they_were(cell, line):
    (function,) = [node for node in ast.parse(python_of(cell).text).body if isinstance(node, ast.FunctionDef)]
    assert function.lineno == line and cell.replace("\r\n", "\n").split("\n")[line - 1].strip() == "def f(x):"


def test_what_a_magic_runs_is_run_and_what_is_no_python_is_told():
    assert own_code.run(python_of("%time x = 3\ny = %time 4").text, "a")["x"] == 3
    assert python_of("%%time\nx = 1").skipped == () and python_of("y = %time 4").text == "y = 4"
    for name in ("bash", "html", "writefile a.py", "cython", "script python"):
        cell = python_of(f"%%{name}\necho 'it\n" + DEF)
        assert not cell.text.strip() and f"`%%{name.split()[0]}`" in cell.skipped[0]
    assert "it gives None" in python_of("x = !ls").skipped[0] and python_of("x = !ls").text == "x = None"
    many = python_of("!ls\n" * 50).skipped
    assert len(many) == 6 and many[-1] == "and 45 lines more"


def test_a_space_that_is_none_and_other_characters_keep_their_place():
    assert python_of("x\u00a0= '\u00a0' #\u00a0").text == "x = '\u00a0' #\u00a0"
    with pytest.raises(SyntaxError) as refused:
        ast.parse(python_of("!ls\nx = 1\n\nprint(“a”)").text)
    assert refused.value.lineno == 4


def test_python_is_left_as_it_is():
    cells = [
        cell.source
        for path in sorted(solutions_folder().glob("*.ipynb"))
        for cell in nbformat.read(path, as_version=4).cells
        if cell.cell_type == "code"
    ]
    assert len(cells) > 150
    assert all((made := python_of(cell)).text == cell and not made.skipped for cell in cells)


@pytest.mark.parametrize(
    "hostile",
    [
        "'\\'" * 80_000,
        '"""' + 'a"b\\' * 60_000,
        "'''\"\"\"" * 40_000,
        "(" * 200_000,
        "x" * 250_000,
        "a=" * 120_000,
        "!ls\n" * 60_000,
        "%" * 250_000,
        " " * 250_000,
    ],
)
def test_no_text_keeps_the_grader_busy(hostile):
    """What is not linear in the length takes hours here."""
    assert python_of(hostile).text.count("\n") == hostile.count("\n")


# --- the commands --------------------------------------------------------------------------------------------------

TASK = TASKS["zero.bytes"]
DECORATED = {
    "cell magic": "%%time\n{}",
    "shell": "!pip install einops\n{}",
    "question": "{}\nbytes_per_rank?\n",
    "line magic": "%timeit 1 + 1\n{}\n%time x = 1",
    "await": "import asyncio\nawait asyncio.sleep(0)\n{}",
    "space": "x = 1\u00a0+ 2\n{}",
    "IPython's names": "display(1)\nget_ipython().run_line_magic('pwd', '')\n{}",
}
SKIPPED = {"shell": "line 1, `!pip install einops`", "question": "bytes_per_rank?`", "line magic": "`%timeit 1 + 1`"}


def notebook(path, decoration):
    """The master's notebook of the task, its answer decorated."""
    found = nbformat.read(solutions_folder() / f"{TASK.lesson}.ipynb", as_version=4)
    (cell,) = [cell for cell in found.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == TASK.grade_id]
    cell.source = decoration.format(cell.source)
    nbformat.write(found, path)


@pytest.mark.parametrize("decoration", DECORATED)
def test_check_gives_the_points_of_jupyter(tmp_path, capsys, decoration):
    notebook(tmp_path / "a.ipynb", DECORATED[decoration])
    assert cli.main(["check", str(tmp_path / "a.ipynb"), "--tasks", TASK.function]) == 0
    said = capsys.readouterr().out
    assert f"{TASK.name}: {sum(TASK.points.values())} of" in said and SKIPPED.get(decoration, "") in said
    assert said.count("is not run here") == (decoration in SKIPPED)


def test_check_prints_the_points_as_json_that_my_results_hold(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_RESULTS", str(tmp_path / "my_results.json"))
    notebook(tmp_path / "a.ipynb", "print('mine')\n{}")
    assert cli.main(["check", str(tmp_path / "a.ipynb"), "--tasks", TASK.name, "--json"]) == 0
    printed = capsys.readouterr()
    kept = json.loads((tmp_path / "my_results.json").read_text())
    whole = sum(TASK.points.values())
    assert list(kept) == [TASK.name] and kept[TASK.name].keys() == {"points", "of", "when"}
    results = json.loads(printed.out)
    assert results == {TASK.name: kept[TASK.name] | {"when": results[TASK.name]["when"]}}
    assert "mine" in printed.err and f"{TASK.name}: {whole} of" in printed.err
    assert cli.main(["check", "--json"]) == 2 and "no FILE is given" in capsys.readouterr().err


def test_check_tells_the_line_below_a_magic(tmp_path, capsys):
    notebook(tmp_path / "a.ipynb", "%%time\n!ls\n{}\nprint(“a”)")
    assert cli.main(["check", str(tmp_path / "a.ipynb"), "--tasks", TASK.name]) == 1
    (cell,) = [cell.source for cell in nbformat.read(tmp_path / "a.ipynb", as_version=4).cells if "“a”" in cell.source]
    assert f"line {len(cell.splitlines())} is not Python" in capsys.readouterr().out


def test_a_cell_of_another_language_says_so(tmp_path, capsys):
    notebook(tmp_path / "a.ipynb", "%%bash\n{}")
    assert cli.main(["check", str(tmp_path / "a.ipynb"), "--tasks", TASK.name]) == 1
    said = capsys.readouterr().out
    assert "line 1, `%%bash`" in said and f"defines no function {TASK.function}" in said


def test_grade_gives_the_points_of_jupyter(tmp_path, capsys):
    for number, decoration in enumerate(DECORATED.values()):
        (tmp_path / "in" / f"learner{number}").mkdir(parents=True)
        notebook(tmp_path / "in" / f"learner{number}" / f"{TASK.lesson}.ipynb", decoration)
    assert cli.main(["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--tasks", TASK.function]) == 0
    grades = json.loads((tmp_path / "out" / "grades.json").read_text())
    assert [grades[f"learner{number}"]["points"] for number in range(len(DECORATED))] == (
        [sum(TASK.points.values())] * len(DECORATED)
    )
    told = {name: grades[f"learner{number}"]["problems"] for number, name in enumerate(DECORATED)}
    assert {name for name, problems in told.items() if problems} == set(SKIPPED)
    assert all(SKIPPED[name] in told[name][0] and len(told[name]) == 1 for name in SKIPPED)


def test_a_script_as_colab_saves_it(tmp_path):
    (tmp_path / "anna.py").write_text(f"!pip install einops\n%matplotlib inline\ndef {TASK.function}(*_): return 1\n")
    (anna,) = read_submissions([tmp_path / "anna.py"], {TASK.name: TASK})
    assert anna.answers[TASK.name].splitlines()[:2] == ["pass", "pass"] and len(anna.problems) == 2
