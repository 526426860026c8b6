"""Run lessons and store their outputs in place, as they are committed: `make notebooks`.

    python tools/notebooks.py [--listings] [notebooks/01_basic_loop.ipynb …]

The figure of the cell tagged `picture`, or the first, also becomes docs/pictures/NAME.png for the README.
A notebook that fails is left as it was, and so is one whose words its new numbers do not bear out (tools/claims.py).
Paths of this machine, timings and widget state are left out. `--listings` runs nothing: it renews the library's source
where pages show it, in listings and in cells (tools/cells.py).
"""

import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import numpy as np
import papermill
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.lessons import listing  # noqa: E402
from tools import cells, claims  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
LIMIT_BYTES = 360_000
COLOURS = 48
"""Of a figure; edges of letters and lines have many."""


def refresh(path: Path) -> None:
    """Execute one notebook and put its outputs in place."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / path.name
        os.environ["COURSE_ANSWERS"] = str(Path(folder) / "nobodys_answers.json")
        papermill.execute_notebook(
            str(path), str(done), cwd=str(path.parent), progress_bar=False, kernel_name="python3"
        )
        failures = claims.untrue(done)
        text = clean(done)
    size = len(text.encode())
    if size > LIMIT_BYTES:
        raise SystemExit(f"{path} would have {size} bytes, and the limit is {LIMIT_BYTES}: make its figures smaller")
    if failures:
        kept = ROOT / "build" / path.name
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8")
        raise SystemExit("\n  ".join([f"{path.name} is not stored (the run is {kept.relative_to(ROOT)}):", *failures]))
    replace(path, text)
    (PICTURES / f"{path.stem}.png").write_bytes(picture(path))
    print(f"{path.name}: {time.perf_counter() - started:.0f} s, {size / 1000:.0f} kB", flush=True)


def replace(path: Path, text: str) -> None:
    """Write a notebook whole, or not at all."""
    beside = path.with_name(f".{path.name}.writing")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def renew_listings(path: Path) -> None:
    """Show the library's source as it is now wherever a stored page has it; nothing is run."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if names := cell.metadata.get(cells.KEY):
            cell.source = cells.source_of(names)
    for data in (output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])):
        if of := data.get(listing.MIME):
            data |= listing.Listing.named(**of).as_stored()
    replace(path, nbformat.writes(notebook) + "\n")


def picture(path: Path) -> bytes:
    """The PNG that stands for a lesson."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    code.sort(key=lambda cell: "picture" not in cell.metadata.get("tags", []))
    figures = [
        output.data["image/png"] for cell in code for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    if not figures:
        raise SystemExit(f"{path} has no PNG figure")
    return base64.b64decode(figures[0])


def clean(path: Path) -> str:
    """The notebook's text without what differs from run to run or tells of this machine."""
    notebook = nbformat.read(path, as_version=4)
    for key in ("papermill", "widgets"):
        notebook.metadata.pop(key, None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                output.data["image/png"] = base64.b64encode(smaller(base64.b64decode(png))).decode() + "\n"
            without_widgets(output, path.name)
            # What Code(...) shows for LaTeX is a second copy of the highlighted source, for a converter nobody runs.
            if "text/html" in output.get("data", {}):
                output.data.pop("text/latex", None)
                # A table's own style says what every page that shows it says already.
                output.data["text/html"] = re.sub(
                    r"<style scoped>.*?</style>\n", "", output.data["text/html"], flags=re.DOTALL
                )
    text = nbformat.writes(notebook) + "\n"
    return text.replace(str(ROOT), "<course>").replace(str(Path.home()), "~")


def without_widgets(output: nbformat.NotebookNode, name: str) -> None:
    """Drop the live view of a widget from an output, so that every page shows what stands beside it.

    Raises:
        SystemExit: nothing does but Python's text of the widget.
    """
    data = output.get("data", {})
    data.pop("application/vnd.jupyter.widget-view+json", None)
    written = r"\w+\((children|value|options|description|layout)="
    if set(data) == {"text/plain"} and re.match(written, data["text/plain"]):
        raise SystemExit(
            f"{name} shows a widget without a picture beside it, {data['text/plain'][:40]}…: "
            "give it one, as course_lib.lessons.pipeline.explorer.Explorer does"
        )


def smaller(png: bytes) -> bytes:
    """The same figure in few colours; of those that become one, it is the most frequent, so that areas keep theirs."""
    squeezed = io.BytesIO()
    figure = Image.open(io.BytesIO(png)).convert("RGB")
    few = figure.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    drawn, at, counts = np.unique(np.asarray(figure).reshape(-1, 3), axis=0, return_index=True, return_counts=True)
    rarest_first = counts.argsort()
    palette = np.zeros((COLOURS, 3), np.uint8)
    palette[np.asarray(few).ravel()[at[rarest_first]]] = drawn[rarest_first]
    few.putpalette(palette.tobytes())
    few.save(squeezed, "PNG", optimize=True)
    return min(png, squeezed.getvalue(), key=len)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    PICTURES.mkdir(parents=True, exist_ok=True)
    names = [name for name in sys.argv[1:] if name != "--listings"]
    chosen = [Path(name).resolve() for name in names] or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    for each in chosen:
        (renew_listings if "--listings" in sys.argv else refresh)(each)
