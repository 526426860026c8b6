"""Every cross-reference in a docstring, such as :func:`resolve`, leads to something that is there."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:class|func|mod|meth|attr|data|exc):`~?([\w.]+)`")


def has(owner, name):
    """Whether a module or class has that name: as an attribute, a field without a default, or one of its instances."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    ours = [each for each in classes if each.__module__.startswith("course_lib")]
    return (
        hasattr(owner, name)
        or any(name in inspect.get_annotations(each) for each in classes)
        or any(re.search(rf"\bself\.{name}\b", inspect.getsource(each)) for each in ours)
    )


def follows(owner, names):
    """Whether names lead on from a module or class; what only instances have is the end."""
    for place, name in enumerate(names):
        if not has(owner, name):
            return False
        if not hasattr(owner, name):
            return place == len(names) - 1
        owner = getattr(owner, name)
    return True


@functools.cache
def imported(name):
    """A module of that full name, if there is one."""
    try:
        return importlib.import_module(name)
    except (ModuleNotFoundError, ValueError, TypeError):  # not there, or relative
        return None


def resolve(target, *scope):
    """Whether a reference leads somewhere from one of some classes or modules, or by its full name."""
    names = target.split(".")
    splits = range(len(names), 0, -1)
    whole = next(((module, at) for at in splits if (module := imported(".".join(names[:at])))), None)
    return any(follows(owner, names) for owner in scope) or (whole is not None and follows(whole[0], names[whole[1] :]))


def references(path):
    """(line, target, names of the classes around it) of each reference in a file."""
    text = path.read_text(encoding="utf-8")
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    for number, line in enumerate(text.splitlines(), start=1):
        around = [node.name for node in classes if node.lineno <= number <= node.end_lineno]
        yield from ((number, target, around) for target in ROLE.findall(line))


def test_references_lead_somewhere():
    looked, lost = 0, []
    for path in sorted((ROOT / "course_lib").rglob("*.py")):
        for number, target, around in references(path):
            module = imported(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
            scope = [getattr(module, name) for name in around if hasattr(module, name)]
            looked += 1
            if not resolve(target, *scope, module):
                lost.append(f"{path.relative_to(ROOT)}:{number} {target}")
    assert looked > 300 and lost == []


def test_what_is_not_there_is_not_found():
    from course_lib.training import trainer

    assert resolve("Trainer.train_step", trainer) and resolve("train_step", trainer.Trainer)
    assert resolve("course_lib.training.state.TrainState.step") and resolve("learning_rate", trainer.Trainer)
    assert not resolve("Trainer.train_steps", trainer) and not resolve("course_lib.training.states")
