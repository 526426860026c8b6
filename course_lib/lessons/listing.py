"""Source on a page: highlighted, monospaced, with a link to its file and lines."""

import importlib
import inspect
import textwrap
from collections.abc import Callable
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from IPython.display import Code
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.style import Style
from pygments.token import Comment, Keyword, Name, Number, String

import course_lib

MIME = "application/vnd.course.listing+json"
"""Of a listing: its module, qualified name, and whether with docstring, by which it is rendered anew."""
ROOT = Path(course_lib.__file__).resolve().parents[1]
FRAME = (
    "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:13px;line-height:1.35;"
    "white-space:pre;overflow-x:auto;margin:0;padding:.6em .8em;background:#f6f8fa;color:#1f2328"
)
"""One light panel on light and dark pages, without a style sheet, which nbconvert's own would override."""


class _Few(Style):
    """Five kinds of words have a colour, and the others no markup, which keeps a notebook small."""

    styles: ClassVar = {
        Keyword: "bold #0550ae",
        String: "#0a5c2b",
        Comment: "italic #57606a",
        Number: "#953800",
        Name.Function: "bold #6639ba",
        Name.Class: "bold #6639ba",
    }


class Listing(Code):
    """Python source with where it is from.

    Args:
        text: the source.
        path: of its file, relative to the repository; empty for what was typed into the notebook.
        first: number of the first line.
        last: of the last.
        of: module, qualified name and ``doc``, where :meth:`named` finds the same again.
    """

    def __init__(self, text: str, path: str, first: int, last: int, of: dict[str, Any] | None = None):
        super().__init__(text, language="python")
        self.path, self.first, self.last, self.of_thing = path, first, last, of

    @classmethod
    def of(cls, thing: Callable | type | ModuleType, doc: bool) -> "Listing":
        """The source of a function, class or module, with or without its docstring."""
        thing = getattr(thing, "fn", thing)  # of a Triton kernel
        thing = inspect.unwrap(thing) if callable(thing) else thing
        lines, first = inspect.getsourcelines(thing)
        first = max(first, 1)
        file = Path(inspect.getsourcefile(thing) or "").resolve()
        path = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) and ".venv" not in file.parts else ""
        text = textwrap.dedent("".join(lines))
        module = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
        of = {"module": module, "name": getattr(thing, "__qualname__", ""), "doc": doc} if path else None
        return cls(text if doc else without_docstring(text, thing), path, first, first + len(lines) - 1, of)

    @classmethod
    def named(cls, module: str, name: str, doc: bool) -> "Listing":
        """The listing of what a module of the course has under a qualified name; an empty one is the module.

        Raises:
            AttributeError: the module has no such thing any more.
        """
        thing = importlib.import_module(module)
        for part in filter(None, name.split(".")):
            thing = inspect.getattr_static(thing, part) if inspect.isclass(thing) else getattr(thing, part)
        return cls.of(getattr(thing, "__func__", getattr(thing, "fget", thing)), doc)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {MIME: self.of_thing} if self.of_thing else {}

    def _repr_html_(self) -> str:
        code = highlight(self.data, PythonLexer(), HtmlFormatter(nowrap=True, noclasses=True, style=_Few))
        link = ""
        if self.path:
            where = f"{escape(self.path)}, lines {self.first}–{self.last}"
            link = f"<a href='../{escape(self.path)}#L{self.first}-L{self.last}'>{where}</a>"
        return f"<div style='font-size:13px'>{link}</div><pre style=\"{FRAME}\">{code.rstrip()}</pre>"

    def as_stored(self) -> dict[str, str]:
        """The outputs that a run leaves in a notebook, by MIME type."""
        return {"text/html": self._repr_html_(), "text/plain": self.data.rstrip("\n")}

    def _repr_latex_(self) -> None:
        """None: nbconvert's own listing serves."""


def without_docstring(text: str, thing: Callable | type | ModuleType) -> str:
    """Source without the docstring of what it defines."""
    if not thing.__doc__:
        return text
    for quotes in ('"""', "'''"):
        head, quote, rest = text.partition(quotes)
        if quote and not head.rstrip().endswith("="):
            return head.rstrip() + "\n" + rest.partition(quotes)[2].lstrip("\n")
    return text
