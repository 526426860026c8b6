"""Sphinx extension of the book: pages that show files, alternative texts of figures."""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.highlighting import PygmentsBridge

from book import dark_figures, front_page, lighter
from book.hanging_lines import HangingLines

ROOT = Path(__file__).resolve().parents[1]
SCHEME = "source:"
LONGEST_VALUE = 80
"""Characters of a constant's value that its page still shows."""


def about(app: Sphinx) -> dict[str, Any]:
    """What the assembly says of figures and files."""
    return json.loads((Path(app.srcdir) / "about-files.json").read_text(encoding="utf-8"))


def say_what_figures_show(app: Sphinx, tree: nodes.document) -> None:
    """Give each figure of a notebook its alternative text, which it has by the hash of its data, its file's name."""
    texts = about(app)["alternatives"]
    for image in tree.findall(nodes.image):
        text = texts.get(posixpath.basename(image["uri"]).partition(".")[0])
        if text and not image.get("alt"):
            image["alt"] = text


def add_dark_figures(app: Sphinx, tree: nodes.document) -> None:
    """Put beside each figure of a notebook its twin for dark pages; style sheets show one of the two."""
    written = Path(app.outdir).parent / "book-dark-figures"
    written.mkdir(exist_ok=True)
    for image in list(tree.findall(nodes.image)):
        stored = Path(app.env.relfn2path(image["uri"])[1])
        name = stored.name.partition(".")[0]
        if not re.fullmatch(r"[0-9a-f]{64}", name) or not stored.is_file():
            continue
        twin = written / f"{name}-dark{stored.suffix}"
        if not twin.is_file():
            twin.write_bytes(
                dark_figures.svg(stored.read_text(encoding="utf-8")).encode()
                if stored.suffix == ".svg"
                else dark_figures.png(stored.read_bytes())
            )
        dark = image.deepcopy()
        dark["uri"] = posixpath.relpath(twin, Path(app.srcdir) / posixpath.dirname(app.env.docname))
        image["classes"], dark["classes"] = [*image["classes"], "only-light"], [*dark["classes"], "only-dark"]
        image.parent.insert(image.parent.index(image) + 1, dark)


def hide_long_values(app: Sphinx, tree: nodes.document) -> None:
    """Leave out the value of a constant that is a whole table: its file has it, in names that can be read."""
    for value in list(tree.findall(addnodes.desc_annotation)):
        if value.astext().startswith(" = ") and len(value.astext()) > LONGEST_VALUE:
            value.parent.remove(value)


def leave_out_aliases(app: Sphinx, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """A named tuple's fields stand in its signature; their own docstrings say "Alias for field number 0"."""
    return True if (thing.__doc__ or "").startswith("Alias for field number") else None


def mark_part(app: Sphinx, tree: nodes.document) -> None:
    """Give a lesson's page the class of its part of the course, which has an accent."""
    lesson = re.match(r"(?:notebooks|exercises)/(\d\d)_", app.env.docname)
    if lesson and (section := next(tree.findall(nodes.section), None)):
        section["classes"].append(f"part-{front_page.part_of(int(lesson[1]))}")


def add_course_nav(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: nodes.document | None) -> None:
    """Let the side bar show the page's own headings below its entry (book/templates/course-nav.html)."""

    def course_nav() -> str:
        links = str(
            context["generate_toctree_html"](
                startdepth=0,
                kind="sidebar",
                maxdepth=4,
                collapse=True,
                includehidden=True,
                titles_only=True,
                show_nav_level=1,
            )
        )
        here = f"<div id='pst-page-toc-nav'>{context['generate_toc_html']()}</div>" if tree else ""
        return re.sub(
            r'(<li class="toctree-l\d[^"]*\bcurrent\b[^"]*"><a class="current[^>]*href="#">.*?</a>)',
            lambda m: m[1] + here,
            links,
            count=1,
            flags=re.DOTALL,
        )

    context["course_nav"] = course_nav
    if "body" in context:  # a fold of MyST-NB has a name beside its words, which a screen reader would say instead
        context["body"] = context["body"].replace('<summary aria-label="Toggle hidden content">', "<summary>")


def link_to_files(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Turn ``source:PATH#L-LINE`` into a link to the page that shows the file."""
    for reference in list(tree.findall(nodes.reference)):
        uri = reference.get("refuri", "")
        if not uri.startswith(SCHEME):
            continue
        path, _, line = uri.removeprefix(SCHEME).partition("#")
        shown = posixpath.relpath(f"{path}.html", posixpath.dirname(page) or ".")
        reference["refuri"] = f"{shown}#{line}" if line else shown


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that is linked to: its lines, each with its number and anchor; of a folder, its files."""
    for name in about(app)["files"]:
        path = ROOT / name
        up = "../" * name.count("/")
        if path.is_dir():
            listed = sorted(each.name + "/" * each.is_dir() for each in path.iterdir() if each.name[0] not in "._")
            body = f"<ul>{''.join(f'<li>{each}</li>' for each in listed)}</ul>"
        else:
            try:
                lexer = get_lexer_for_filename(name)
            except ClassNotFound:
                lexer = TextLexer()
            formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
            body = highlight(path.read_text(encoding="utf-8"), lexer, formatter)
        yield name, {"title": name, "body": body, "up": up}, "file.html"


def add_fetched_files(app: Sphinx, config: Config) -> None:
    """Take what the assembly put beside the sources among the static files."""
    fetched = Path(app.srcdir) / "_static"
    config.html_static_path.append(str(fetched))
    if (extra := Path(app.srcdir) / "_extra").is_dir():
        config.html_extra_path.append(str(extra))


def read_as_meant(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Write what a docstring says in plain text as reStructuredText: a plural after code (``DTensor``s), |a norm|."""
    lines[:] = [
        re.sub(r"(?<=\w``)(?=s\b)", r"\\ ", re.sub(r"(``.*?``)|\|", lambda m: m[1] or r"\|", line)) for line in lines
    ]


def lighten_site(app: Sphinx, problem: Exception | None) -> None:
    """Take out of a built site what no page uses."""
    if problem is None:
        lighter.lighten(Path(app.outdir))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("config-inited", add_fetched_files)
    app.connect("autodoc-process-docstring", read_as_meant)
    app.connect("autodoc-skip-member", leave_out_aliases)
    app.connect("doctree-read", hide_long_values)
    app.connect("doctree-read", say_what_figures_show, priority=300)
    app.connect("doctree-read", add_dark_figures, priority=400)  # before Sphinx collects the images, at 500
    app.connect("doctree-read", mark_part)
    app.connect("html-page-context", add_course_nav)
    PygmentsBridge.html_formatter = HangingLines
    app.connect("doctree-resolved", link_to_files)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("build-finished", lighten_site)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
