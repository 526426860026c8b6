"""What a page names in code exists: members of the modules that it imports, and all that exercises let one type."""

import ast
import builtins
import importlib
import re
import sys
import textwrap

import nbformat
import pytest

from tests.notebooks.conftest import NOTEBOOKS
from tests.notebooks.test_all_lessons import LESSONS

FENCED = re.compile(r"```python\n(.*?)```", re.S)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ANYWHERE = set(vars(builtins)) | sys.stdlib_module_names
FILES = re.compile(r"[\w/.-]+\.(json|md|py|sh|yaml|tar\.gz)$")


def snippets(prose):
    """The syntax trees of what is set as Python in markdown, fenced or within a line."""
    whole = [textwrap.dedent(found) for found in FENCED.findall(prose)]
    inline = [" ".join(found.split()) for found in INLINE.findall(re.sub(r"```.*?```", "", prose, flags=re.S))]
    for text in whole + [found for found in inline if not FILES.match(found)]:
        try:
            yield ast.parse(text)
        except SyntaxError:
            continue


def stored(trees):
    """Names that code binds, its parameters with them; imports are told apart."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    return (
        names
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
        | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    )


def imported(trees):
    """What the import statements of code bind."""
    found = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), found)
    return found


def member(thing, name):
    """An attribute; of a package also a module that nobody has imported yet."""
    if not hasattr(thing, name) and hasattr(thing, "__path__"):
        importlib.import_module(f"{thing.__name__}.{name}")
    return getattr(thing, name)


def chain(node):
    """Root and attributes of a dotted name, as ("lab", ["SCENARIOS"]); no root where it is not of a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else None), names


def missing(cells):
    """What a page's prose names and its code, or the course's modules, do not have."""
    code = [ast.parse(cell.source) for cell in cells if cell.cell_type == "code" and not cell.source.startswith("%")]
    modules, variables = imported(code), stored(code)
    prose = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for section in (prose, prose.partition("\n## Exercises")[2].partition("\n## Read next")[0]):
        trees = list(snippets(section))
        given = modules | imported(trees)
        for tree in trees:
            typed = section is not prose and any(isinstance(node, ast.Call) for node in ast.walk(tree))
            own = stored([tree]) | variables | ANYWHERE
            for node in ast.walk(tree):
                root, names = chain(node) if isinstance(node, ast.Attribute) else (None, [])
                if root in given and root not in own:
                    try:
                        thing = given[root]
                        for name in names:
                            thing = member(thing, name)
                    except (AttributeError, ModuleNotFoundError):
                        yield f"{root}.{'.'.join(names)}"
                elif root and typed and root not in own:
                    yield root


@pytest.mark.parametrize("name", LESSONS)
def test_code_in_prose_names_what_exists(name):
    assert sorted(set(missing(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells))) == []


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("## Exercises\n\nCall `fault_lab.run(1)`.", ["fault_lab"]),
        ("Call `fault_lab.run(1)`.", []),
        ("It is `lab.no_such_thing`.", ["lab.no_such_thing"]),
        ("It is `lab.CULPRIT`, `sums[0].item()`.", []),
        ("## Exercises\n\n```python\nfrom math import tau\nbreaks(tau.no, x)\nsums.no\n```", ["tau.no"]),
        ("## Exercises\n\nWrite `step(rank)` into `summary.json`, as `Trainer.train_step` does.", []),
    ],
)
def test_a_name_that_is_not_there_is_found(prose, found):
    code = nbformat.v4.new_code_cell("from course_lib.lessons.faults import lab\nsums = [lab.CULPRIT]")
    assert list(dict.fromkeys(missing([code, nbformat.v4.new_markdown_cell(f"Text.\n\n\n{prose}")]))) == found
