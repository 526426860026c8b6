"""What a learner reads of a wrong answer: the case, the ratio, their line, who waits for whom, their table drawn."""

import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
import yaml

from course_lib.grading import check as checking
from course_lib.grading.own_code import registered, told
from course_lib.grading.rules import near, ratio
from course_lib.grading.task import Case, described
from course_lib.grading.tasks import TASKS

WRONG = yaml.safe_load(Path(__file__).with_name("feedback.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case["task"])
def test_what_check_says(case, capsys, monkeypatch):
    monkeypatch.setattr(checking, "SECONDS_PER_CASE", 2.0)  # for which its ranks wait
    name, source, scope = case["task"], case["answer"], {"__name__": "answer"}
    for old, new in case.get("change", {}).items():
        source = source.replace(old, new)
    exec(compile(source, registered(f"answer {name}", source), "exec"), scope)
    checking.check(name, scope[TASKS[name].function])
    out = capsys.readouterr().out
    assert [part for part in case["says"] if part not in out] == [], out
    assert not any(native in out for native in ("unbound_buffer", "/pytorch/", "gloo", "terminate called", "frame #"))


def test_ratios():
    right = np.array([1.0, -2.0, 0.0, 4.0])
    for factor, ranks, said in (
        (2, 2, "a sum over them, not a mean?"),
        (3, 3, "a sum over them"),
        (2, 1, "is twice"),
        (0.5, 2, "divided by their number once too often?"),
        (-1, 2, "wrong sign"),
        (1.5, 2, "1.5 times the expected one"),
        (0, 2, "all of it is zero"),
        (np.nan, 2, "not finite"),
    ):
        assert said in ratio(factor * right, right, ranks)
    assert ratio(right + 1, right, 2) == "" == ratio(right, np.zeros(4), 2)
    one = np.array([2.0])
    assert ratio(3.895 * one, one, 2) == "" == ratio(-0.083 * one, one, 3) and "a sum over" in ratio(2 * one, one, 2)
    miss = near([{"loss": 2 * right}, {"loss": right}], "loss", [right, right])
    assert miss.rank == 0 and "a sum over them" in miss.note


def test_a_case_in_words():
    case = Case(
        3,
        {
            "weights": [np.zeros((2, 3)), np.zeros(4)],
            "rows": [[np.zeros(2)] * 2] * 3,
            "lr": 0.5,
            "tied": [1, 2],
            "frozen": None,
            "at": {"a": np.zeros((1, 1))},
        },
    )
    assert described(case) == "3 ranks, weights [2x3, 4], rows 3 of 2 of 2, lr 0.5, tied [1, 2], at {a 1x1}"
    assert described(case, on_ranks=False).startswith("weights")
    assert len(described(Case(1, {"a": [np.zeros(size) for size in range(99)]}))) == 220
    whole = {"layers": [{"parameters": 10**9 + i} for i in range(20)], "gpus": 4}
    told_of = dict(line.split(" = ") for line in described(Case(1, whole), False).replace("\n ", " ").splitlines())
    assert {name: eval(text) for name, text in told_of.items()} == whole, "long ones without arrays are Python"


def test_an_exception_tells_the_last_line_of_the_learners_own_code():
    source = "import json\ndef inner():\n    return json.loads('{')\ndef outer():\n    return inner()\n"
    scope = {}
    exec(compile(source, registered("answer x", source), "exec"), scope)
    try:
        scope["outer"]()
    except ValueError as error:
        assert told(error, "answer x").endswith("(in line 3 of yours, `return json.loads('{')`)")
        assert "line" not in told(error, None).partition("char")[2]
    error = RuntimeError("[/__w/pytorch/pytorch/third_party/gloo/x.cc:78] Timed out waiting 10000ms")
    assert told(error, None) == "RuntimeError: Timed out waiting 10000ms"


@pytest.mark.parametrize("kind", ["ipynb", "py"])
def test_a_syntax_error_is_told_before_torch_is_imported(tmp_path, kind):
    source = "import torch\n\n\ndef ring_all_reduce(tensor):\n    return tensor +\n"
    marks = {"nbgrader": {"grade_id": "ddp-ring", "solution": True}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source, metadata=marks)])
    path = tmp_path / f"mine.{kind}"
    path.write_text(source if kind == "py" else nbformat.writes(notebook))
    program = (
        "import sys\nfrom course_lib.cli import main\n"
        f"code = main(['check', {str(path)!r}])\nprint(code, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    said = ended.stdout + ended.stderr
    assert "line 5 is not Python (invalid syntax), `return tensor +`" in said
    assert ended.stdout.splitlines()[-1] in ("1 False", "2 False")
    assert ("ddp.ring: line 5" in said) == (kind == "ipynb")
