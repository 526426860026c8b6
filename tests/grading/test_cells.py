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
    "f??\n" + DEF,
    "%timeit f(1)\n" + DEF,
    "a, b = !ls\nz = 1",
    "x = %pwd\nz = 1",
    "if True:\n    !ls \\\n    -l\n    z = 1\n",
    '!echo "it\'s ("\n' + DEF,
    "np.arr*?\n" + DEF,
    "lambda x: \\\n x?\nz = 1",
    'text = """what?\n!ls\n%time\n"""\nz = 1',
    "x = (1\n% 2)\nz = 1",
    "s = 'a?'\n'is it?'\nz = 1",
    "a = 7\na %= 3",
    "x = f'{1!r}'",
    "assert 'x = %d' % 3 == 'x = 3'",
    ">>> def f(x):\n...     return x\n",
    "In [1]: x = 1\n   ...: y = 2",
    "    def f(x):\n        return x\n",
    "await f(1)\n" + DEF,
    DEF + "\f",
    "x = '中文 🙂'\n!ls 中文\nz = 1",
    "é = 1\né?\n",
]
"""Cells that mean the same to IPython, except for what it runs and we leave out."""


def statements(source, told_apart):
    """Statements of a text, less those that stand for IPython's."""
    bodies = [getattr(node, name, None) for node in ast.walk(ast.parse(source)) for name in ("body", "orelse")]
    found = [ast.unparse(one) for body in bodies if isinstance(body, list) for one in body]
    return [text for text in found if not told_apart(text)]


@pytest.mark.parametrize("cell", LIKE_IPYTHON)
def test_what_is_python_is_what_ipython_takes_for_it(cell):
    made = python_of(cell)
    assert made.text.count("\n") == cell.count("\n")
    theirs = TransformerManager().transform_cell(cell)
    wanted = statements(theirs, lambda text: "get_ipython" in text)
    assert statements(made.text, lambda text: "pass" in text or "= None" in text) == wanted
    assert len(made.skipped) == theirs.count("get_ipython()"), made.skipped


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
    for cell in cells:
        made = python_of(cell)
        assert (made.text, made.skipped) == (cell, ())


@pytest.mark.parametrize(
    "unit", ["'\\'", "'''\"\"\"", '"""' + 'a"b\\' * 6, "(", "x", "a=", "!ls\n", "%", " "], ids=repr
)
def test_no_text_keeps_the_grader_busy(unit):
    """What is not linear in the length takes hours here."""
    hostile = unit * (250_000 // len(unit))
    assert python_of(hostile).text.count("\n") == hostile.count("\n")


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


def run(tmp_path, capsys, decoration, *options):
    """Exit code and words of `course check` on the decorated answer."""
    notebook(tmp_path / "a.ipynb", decoration)
    code = cli.main(["check", str(tmp_path / "a.ipynb"), "--tasks", TASK.name, *options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("decoration", DECORATED)
def test_check_gives_the_points_of_jupyter(tmp_path, capsys, decoration):
    code, said, _ = run(tmp_path, capsys, DECORATED[decoration])
    assert code == 0 and f"{TASK.name}: {sum(TASK.points.values())} of" in said
    assert SKIPPED.get(decoration, "") in said and said.count("is not run here") == (decoration in SKIPPED)


def test_check_prints_the_points_as_json_that_my_results_hold(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COURSE_RESULTS", str(tmp_path / "my_results.json"))
    code, out, err = run(tmp_path, capsys, "print('mine')\n{}", "--json")
    results, kept = json.loads(out), json.loads((tmp_path / "my_results.json").read_text())
    assert code == 0 and kept.keys() == {TASK.name} and kept[TASK.name].keys() == {"points", "of", "when"}
    assert results == {TASK.name: kept[TASK.name] | {"when": results[TASK.name]["when"]}}
    assert "mine" in err and f"{TASK.name}: {sum(TASK.points.values())} of" in err
    assert cli.main(["check", "--json"]) == 2 and "no FILE is given" in capsys.readouterr().err


def test_check_tells_the_line_below_a_magic(tmp_path, capsys):
    code, said, _ = run(tmp_path, capsys, "%%time\n!ls\n{}\nprint(“a”)")
    (cell,) = [cell.source for cell in nbformat.read(tmp_path / "a.ipynb", as_version=4).cells if "“a”" in cell.source]
    assert code == 1 and f"line {len(cell.splitlines())} is not Python" in said


def test_a_cell_of_another_language_says_so(tmp_path, capsys):
    code, said, _ = run(tmp_path, capsys, "%%bash\n{}")
    assert code == 1 and "line 1, `%%bash`" in said and f"defines no function {TASK.function}" in said


def test_grade_gives_the_points_of_jupyter(tmp_path):
    for name, decoration in DECORATED.items():
        (tmp_path / "in" / name.split("'")[0]).mkdir(parents=True)
        notebook(tmp_path / "in" / name.split("'")[0] / f"{TASK.lesson}.ipynb", decoration)
    assert cli.main(["grade", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--tasks", TASK.function]) == 0
    grades = json.loads((tmp_path / "out" / "grades.json").read_text())
    assert [grade["points"] for grade in grades.values()] == [sum(TASK.points.values())] * len(DECORATED)
    told = [problem for grade in grades.values() for problem in grade["problems"]]
    assert len(told) == len(SKIPPED) and all(any(said in problem for problem in told) for said in SKIPPED.values())


def test_a_script_as_colab_saves_it(tmp_path):
    (tmp_path / "anna.py").write_text(f"!pip install einops\n%matplotlib inline\ndef {TASK.function}(*_): return 1\n")
    (anna,) = read_submissions([tmp_path / "anna.py"], {TASK.name: TASK})
    assert anna.answers[TASK.name].splitlines()[:2] == ["pass", "pass"] and len(anna.problems) == 2
