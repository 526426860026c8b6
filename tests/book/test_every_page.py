"""Every page of the built book, without a browser: links and anchors are whole, nothing comes from elsewhere."""

import html.parser
import posixpath
import re
import urllib.parse

import pytest

pytestmark = pytest.mark.long
LIMIT = 60e6
"""Bytes of the whole site."""


class Page(html.parser.HTMLParser):
    """What a page refers to, and what can be referred to in it."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loads, self.pictures = set(), set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.ids |= {known[key] for key in ("id", "name") if known.get(key)}
        if tag == "a" and known.get("href"):
            self.links.add(known["href"])
        if tag in ("script", "img", "iframe", "source", "video", "object"):
            self.loads.add(known.get("src") or known.get("data") or "")
        if tag == "link" and "canonical" not in (known.get("rel") or ""):
            self.loads.add(known.get("href") or "")
        if tag == "img":
            self.pictures.append(known)


@pytest.fixture(scope="module")
def pages(site):
    found = {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.relative_to(site).parts[0] not in ("_static", "_sources")
    }
    assert len(found) > 200
    return found


def broken(site, pages):
    """Links whose file or anchor is not there."""
    for name, page in pages.items():
        for link in page.links | page.loads:
            if re.match(r"(https?|mailto|data):", link) or not link:
                continue
            path, _, anchor = link.partition("#")
            target = (
                posixpath.normpath(
                    posixpath.join(posixpath.dirname(name), urllib.parse.unquote(path.partition("?")[0]))
                )
                if path
                else name
            )
            if not (site / target).is_file():
                yield f"{name}: {link}"
            elif anchor and target in pages and urllib.parse.unquote(anchor) not in pages[target].ids | {"top"}:
                yield f"{name}: {link} (no such anchor)"


def test_links_and_anchors_are_whole(site, pages):
    assert not list(broken(site, pages))


def test_no_page_loads_anything_from_another_host(pages):
    assert not {(name, load) for name, page in pages.items() for load in page.loads if re.match(r"(https?:)?//", load)}


def test_the_textbook_has_drawings_as_they_are_written_and_no_value_without_a_name(site):
    """Indented lines of a docstring without `::` before them are prose, and flow; a value may be a whole table."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (site / "textbook").glob("*.html")}
    assert len(texts) > 40
    for unwanted in ("<blockquote", "&lt;built-in", "&lt;OpOverload", "&lt;class", "Alias for field number"):
        assert not [name for name, text in texts.items() if unwanted in text], unwanted


def test_each_picture_has_an_alternative_text(pages):
    pictures = [(name, picture) for name, page in pages.items() for picture in page.pictures]
    assert not [
        (name, each.get("src"))
        for name, each in pictures
        if not (each.get("alt") or "").strip() or re.search(r"\.(png|svg)$", each["alt"])
    ]


def test_the_site_is_small(site):
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < LIMIT
