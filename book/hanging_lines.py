"""Code whose lines break where a page is narrow: what goes on stands further in than its line begins."""

import re
from collections.abc import Iterator
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter

TAG = re.compile(r"<[^>]*>")


class HangingLines(HtmlFormatter):
    """Pygments' HTML with an element for each line, which says how far its code is indented (book/static/book.css)."""

    def wrap(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        """Lines as Pygments gives them, those of code in their elements."""
        return super().wrap(self._in_elements(source))

    def _in_elements(self, source: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        for is_code, line in source:
            text = TAG.sub("", line)
            indented = len(text) - len(text.lstrip(" "))
            yield is_code, f'<span class="line" style="--in:{indented}">{line}</span>' if is_code else line


def highlighted(text: str, lexer: Any) -> str:
    """HTML of a text as Sphinx writes a block of code, in the page's own colours."""
    return f"<div class='highlight'>{highlight(text, lexer, HangingLines(cssclass='')).strip()}</div>"
