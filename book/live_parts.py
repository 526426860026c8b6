"""The files of the live parts: Python for the browser, the course's modules that it imports, and the offline cache."""

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIVE = Path(__file__).parent / "live"
PACKED, LOCK = ("pyodide.asm.wasm", "pyodide.asm.mjs"), "pyodide-lock.json"
PYTHON = ("pyodide.mjs", "python_stdlib.zip", *PACKED)
MODULES = (
    "book/__init__.py",
    "book/live/*.py",
    "course_lib/__init__.py",
    "course_lib/errors.py",
    "course_lib/missing_extra.py",
    *(f"course_lib/config/{name}.py" for name in ("axes", "refusals", "combinations")),
    "course_lib/parallel/__init__.py",
    "course_lib/parallel/pipeline/**/*.py",
    "course_lib/commands/__init__.py",
    "course_lib/commands/plan.py",
    "course_lib/commands/plan_page.py",
    "course_lib/commands/tables.py",
    "course_lib/planning/*.py",
    "course_lib/planning/catalogue/*.json",
    *(f"course_lib/grading/{name}.py" for name in ("__init__", "own_code", "report", "rules", "task")),
    *(
        f"course_lib/grading/tasks/{name}.py"
        for name in ("__init__", "drawing", "kit", "pipeline", "planner", "planning")
    ),
    "course_lib/grading/tasks/exercises.csv",
    "course_lib/modeling/__init__.py",
    "course_lib/modeling/dealing.py",
)
"""What book/live/ needs, and what stands in the same folders; none of it imports torch before it is asked."""
TABLES = "course_lib/planning/catalogue/*.yaml"
"""Go as JSON: the browser's Python has no YAML."""


def modules() -> bytes:
    """A ZIP archive of the modules, with the same bytes for the same sources."""
    content = {path: path.read_bytes() for pattern in MODULES for path in sorted(ROOT.glob(pattern))}
    content[ROOT / "course_lib/config/__init__.py"] = b""  # the fields need a package that the browser's Python has not
    for path in sorted(ROOT.glob(TABLES)):
        table = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        content[path.with_suffix(".json")] = json.dumps(table).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for path, data in content.items():
            packed.writestr(zipfile.ZipInfo(path.relative_to(ROOT).as_posix()), data, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def files(pyodide: Path) -> dict[str, bytes]:
    """The files by their path among the sources.

    Args:
        pyodide: the unpacked package.
    """
    lock = json.loads((pyodide / LOCK).read_text(encoding="utf-8")) | {"packages": {}}  # none is loaded
    python = {name: (pyodide / name).read_bytes() for name in PYTHON} | {LOCK: json.dumps(lock).encode()}
    python |= {f"{name}.gz": gzip.compress(python.pop(name), mtime=0) for name in PACKED}
    live = {"modules.zip": modules()} | {f"pyodide/{name}": data for name, data in python.items()}
    sizes = json.dumps({name: len(data) for name, data in live.items()})
    live["files.js"] = f"live.comes({sizes});\n".encode()
    version = hashlib.sha256(b"".join(python[name] for name in sorted(python))).hexdigest()[:12]
    cache = (LIVE / "live-cache.js").read_text(encoding="utf-8").replace("VERSION", version)
    return {f"_static/live/{name}": data for name, data in live.items()} | {"_extra/live-cache.js": cache.encode()}
