"""Puts the sources of the book together: pages of its own, lessons, exercises, tables, documents, generated reference.

They lie as in the repository, so that links between them hold. A link to a file that is no page of the book becomes
``source:PATH``, which book/extension.py turns into a page that shows the file.
"""

import json
import re
import shutil
from pathlib import Path

from book import (
    command_pages,
    course_contents,
    front_page,
    live_exercises,
    live_parts,
    npm,
    open_elsewhere,
    players,
    textbook_pages,
)
from book.links import Links
from book.notebooks import page_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).parent / "pages"
DOCUMENTS = ("CONTRIBUTING.md", "exercises/README.md", "tests/gpu_sim/README.md")
"""Pages that lie elsewhere than in docs/ and benchmarks/."""
MATHJAX = ("tex-svg.js", "a11y/assistive-mml.js", "LICENSE")
"""What a page needs of the package: the program with its common letters, and what a screen reader reads instead."""
LETTERS = (
    "accents",
    "arrows",
    "calligraphic",
    "double-struck",
    "fraktur",
    "marrows",
    "math",
    "monospace",
    "mshapes",
    "script",
    "shapes",
    "symbols",
    "variants",
)
"""What it loads of its font where a formula asks for it; other alphabets are left out."""
FONTS = {"source-serif-4": ("normal", "italic"), "inter": ("normal",), "jetbrains-mono": ("normal",)}
"""Files of the typefaces: of the prose, of headings and tables, of code. Greek and arrows come from the reader's."""


def documents() -> list[Path]:
    """The Markdown files of the repository that are pages of the book, relative to its root."""
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    return sorted([*(path.relative_to(ROOT) for path in found), *map(Path, DOCUMENTS)])


def notebooks() -> list[Path]:
    """Lessons and exercises, relative to the repository's root; solutions are not among them."""
    return sorted(
        path.relative_to(ROOT) for folder in ("notebooks", "exercises") for path in (ROOT / folder).glob("[0-9]*.ipynb")
    )


def sources() -> tuple[dict[str, str], dict[str, str], set[str]]:
    """All texts of the book by their path, alternative texts by the hash of their figure, and the files linked to."""
    links = Links(ROOT, {*documents(), *notebooks()})
    texts = {str(path): links.in_markdown((ROOT / path).read_text(encoding="utf-8"), path) for path in documents()}
    alternatives: dict[str, str] = {}
    for path in notebooks():
        text, said = page_of(ROOT / path, path, links)
        texts[str(path)] = players.with_players(text, path)
        alternatives |= said
    for path in sorted(PAGES.rglob("*.md")):
        texts[str(path.relative_to(PAGES))] = text = path.read_text(encoding="utf-8")
        links.files |= set(re.findall(r"\(source:([^)#]+)", text))
    texts["index.md"] = front_page.filled(texts["index.md"])
    for pages in (command_pages.pages(), textbook_pages.pages(), live_exercises.pages(), players.page()):
        texts |= pages
    return texts, alternatives, links.files | set(textbook_pages.files()) | players.FILES


def assemble(source: Path) -> None:
    """Write the sources; files that stay as they are keep their time, so that Sphinx reads what has changed.

    Args:
        source: the folder to write to.

    Raises:
        npm.NotFetched: a package of npm is not there and cannot be fetched.
    """
    texts, alternatives, files = sources()
    texts["about-files.json"] = json.dumps({"alternatives": alternatives, "files": sorted(files)}, indent=1)
    content = {name: text.encode() for name, text in texts.items()}
    content |= live_parts.files(npm.folder("pyodide")) | players.files()
    content[f"_static/{course_contents.NAME}"] = course_contents.script().encode()
    mathjax, font = npm.folder("mathjax"), npm.folder("@mathjax/mathjax-newcm-font")
    content |= {f"_static/mathjax/{name}": (mathjax / name).read_bytes() for name in MATHJAX}
    if repository := open_elsewhere.REPOSITORY:
        content |= {
            f"_extra/open/{path.name}": open_elsewhere.notebook(ROOT / path, repository).encode()
            for path in notebooks()
            if path.parts[0] == "notebooks"
        }
    letters = [f"svg/dynamic/{name}.js" for name in LETTERS]
    content |= {f"_static/mathjax/mathjax-newcm-font/{name}": (font / name).read_bytes() for name in letters}
    for name, forms in FONTS.items():
        files_of_font = npm.folder(f"@fontsource-variable/{name}") / "files"
        content |= {
            f"_static/fonts/{file}": (files_of_font / file).read_bytes()
            for file in (f"{name}-latin-wght-{form}.woff2" for form in forms)
        }
    content |= {str(path.relative_to(ROOT)): path.read_bytes() for path in (ROOT / "docs" / "pictures").iterdir()}
    for name, data in content.items():
        path = source / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for path in sorted(source.rglob("*"), reverse=True):
        if path.is_file() and str(path.relative_to(source)) not in content:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            shutil.rmtree(path)
