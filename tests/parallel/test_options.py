"""Every option in the textbook has a user: one that only a test passes stands in a reader's way.

An option is a parameter with a default of a public function, method or class in course_lib/parallel. It has a user if
a call outside tests/ passes it, by name or by position. Calls are read from the source, not run:

- of a function or class: ``f(…)`` where it is imported or defined, ``module.f(…)`` where its module is imported; of a
  class also ``super().__init__(…)`` in a subclass and ``cls(…)`` in itself, and calls of a subclass without a
  constructor of its own;
- of a method: ``anything.method(…)``;
- ``functools.partial(f, …)`` is a call of ``f``.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from course_lib.parallel import collectives
from tools.cells import KEY, PACKAGE

ROOT = Path(__file__).parents[2]
TEXTBOOK = ROOT / "course_lib" / "parallel"
USERS = ("course_lib", "exercises", "solutions", "benchmarks", "testing", "tools", "notebooks")

LIKE_TORCHS = ("all_reduce(op)", "all_to_all(group)", "broadcast(src)", "broadcast(group)", "barrier(group)")
"""Exceptions, of collectives.py, which has the parameters of torch.distributed: one can stand for the other."""


@dataclass(frozen=True)
class Option:
    """A parameter with a default.

    Attributes:
        module: its full name.
        owner: the class; empty for a function.
        called: what a call names: the function, the method, or the class.
        name: of the parameter.
        position: among the arguments of a call, from 0; None if it is passed by name alone.
    """

    module: str
    owner: str
    called: str
    name: str
    position: int | None

    def __str__(self) -> str:
        method = f"{self.owner}.{self.called}" if self.owner not in ("", self.called) else self.called
        return f"{self.module.removeprefix('course_lib.parallel.')}.{method}({self.name})"


@dataclass(frozen=True)
class Call:
    """What a call names, and what it passes.

    Attributes:
        target: ``module.name`` where that is known; ``.name`` for an attribute of whatever it is.
        positions: how many arguments by position; very many where one is starred.
        names: of the others; None among them for ``**``.
    """

    target: str
    positions: int
    names: frozenset[str | None]

    def passes(self, option: Option) -> bool:
        by_position = option.position is not None and self.positions > option.position
        return by_position or option.name in self.names or None in self.names


# --- options ---


def options_of_module(tree: ast.Module, module: str) -> Iterator[Option]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield from options_of_function(node, module, "", node.name, bound=False)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from options_of_class(node, module)


def options_of_class(node: ast.ClassDef, module: str) -> Iterator[Option]:
    """Of the constructor, of public methods, and of the fields that a dataclass or a NamedTuple is made from."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and (method.name == "__init__" or not method.name.startswith("_")):
            called = node.name if method.name == "__init__" else method.name
            bound = "staticmethod" not in map(ast.unparse, method.decorator_list)
            yield from options_of_function(method, module, node.name, called, bound)
    is_dataclass = any(ast.unparse(decorator).startswith("dataclass") for decorator in node.decorator_list)
    if is_dataclass or "NamedTuple" in map(ast.unparse, node.bases):
        fields = [
            field
            for field in node.body
            if isinstance(field, ast.AnnAssign) and not (field.value and "init=False" in ast.unparse(field.value))
        ]
        for position, field in enumerate(fields):
            if field.value is not None:
                yield Option(module, node.name, node.name, ast.unparse(field.target), position)


def options_of_function(node: ast.FunctionDef, module: str, owner: str, called: str, bound: bool) -> Iterator[Option]:
    positional = [*node.args.posonlyargs, *node.args.args]
    required = len(positional) - len(node.args.defaults)
    for position, argument in enumerate(positional):
        if position >= required:
            yield Option(module, owner, called, argument.arg, position - bound)
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        if default is not None:
            yield Option(module, owner, called, argument.arg, None)


# --- calls ---


