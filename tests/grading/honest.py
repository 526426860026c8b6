"""Two hundred right answers to the toy exercise: the bodies of honest.yaml, times its styles."""

import textwrap
from pathlib import Path

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def written(body: str, before="", define="def total(values):", first="", after="", indent="    ") -> str:
    inner = "\n".join(filter(None, (first.strip("\n"), body.strip("\n"))))
    inner = textwrap.indent(inner.replace("    ", indent), indent)
    return "\n".join(filter(None, (before.strip("\n"), define, inner, after.strip("\n")))) + "\n"


def as_notebook(source: str) -> str:
    """Between cells of the learner's own, which must not run."""
    marks = {"nbgrader": {"grade_id": "toy-total", "solution": True, "locked": False, "schema_version": 3}}
    cells = [new_markdown_cell("# Mine"), new_code_cell("raise RuntimeError('a cell of mine')")]
    cells += [new_code_cell(source, metadata=marks), new_code_cell("while True: pass")]
    return nbformat.writes(new_notebook(cells=cells))


def files() -> dict[str, bytes]:
    """Two hundred files by name: every body in every style, as scripts and notebooks in turn, and some more besides."""
    texts = {}
    for i, (what, body) in enumerate(DATA["bodies"].items()):
        name = what.replace(" ", "_")
        for j, (style, options) in enumerate(DATA["styles"].items()):
            source, script = written(body, **options), (i + j) % 2
            texts[f"{name}_{style}.{'py' if script else 'ipynb'}"] = source if script else as_notebook(source)
        texts[f"{name}_with_a_mark.py"] = "\ufeff" + written(body)
        texts[f"{name}_in_windows.py"] = written(body).replace("\n", "\r\n")
    return {name: text.encode() for name, text in texts.items()}
