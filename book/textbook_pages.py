"""The API of the textbook, course_lib/parallel: a page for each module, made by autodoc from its docstrings."""

import ast
from pathlib import Path

from book.command_pages import escaped

ROOT = Path(__file__).resolve().parents[1]
TEXTBOOK = ROOT / "course_lib" / "parallel"
PARTS = {
    ".": "Data parallel, sharding, tensor, context and experts",
    "minimal": "Each algorithm at its shortest",
    "pipeline": "Pipelines",
    "pipeline/fitted": "Schedules fitted to costs",
    "torch_engines": "The same by torch's engines",
}


HEAD = """# The textbook's API

What [`course_lib/parallel`](source:course_lib/parallel/__init__.py) offers: an `nn.Module` and process groups go in. No
trainer and no configuration is needed, and no package but torch.
"""


def modules() -> dict[str, list[Path]]:
    """The modules of each part, by its folder below the textbook."""
    return {
        folder: sorted(path for path in (TEXTBOOK / folder).glob("*.py") if path.name != "__init__.py")
        for folder in PARTS
    }


def files() -> list[str]:
    """Paths of the modules and of what says what they are for, relative to the repository's root."""
    listed = [TEXTBOOK / "__init__.py", *(path for paths in modules().values() for path in paths)]
    return [str(path.relative_to(ROOT)) for path in listed]


def pages() -> dict[str, str]:
    """The pages by their path: an overview with each module's first line, and one for each module."""
    found = modules()
    lines, made = [HEAD], {}
    for folder, paths in found.items():
        lines += [f"## {PARTS[folder]}\n", "| module | what it is |\n|---|---|"]
        for path in paths:
            name = dotted(path)
            first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
            short, file = name.removeprefix("course_lib.parallel."), path.relative_to(ROOT)
            lines.append(f"| [`{short}`]({name}.md) | {escaped(first)} |")
            made[f"textbook/{name}.md"] = (
                f"# {short}\n\n[{file}](source:{file})\n\n```{{eval-rst}}\n"
                f".. automodule:: {name}\n   :members:\n   :member-order: bysource\n```\n"
            )
        lines += ["\n```{toctree}\n:hidden:\n", *(dotted(path) for path in paths), "```\n"]
    return {"textbook/index.md": "\n".join(lines), **made}


def dotted(path: Path) -> str:
    """A module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)