def calls_of_module(tree: ast.Module, module: str) -> Iterator[Call]:
    """All calls of a file; names mean what its imports and its own definitions say."""
    meaning = {
        node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            meaning |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function, arguments = node.func, node.args
            if ast.unparse(function) in ("partial", "functools.partial"):
                function, *arguments = arguments
            for target in targets(function, meaning):
                yield called(target, arguments, node.keywords)
        elif isinstance(node, ast.ClassDef):
            yield from constructions(node, module, meaning)


def called(target: str, arguments: list[ast.expr], keywords: list[ast.keyword]) -> Call:
    starred = any(isinstance(argument, ast.Starred) for argument in arguments)
    return Call(target, 99 if starred else len(arguments), frozenset(keyword.arg for keyword in keywords))


def targets(function: ast.expr, meaning: dict[str, str]) -> Iterator[str]:
    """What an expression that is called may be."""
    if isinstance(function, ast.Name):
        yield meaning.get(function.id, function.id)
    elif isinstance(function, ast.Attribute):
        yield f".{function.attr}"
        if isinstance(function.value, ast.Name) and function.value.id in meaning:
            yield f"{meaning[function.value.id]}.{function.attr}"


def constructions(node: ast.ClassDef, module: str, meaning: dict[str, str]) -> Iterator[Call]:
    """Of a class by its own class methods, and of its bases by ``super().__init__``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "cls":
            yield called(f"{module}.{node.name}", call.args, call.keywords)
        elif isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            for base in node.bases:
                for target in targets(base, meaning):
                    yield called(target, call.args, call.keywords)


def without_constructor(tree: ast.Module, module: str) -> dict[str, str]:
    """By a class that has no constructor of its own, that whose it is."""
    imported = {
        alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {
        f"{module}.{node.name}": imported[base.id]
        for node in tree.body
        if isinstance(node, ast.ClassDef) and "__init__" not in {getattr(part, "name", "") for part in node.body}
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in imported
    }


# --- both ---


def unused(options: list[Option], calls: list[Call]) -> list[str]:
    calls_by_target: dict[str, list[Call]] = {}
    for call in calls:
        calls_by_target.setdefault(call.target, []).append(call)

    def is_used(option: Option) -> bool:
        is_method = option.owner not in ("", option.called)
        target = f".{option.called}" if is_method else f"{option.module}.{option.called}"
        return any(call.passes(option) for call in calls_by_target.get(target, ()))

    return [str(option) for option in options if not is_used(option)]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def users() -> Iterator[tuple[str, str]]:
    """Name and source of every file that is no test; of a notebook, its code cells."""
    for folder in USERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield module_name(path), path.read_text(encoding="utf-8")
        for path in sorted((ROOT / folder).glob("*.ipynb")):
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            yield path.stem, "\n".join(code_of(cell) for cell in cells if cell["cell_type"] == "code")


def code_of(cell: dict) -> str:
    """A cell's source; of one that is made from shortest forms, their import."""
    names = [name.split(".") for name in cell["metadata"].get(KEY, ())]
    return "\n".join(f"from {PACKAGE}.{module} import {name}" for module, name in names) or "".join(cell["source"])


def test_every_option_has_a_user():
    trees = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TEXTBOOK.rglob("*.py"))}
    options = [option for name, tree in trees.items() for option in options_of_module(tree, name)]
    calls = [call for name, text in users() for call in calls_of_module(ast.parse(text), name)]
    inherited = {
        name: base for module, tree in trees.items() for name, base in without_constructor(tree, module).items()
    }
    calls += [replace(call, target=inherited[call.target]) for call in calls if call.target in inherited]
    assert len(options) > 100 and len(calls) > 10_000
    assert unused(options, calls) == [f"collectives.{option}" for option in LIKE_TORCHS]


def test_the_exceptions_are_parameters_of_torch_distributed():
    for option in LIKE_TORCHS:
        function, _, name = option.rstrip(")").partition("(")
        for module in (collectives, dist):
            assert name in inspect.signature(getattr(module, function)).parameters


def test_an_option_that_nobody_passes_is_noticed():
    library = ast.parse(
        "def f(a, b=1, *, c=2): ...\n"
        "class C:\n    def __init__(self, d=3): ...\n    def method(self, e=4): ...\n"
        "@dataclass\nclass D:\n    g: int = 5\n    h: int = field(default=6, init=False)\n"
    )
    options = list(options_of_module(library, "lib"))
    assert list(map(str, options)) == ["lib.f(b)", "lib.f(c)", "lib.C(d)", "lib.C.method(e)", "lib.D(g)"]

    def left(text):
        return unused(options, list(calls_of_module(ast.parse(text), "user")))

    assert left("") == left("f(1, 2, c=3)") == left("from other import f\nf(1, 2, c=3)") == list(map(str, options))
    assert left("from lib import f as g\ng(1, 2)")[:2] == ["lib.f(c)", "lib.C(d)"]
    assert left("from lib import f\npartial(f, c=1)")[:2] == ["lib.f(b)", "lib.C(d)"]
    assert left("import x\nfrom . import lib\nx.method(*y)") == ["lib.f(b)", "lib.f(c)", "lib.C(d)", "lib.D(g)"]
    assert left("from lib import C\nclass S(C):\n    def __init__(self):\n        super().__init__(d=1)")[2] == (
        "lib.C.method(e)"
    )
