"""The book's Sphinx configuration; `make book` runs it over build/book-source."""

import inspect
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import course_lib  # noqa: E402

project = "Distributed training of transformers"
author = ""
version = release = course_lib.__version__
language, highlight_language = "en", "none"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sphinx_copybutton",
    "book.extension",
]
exclude_patterns = ["about-files.json", "_extra"]
templates_path = [str(ROOT / "book" / "templates")]
pygments_style = "a11y-high-contrast-light"

nb_execution_mode = "off"
myst_enable_extensions = ["amsmath", "attrs_block", "colon_fence", "deflist", "dollarmath", "html_image"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": "source:{{path}}#{{fragment}}"}

autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch's own have labels that are only in its pages
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
add_module_names = False

mathjax_path = "mathjax/tex-svg.js"
mathjax4_config = {
    "loader": {"paths": {"fonts": "[mathjax]"}},
    "options": {
        "enableSpeech": False,
        "enableBraille": False,
        "enableExplorer": False,
        "menuOptions": {"settings": {"enrich": False, "assistiveMml": True}},
    },
}

html_theme = "sphinx_book_theme"
html_title = project
html_static_path = [str(ROOT / "book" / "static")]  # and mathjax, which book/extension.py adds
html_css_files = ["book.css", "questions.css", "player.css"]
html_js_files = ["book.js", "questions.js", "player.js"]
html_favicon = str(ROOT / "book" / "static" / "favicon.svg")
html_context = {"default_mode": "auto"}
html_copy_source = html_use_index = html_domain_indices = False
html_show_sphinx = html_show_copyright = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": [],
}
html_sidebars = {"**": ["navbar-logo.html", "search-button-field.html", "course-nav.html"]}


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Where an object of the textbook is defined."""
    if domain != "py" or not info["module"].startswith("course_lib.parallel"):
        return None
    found: Any = sys.modules[info["module"]]
    for part in info["fullname"].split("."):
        found = getattr(found, part, None)
    if not callable(found):
        return None  # a value has no lines
    found = inspect.unwrap(found)
    try:
        file, line = inspect.getsourcefile(found) or "", inspect.getsourcelines(found)[1]
    except TypeError:
        return None  # built by the interpreter: the constructor of a named tuple
    path = os.path.relpath(file, ROOT)
    return f"source:{path}#L-{line}" if path.startswith("course_lib/parallel/") else None
