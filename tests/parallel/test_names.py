"""Names in the textbook: a class has one meaning in the whole library, and a value has the name of what it is."""

import ast
from collections import defaultdict
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "course_lib"
TEXTBOOK = LIBRARY / "parallel"
NAMELESS = {"each", "found"}
"""What says nothing of the value: a loop variable for anything, a result of any search."""


def nodes(folder):
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def test_a_class_name_of_the_textbook_has_one_meaning():
    """But for the shortest forms, which bear the names of the full ones on purpose."""
    places = defaultdict(set)
    for path, node in nodes(LIBRARY):
        if isinstance(node, ast.ClassDef) and TEXTBOOK / "minimal" not in path.parents:
            places[node.name].add(path.relative_to(LIBRARY).as_posix())
    textbook = {name: where for name, where in places.items() if any(path.startswith("parallel/") for path in where)}
    assert len(textbook) > 45
    assert {name: where for name, where in textbook.items() if len(where) > 1} == {}


def test_the_shortest_forms_share_names_with_the_full_ones_alone():
    names = defaultdict(set)
    for path, node in nodes(TEXTBOOK):
        if isinstance(node, ast.ClassDef):
            names[TEXTBOOK / "minimal" in path.parents].add(node.name)
    assert names[True] & names[False] == {
        "Bucket", "ColumnParallelLinear", "FullyShardedDataParallel", "RowParallelLinear", "Zero1"}


def test_values_have_the_names_of_what_they_are():
    variables = [(path.relative_to(LIBRARY).as_posix(), node.lineno, node.id) for path, node in nodes(TEXTBOOK)
                 if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    arguments = [(path.relative_to(LIBRARY).as_posix(), node.lineno, node.arg) for path, node in nodes(TEXTBOOK)
                 if isinstance(node, ast.arg)]
    assert len(variables) > 600 and len(arguments) > 600
    assert [place for place in variables + arguments if place[2] in NAMELESS] == []
