"""Whatever the library changes for a whole process, or in other libraries, is told in docs/process-settings.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "process-settings.md"
ROOM = (
    "mallopt",
    "field_size_limit",
    "freeze",
    "replaced",
    "environment",
    "filterwarnings",
    "simplefilter",
    "setLevel",
    "setrlimit",
    "sched_setscheduler",
    "set_start_method",
    "set_num_threads",
    "set_default_device",
    "set_default_dtype",
    "set_float32_matmul_precision",
    "use_deterministic_algorithms",
    "set_debug_level_from_env",
    "set_verbosity",
    "set_verbosity_error",
    "disable_progress_bar",
    "disable_progress_bars",
    "_set_pg_timeout",
    "redirect_output",
)
"""Functions that change something for the whole process, or for a while in another library."""

OURS = ("replaced", "environment")
"""Of these the functions of course_lib/replacing.py, which are imported by name; a method may be called so too."""


def changes(source: str) -> set[str]:
    """What a module's code changes outside itself: the functions it calls, and the places it writes to.

    Places are attributes and items of imported modules and of their members (``sys.excepthook``, ``os.environ``), a
    class given to an object that is there, a forward given to a module, and names set in another module by ``vars``.
    """
    tree, found = ast.parse(source), set()
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("course_lib"))
        for alias in node.names
    }
    place = re.compile(rf"(?!self\b|cls\b)({'|'.join(map(re.escape, imported)) or '-'})\.")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {_called(node, imported)}
        targets = (
            node.targets
            if isinstance(node, (ast.Assign, ast.Delete))
            else [node.target]
            if isinstance(node, (ast.AugAssign, ast.AnnAssign))
            else []
        )
        parts = [each for whole in targets for each in (whole.elts if isinstance(whole, ast.Tuple) else [whole])]
        found |= {_written(part, place) for part in parts if isinstance(part, (ast.Attribute, ast.Subscript))}
    return found - {""}


def _called(node: ast.Call, imported: set[str]) -> str:
    """The function of ROOM, or the place, that a call changes; empty if none."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name not in (*ROOM, "register", "disable", "setdefault", "update", "pop", "clear", "setattr"):
        return ""  # to write a call out as text takes longer than all else here
    called = ast.unparse(node.func)
    if called.startswith("self.") or (name in OURS and isinstance(node.func, ast.Attribute)):
        return ""
    if name in ROOM:
        return name
    if re.fullmatch(r"Attention\w*Interface\.register|gc\.disable", called):
        return called
    if re.fullmatch(r"os\.environ\.(setdefault|update|pop|clear)", called):
        return "os.environ"
    return "setattr" if name == "setattr" and ast.unparse(node.args[0]) in imported | {"module"} else ""


def _written(target: ast.expr, place: re.Pattern) -> str:
    """The place outside the module that an assignment writes to; empty if none."""
    text = ast.unparse(target)
    if re.match(r"(os\.)?environ\[", text):
        return "os.environ"
    if place.match(text):
        return text.partition("[")[0]
    if text.endswith((".__class__", ".forward")):
        return text.rpartition(".")[2]
    return next((name for name, start in {"vars": "vars(", "cudnn": "cudnn."}.items() if text.startswith(start)), "")


def test_every_change_is_told():
    found = {
        (path.relative_to(ROOT / "course_lib").as_posix(), change)
        for path in (ROOT / "course_lib").rglob("*.py")
        for change in changes(path.read_text())
    }
    rows = re.findall(r"^\| `(\S+\.py)` +((?:`\S+`(?:, )?)+) \|", PAGE.read_text(), re.M)
    told = {(file, change) for file, names in rows for change in re.findall(r"`(\S+?)`", names)}
    assert (found - told, told - found) == (set(), set()), "not told in docs/process-settings.md; told there and gone"
