"""Builds the book: puts the sources together, and runs Sphinx over them. A warning is an error."""

import shutil
from pathlib import Path

from book.assemble import ROOT, assemble

SOURCE, DOCTREES, OUT = ROOT / "build" / "book-source", ROOT / "build" / "book-doctrees", ROOT / "build" / "book"


def build() -> int:
    """Build the site; returns Sphinx's exit code.

    What a build left that did not end well is not built upon: it has read pages whose figures it never copied.

    Raises:
        NotFetched: a package of npm is not there and cannot be fetched.
    """
    ended_well = DOCTREES / "ended-well"
    if not ended_well.is_file():
        shutil.rmtree(DOCTREES, ignore_errors=True)
        shutil.rmtree(OUT, ignore_errors=True)
    ended_well.unlink(missing_ok=True)
    shutil.rmtree(OUT / "_static", ignore_errors=True)  # which Sphinx adds to, and takes nothing out of
    assemble(SOURCE)
    code = sphinx(
        [
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "html",
            "-c",
            str(Path(__file__).parent),
            "-d",
            str(DOCTREES),
            str(SOURCE),
            str(OUT),
        ]
    )
    if code == 0:
        ended_well.touch()
    return code


def sphinx(options: list[str]) -> int:
    """Run Sphinx, which only building needs; returns its exit code."""
    from sphinx.cmd.build import main

    return main(options)
