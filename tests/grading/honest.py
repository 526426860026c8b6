"""Two hundred right answers to the toy exercise: ways to compute it, times ways in which people write and hand in."""

import json
import textwrap

BODIES = {
    "sum of a generator": "return sum((i + 1) * x for i, x in enumerate(values))",
    "enumerate from 1": "return sum(i * x for i, x in enumerate(values, 1))",
    "a loop": "result = 0\nfor i, x in enumerate(values, 1):\n    result += i * x\nreturn result",
    "an index": "result = 0\nfor i in range(len(values)):\n    result = result + values[i] * (i + 1)\nreturn result",
    "while": "i = result = 0\nwhile i < len(values):\n    result += (i + 1) * values[i]\n    i += 1\nreturn result",
    "numpy": "import numpy as np\nreturn int(np.dot(values, np.arange(1, len(values) + 1)))",
    "a numpy integer": "import numpy as np\nreturn np.dot(values, np.arange(1, len(values) + 1))",
    "a list": "parts = [x * i for i, x in enumerate(values, 1)]\nreturn sum(parts)",
    "map": "return sum(map(lambda i, x: i * x, range(1, len(values) + 1), values))",
    "zip": "return sum(i * x for i, x in zip(range(1, 99), values))",
    "count": "from itertools import count\nreturn sum(i * x for i, x in zip(count(1), values))",
    "suffix sums": "return sum(sum(values[i:]) for i in range(len(values)))",
    "recursion": "return sum(values) + total(values[1:]) if values else 0",
    "reduce": "from functools import reduce\nreturn reduce(lambda s, e: s + e[0] * e[1], enumerate(values, 1), 0)",
    "sumprod by hand": "from operator import mul\nreturn sum(map(mul, values, range(1, len(values) + 1)))",
    "accumulate": "from itertools import accumulate\nreturn sum(accumulate(reversed(values)))",
    "an inner function": "def weight(i):\n    return i + 1\nreturn sum(weight(i) * x for i, x in enumerate(values))",
    "fractions": "from fractions import Fraction\nreturn int(sum(Fraction(i) * x for i, x in enumerate(values, 1)))",
    "a dict": "by_place = dict(enumerate(values, 1))\nreturn sum(i * x for i, x in by_place.items())",
    "a copy that it empties": "rest, result = list(values), 0\nwhile rest:\n    result += sum(rest)\n    rest.pop(0)\n"
    "return result",
}


def function(body: str, name: str = "total", parameter: str = "values", note: str = "") -> str:
    return f"def {name}({parameter}){note}:\n{textwrap.indent(body, '    ')}\n"


def plain(body):
    return function(body)


def with_prints(body):
    return "print('here I am')\n" + function("print('values', values, flush=True)\n" + body) + "print(total([1, 2]))\n"


def with_progress_and_warnings(body):
    return (
        "import logging, sys, warnings\nfrom tqdm import tqdm\nlogging.basicConfig(level=logging.DEBUG)\n"
        + function(
            "warnings.warn('careful')\nlogging.info('at work')\nfor _ in tqdm(range(3), file=sys.stderr): pass\n" + body
        )
    )


def with_types_and_docstring(body):
    return "from __future__ import annotations\nfrom collections.abc import Sequence\n\n" + function(
        '"""The weighted sum — ∑ (i+1)·xᵢ."""\n' + body, note=" -> int"
    ).replace("(values)", "(values: Sequence[int])", 1)


def decorated(body):
    return (
        "import functools, time\ndef timed(f):\n    @functools.wraps(f)\n    def inner(*args, **kwargs):\n"
        "        begin = time.perf_counter()\n        result = f(*args, **kwargs)\n"
        "        print(time.perf_counter() - begin)\n        return result\n    return inner\n\n@timed\n"
        + function(body)
    )


def with_tests_of_their_own(body):
    return (
        function(body) + "assert total([]) == 0 or True\nassert total([3, 1, 4]) == 17\n"
        "if __name__ == '__main__':\n    input('press enter')\n"
    )


def with_a_thread_and_files(body):
    return "import os, tempfile, threading\nnotes = tempfile.NamedTemporaryFile('w')\n" + function(
        "worker = threading.Thread(target=print)\nworker.start()\nworker.join()\n"
        "notes.write('x')\nopen('mine.txt', 'w').write(os.getcwd())\n" + body
    )


def tidied(body):
    """With tabs, semicolons and a comment in the learner's own language."""
    return "# Lösung: Gewichte 1, 2, 3, …\nx = 1; y = 2\n" + function(body).replace("    ", "\t")


STYLES = (
    plain,
    with_prints,
    with_progress_and_warnings,
    with_types_and_docstring,
    decorated,
    with_tests_of_their_own,
    with_a_thread_and_files,
    tidied,
)


def as_notebook(source: str, before: str = "", after: str = "") -> bytes:
    def code(text, **marks):
        return {
            "cell_type": "code",
            "source": text.splitlines(keepends=True),
            "outputs": [],
            "execution_count": 1,
            "metadata": {"nbgrader": marks} if marks else {},
        }

    cells = [
        {"cell_type": "markdown", "source": "# Mine", "metadata": {}},
        code(before),
        code(source, grade_id="toy-total", solution=True, locked=False, schema_version=3),
        code(after),
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}).encode()


def files() -> dict[str, bytes]:
    """Two hundred files by name: every body in every style, as scripts and notebooks in turn, and some more besides."""
    texts = {}
    for i, (what, body) in enumerate(BODIES.items()):
        for j, style in enumerate(STYLES):
            source = style(body)
            name = f"{what} {style.__name__}".replace(" ", "_")
            if (i + j) % 2:
                texts[f"{name}.py"] = source.encode()
            else:
                texts[f"{name}.ipynb"] = as_notebook(source, "raise RuntimeError('a cell of mine')", "while True: pass")
    for what, body in BODIES.items():
        name = what.replace(" ", "_")
        texts[f"{name}_with_a_mark.py"] = b"\xef\xbb\xbf" + function(body).encode()
        texts[f"{name}_in_windows.py"] = function(body).replace("\n", "\r\n").encode()
    return texts
