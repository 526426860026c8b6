"""Every option in the textbook has a user: one that only a test passes stands in a reader's way.

An option is a parameter with a default of a public function, method or class in course_lib/parallel. It has a user if
a call outside tests/ of something of that name passes it, by name or by position. Calls are read from the source, not
run; those of a subclass without a constructor of its own are its base's, and ``functools.partial(f, …)`` calls ``f``.
"""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
USERS = ("course_lib", "exercises", "solutions", "benchmarks", "testing", "tools", "notebooks")
LIKE_TORCHS = {("all_to_all", "group"), ("barrier", "group")}
"""Exceptions, of collectives.py, which has the parameters of torch.distributed: one can stand for the other."""


def options_of(tree):
    """(what a call names, parameter, its position or None) of a module."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from options_of_function(node, node.name, 0)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    yield from options_of_function(part, node.name, 1)
                elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                    bound = "staticmethod" not in map(ast.unparse, part.decorator_list)
                    yield from options_of_function(part, part.name, int(bound))
            makers = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
            if any(maker.startswith(("dataclass", "NamedTuple")) for maker in makers):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                fields = [part for part in fields if not (part.value and "init=False" in ast.unparse(part.value))]
                for position, field in enumerate(fields):
                    if field.value is not None:
                        yield node.name, field.target.id, position


def options_of_function(node, called, bound):
    positional = [*node.args.posonlyargs, *node.args.args]
    for position in range(len(positional) - len(node.args.defaults), len(positional)):
        yield called, positional[position].arg, position - bound
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if default is not None:
            yield called, argument.arg, None


def calls_of(tree):
    """(what is called, number of arguments by position, names of the others)."""
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    renamed = {alias.asname: alias.name for alias in imports if alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, arguments = node.func, node.args
            if ast.unparse(function) in ("partial", "functools.partial"):
                function, *arguments = arguments
            name = getattr(function, "id", getattr(function, "attr", ""))
            yield renamed.get(name, name), *passed(arguments, node.keywords)
        elif isinstance(node, ast.ClassDef):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("cls", "super().__init__"):
                    for name in (node.name, *(ast.unparse(base).split(".")[-1] for base in node.bases)):
                        yield name, *passed(call.args, call.keywords)


def passed(arguments, keywords):
    starred = any(isinstance(argument, ast.Starred) for argument in arguments)
    return 99 if starred else len(arguments), {keyword.arg for keyword in keywords}


def unused(texts, users):
    """Options of the texts that no call in the users' texts passes."""
    trees = [ast.parse(text) for text in texts]
    constructed_as = {}
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef) and node.bases):
        if "__init__" not in [getattr(part, "name", "") for part in node.body]:
            constructed_as[node.name] = ast.unparse(node.bases[0])
    calls = {}
    for text in users:
        for name, positions, names in calls_of(ast.parse(text)):
            calls.setdefault(name, []).append((positions, names))
            if name in constructed_as:
                calls.setdefault(constructed_as[name], []).append((positions, names))
    return {
        (called, name)
        for tree in trees
        for called, name, position in options_of(tree)
        if not any(
            name in names or None in names or (position is not None and positions > position)
            for positions, names in calls.get(called, ())
        )
    }


def test_every_option_has_a_user():
    users = []
    for folder in USERS:
        users += [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
        for path in (ROOT / folder).glob("*.ipynb"):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            users.append("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    textbook = [path.read_text(encoding="utf-8") for path in (ROOT / "course_lib" / "parallel").rglob("*.py")]
    assert unused(textbook, users) == LIKE_TORCHS


def test_an_option_that_nobody_passes_is_noticed():
    library = (
        "def f(a, b=1, *, c=2): ...\n"
        "class C:\n    def __init__(self, d=3): ...\n    def method(self, e=4): ...\n"
        "@dataclass\nclass D:\n    g: int = 5\n    h: int = field(default=6, init=False)\n"
    )
    everything = {("f", "b"), ("f", "c"), ("C", "d"), ("method", "e"), ("D", "g")}
    for user, used in {
        "": set(),
        "from lib import f as g\ng(1, 2)": {("f", "b")},
        "partial(f, c=1)": {("f", "c")},
        "x.method(*y)": {("method", "e")},
        "class S(C):\n    def __init__(self):\n        super().__init__(d=1)": {("C", "d")},
        "D(**options)": {("D", "g")},
    }.items():
        assert unused([library], [user]) == everything - used
