"""Links of the repository's pages, as the book has them."""

import re
from collections.abc import Collection
from pathlib import Path

IN_MARKDOWN = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>\))")
IN_HTML = re.compile(r"(?P<before><a\s[^>]*?href=['\"])(?P<target>[^'\"]+)(?P<after>['\"])")
FENCED = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"[a-z]+:|#")


class Links:
    """Tells pages of the book from other files of the repository, and remembers which of these are linked to.

    Args:
        root: of the repository.
        pages: paths of the book's pages, relative to it.
    """

    def __init__(self, root: Path, pages: Collection[Path]):
        self.root, self.pages = root, pages
        self.files: set[str] = set()

    def in_markdown(self, text: str, page: Path) -> str:
        """A page's text with each link to a file that is none of the book's as ``source:PATH``; code is left alone."""
        parts = re.split(FENCED, text)
        # re.split puts both groups of a fence between the texts: the whole of it, and what it begins with
        return "".join(
            IN_MARKDOWN.sub(lambda m: self._said(m, page, "source:"), part)
            if at % 3 == 0
            else part
            if at % 3 == 1
            else ""
            for at, part in enumerate(parts)
        )

    def in_html(self, text: str, page: Path) -> str:
        """A page's HTML with each link to such a file as one to the page that shows it."""
        return IN_HTML.sub(lambda m: self._said(m, page, "../" * (len(page.parts) - 1)), text)

    def _said(self, link: re.Match, page: Path, prefix: str) -> str:
        target, _, anchor = link["target"].partition("#")
        if ELSEWHERE.match(link["target"]):
            return link[0]
        path = (self.root / page.parent / target).resolve().relative_to(self.root)
        if path in self.pages:
            return link[0]
        if path.suffix in (".svg", ".png") and prefix == "source:":
            return link[0]
        if not (self.root / path).exists():
            raise ValueError(f"{page} links to {path}, which is not there")
        if (self.root / path).is_dir():
            readme = path / "README.md"
            if readme in self.pages:
                return link[0].replace(link["target"], f"{target.rstrip('/')}/README.md")
            if f"{path}/index.md" in ("benchmarks/index.md", "exercises/index.md"):
                return link[0].replace(link["target"], f"{target.rstrip('/')}/index.md")
        self.files.add(str(path))
        line = f"#L-{lines[1]}" if (lines := re.match(r"L(\d+)", anchor)) else ""
        shown = f"source:{path}{line}" if prefix == "source:" else f"{prefix}{path}.html{line}"
        return f"{link['before']}{shown}{link['after']}"
