"""The documentation of the Python that runs: a corpus for language modelling that every machine has."""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import datasets

from course_lib.data.cache import digest, progress_bars
from course_lib.data.plain_files import contents

LEFT_OUT = {
    "__pycache__",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "turtledemo",
}


def load_pydocs() -> datasets.Dataset:
    """The documents as a data set with column `text`; extracted once for each Python, which takes some seconds."""
    with progress_bars():
        return datasets.Dataset.from_generator(
            lambda: ({"text": text} for text in documents()),
            features=datasets.Features({"text": datasets.Value("string")}),
            fingerprint=digest("pydocs", sys.version, [contents(path) for path in sources()]),
        )


def documents() -> Iterator[str]:
    """Each topic of ``help()``, then the docstrings of each module of the standard library in the order of its source.

    The order is that of the topics' and the modules' names. What occurred before is left out.
    """
    from pydoc_data import topics

    yield from dict.fromkeys(text.strip() for _, text in sorted(topics.topics.items()))
    seen = set[str]()
    for path in sources():
        fresh = dict.fromkeys(text for text in docstrings(ast.parse(path.read_bytes())) if text not in seen)
        seen.update(fresh)
        if fresh:
            yield "\n\n".join(fresh)


def sources() -> list[Path]:
    """The files of the standard library, by name."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(library.rglob("*.py")) if LEFT_OUT.isdisjoint(path.relative_to(library).parts)]


def docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of a module, its classes and its functions, in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # where no definition can stand
            yield from docstrings(child)
