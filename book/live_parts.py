"""The files of the live parts: Python for the browser, the course's modules that it imports, and the offline cache."""

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIVE = Path(__file__).parent / "live"
PYTHON = ("pyodide.mjs", "pyodide.asm.mjs", "python_stdlib.zip")
PACKED, LOCK = "pyodide.asm.wasm", "pyodide-lock.json"
MODULES = ("book/__init__.py", "book/live/*.py", "course_lib/__init__.py", "course_lib/errors.py",
           "course_lib/parallel/__init__.py", "course_lib/parallel/pipeline/**/*.py")
"""What book/live/bench.py needs, and what stands in the same folders; none of it imports torch before it is asked."""


def modules() -> bytes:
    """A ZIP archive of the modules, with the same bytes for the same sources."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for pattern in MODULES:
            for path in sorted(ROOT.glob(pattern)):
                packed.writestr(zipfile.ZipInfo(path.relative_to(ROOT).as_posix()), path.read_bytes(),
                                zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def files(pyodide: Path) -> dict[str, bytes]:
    """The files by their path among the sources.

    Args:
        pyodide: the unpacked package.
    """
    lock = json.loads((pyodide / LOCK).read_text(encoding="utf-8")) | {"packages": {}}  # none is loaded
    python = {name: (pyodide / name).read_bytes() for name in PYTHON}
    python |= {f"{PACKED}.gz": gzip.compress((pyodide / PACKED).read_bytes(), mtime=0), LOCK: json.dumps(lock).encode()}
    live = {"modules.zip": modules()} | {f"pyodide/{name}": data for name, data in python.items()}
    version = hashlib.sha256(b"".join(live[name] for name in sorted(live))).hexdigest()[:12]
    cache = (LIVE / "live-cache.js").read_text(encoding="utf-8").replace("VERSION", version)
    return {f"_static/live/{name}": data for name, data in live.items()} | {"_extra/live-cache.js": cache.encode()}
