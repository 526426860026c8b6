"""Build the book: `make book`.

    python -m book [html | epub]

The sources are put together in build/book-source, and the site is written to build/book (build/epub for EPUB). A
warning of Sphinx is an error.
"""

import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from book import npm
from book.assemble import ROOT, assemble

SOURCE, DOCTREES = ROOT / "build" / "book-source", ROOT / "build" / "book-doctrees"
OUT = {"html": ROOT / "build" / "book", "epub": ROOT / "build" / "epub"}


def build(form: str = "html") -> int:
    """Put the sources together and run Sphinx over them; returns its exit code."""
    assemble(SOURCE)
    return sphinx(["-W", "--keep-going", "-q", "-b", form, "-c", str(Path(__file__).parent), "-d", str(DOCTREES / form),
                   str(SOURCE), str(OUT[form])])


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["html"]
    if len(chosen) > 1 or chosen[0] not in OUT:
        sys.exit(__doc__)
    try:
        code = build(*chosen)
    except npm.NotFetched as problem:
        sys.exit(f"book: {problem}")
    if code == 0:
        print(f"{OUT[chosen[0]].relative_to(ROOT)}/: open {'index.html' if chosen[0] == 'html' else 'the .epub'}")
    sys.exit(code)
