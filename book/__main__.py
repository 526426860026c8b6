"""Build the book: `make book`.

    python -m book

The sources are put together in build/book-source, and the site is written to build/book. A warning of Sphinx is an
error.
"""

import sys

from book import npm
from book.build import OUT, ROOT, build

if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(__doc__)
    try:
        code = build()
    except npm.NotFetched as problem:
        sys.exit(f"book: {problem}")
    if code == 0:
        print(f"{OUT.relative_to(ROOT)}/: open index.html")
    sys.exit(code)
