"""Build the book: `make book`.

    python -m book [html | epub]

The sources are put together in build/book-source, and the site is written to build/book (build/epub for EPUB). A
warning of Sphinx is an error.
"""

import sys

from book import npm
from book.build import OUT, ROOT, build

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
