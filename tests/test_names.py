"""Names: a class of the textbook has one meaning in the whole library, and a value has the name of what it is."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[1] / "course_lib"
TEXTBOOK = LIBRARY / "parallel"
NAMELESS = {"each", "found"}
"""What says nothing of the value: a loop variable for anything, a result of any search."""


def nodes(folder):
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path, node


def test_a_class_name_of_the_textbook_has_one_meaning():
    places = defaultdict(set)
    for path, node in nodes(LIBRARY):
        if isinstance(node, ast.ClassDef):
            places[node.name].add(path.relative_to(LIBRARY).as_posix())
    textbook = {name: where for name, where in places.items() if any(path.startswith("parallel/") for path in where)}
    assert {name: where for name, where in textbook.items() if len(where) > 1} == {}


def names_of_values(folder):
    """(place, name) of what is assigned, looped over or taken as an argument; less the fields of a class."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        fields = {field.target for each in classes for field in each.body if isinstance(field, ast.AnnAssign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
                yield f"{path.relative_to(LIBRARY)}:{node.lineno}", node.id
            elif isinstance(node, ast.arg):
                yield f"{path.relative_to(LIBRARY)}:{node.lineno}", node.arg


def test_values_have_the_names_of_what_they_are():
    assert [place for place in names_of_values(LIBRARY) if place[1] in NAMELESS] == []


@pytest.mark.parametrize("room", ["parallel", "training"])
def test_what_a_rank_holds_of_a_tensor_is_a_shard(room):
    names = [name for _, name in names_of_values(LIBRARY / room)]
    assert (
        "shard" in names and [name for name in names if "piece" in name.split("_") or "pieces" in name.split("_")] == []
    )
