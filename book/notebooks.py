"""A stored notebook as a page: without what only a kernel or a test reads, its links the book's."""

import base64
import hashlib
import re
from pathlib import Path

import nbformat

from book import cells, open_elsewhere, questions
from book.links import Links

UNSEEN = "application/vnd."
"""How the kinds of output begin that tests read or a live kernel draws; each stands beside what a page shows."""
PICTURES = ("image/png", "image/svg+xml")


def page_of(path: Path, page: Path, links: Links) -> tuple[str, dict[str, str]]:
    """A notebook's text for the book, and the alternative texts of its figures by the hash of their data.

    Args:
        path: of the notebook.
        page: its path in the book.
        links: of the book.
    """
    notebook = nbformat.read(path, as_version=4)
    alternatives: dict[str, str] = {}
    notebook.cells = questions.ask(notebook.cells)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = links.in_markdown(cell.source, page)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _seen(output, page, links)]
            for output in list(cell.outputs):
                alternatives |= _alternatives(output)
                if table := cells.numbers(output):
                    place = cell.outputs.index(output) + 1
                    cell.outputs.insert(place, nbformat.v4.new_output("display_data", {"text/html": table}))
    notebook.cells = [
        part for cell in notebook.cells for part in (cells.parts(cell) if cell.cell_type == "code" else [cell])
    ]
    if page.parts[0] == "notebooks":
        said = open_elsewhere.buttons(path.stem, open_elsewhere.REPOSITORY)
        notebook.cells[0].source = cells.with_side_notes(notebook.cells[0].source, said)
    return nbformat.writes(notebook) + "\n", alternatives


def _seen(output: nbformat.NotebookNode, page: Path, links: Links) -> bool:
    """Whether a page shows anything of an output, which loses all that it does not."""
    if "data" not in output:
        return True
    data = output.data
    for kind in [kind for kind in data if kind.startswith(UNSEEN)]:
        del data[kind]
    if "text/html" in data:
        data["text/html"] = cells.in_the_pages_colours(links.in_html(data["text/html"], page))
    return any(text.strip() if isinstance(text, str) else text for text in data.values())


def _alternatives(output: nbformat.NotebookNode) -> dict[str, str]:
    """The alternative texts of an output's pictures: a drawing has its own, a figure's is in the output's metadata."""
    said = {}
    for kind in PICTURES:
        content = output.get("data", {}).get(kind)
        if content is None:
            continue
        if kind == "image/svg+xml":
            data = "\n".join(content.splitlines()).encode()  # as MyST-NB writes it
            found = re.search(r"<title>(.*?)</title>", content, re.DOTALL)
            text = found[1].strip() if found else ""
        else:
            data, text = base64.b64decode(content), output.metadata.get(kind, {}).get("alt", "")
        said[hashlib.sha256(data).hexdigest()] = text
    return said
