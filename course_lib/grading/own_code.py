"""Lines of a learner's own code: where an exception was raised, and where a rank still was."""

import ast
import linecache
import re
from collections.abc import Callable, Coroutine
from numbers import Number
from types import CodeType
from typing import Any

BUILD_PATH = re.compile(r"\[/\S+?\.(?:cc|cpp|h|hpp|cu):\d+\]\s*")
"""Where a library's developers keep its source: nothing to a learner."""
MAX_TEXT = 200
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


class _NoShell:
    """Result of ``get_ipython()`` where there is no IPython: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def run(source: str, file: str) -> dict[str, Any]:
    """Run an answer as a notebook would: ``await`` may stand outside functions, and what IPython adds to Python's names
    is there, and shows nothing.

    Args:
        source: the answer's text.
        file: name to compile it under.
    Returns:
        The names that it has then.
    """
    scope: dict[str, Any] = {"__name__": "answer", "display": lambda *args, **kwargs: None, "get_ipython": _NoShell}
    waits = eval(compile(source, file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True), scope)
    if isinstance(waits, Coroutine):
        import asyncio  # few need it

        asyncio.run(waits)
    return scope


def registered(name: str, source: str) -> str:
    """A file name to compile an answer under, so that its lines can be shown though there is no such file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return name


def file_of(function: Callable[..., Any]) -> str | None:
    """The file name that a function, or a class's methods, were compiled under; None where there is none."""
    for candidate in (getattr(function, "__wrapped__", None), function, *vars(function).values()):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return code.co_filename
    return None


def give_salt(function: Callable[..., Any], rank: int) -> None:
    """Let ``hash()`` in a learner's code be as in a process of its own: forked ranks share Python's salt, ranks that a
    launcher starts do not. What it gives of numbers is the same everywhere."""

    def salted(value: Any) -> int:
        return hash(value) if _is_of_numbers(value) else hash((rank, hash(value)))

    for candidate in (function, *vars(function).values()):
        if (names := getattr(candidate, "__globals__", None)) is not None:
            names["hash"] = salted


def _is_of_numbers(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_of_numbers, value))
    return value is None or isinstance(value, Number)


def told(error: BaseException, file: str | None, source: str = "") -> str:
    """An exception in a line: type, message, and the last line of the learner's code that it went through.

    Args:
        error: its traceback is searched for that line.
        file: that this code was compiled under.
        source: its text; empty where `linecache` knows it.
    """
    message = " ".join(BUILD_PATH.sub("", str(error)).split())
    text = f"{type(error).__name__}: {message}"[:MAX_TEXT]
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return text if line is None else f"{text} (in {of_line(line, file, source)})"


def of_line(line: int, file: str | None, source: str = "") -> str:
    """``line 3 of yours, `dist.barrier()` ``."""
    if source:
        lines = source.splitlines()
        shown = lines[line - 1] if line <= len(lines) else ""
    else:
        shown = linecache.getline(file or "", line)
    return f"line {line} of yours" + (f", `{shown.strip()[:90]}`" if shown.strip() else "")


def last_line(stack: str, file: str | None) -> str:
    """The line of the learner's code in a stack as `faulthandler` prints it, latest call first; empty: none."""
    frame = next((match for match in _FRAME.finditer(stack) if match["file"] == file), None)
    return of_line(int(frame["line"]), file) if frame else ""
