"""Writes a report on a set of runs, as Markdown or as one HTML file that needs nothing else."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.tracking.collect import TrackedRun
from course_lib.tracking.summary import folded, summary_table
from course_lib.writing import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _summary(runs: Sequence[TrackedRun]) -> tuple[list[str], list[list[str]]]:
    table = summary_table(runs)
    return table.columns, table.rows


def tables_of(runs: Iterable[TrackedRun]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Tables that the runs kept, such as wrong predictions, by a heading."""
    return {
        f"{run.name}: {name.replace('_', ' ')}": (columns, [[str(cell) for cell in row] for row in rows])
        for run in runs
        for name, (columns, rows) in run.tables.items()
    }


def write_markdown(path: Path, title: str, runs: Sequence[TrackedRun], figures: Mapping[str, "Figure"]) -> None:
    """Write the page, and each figure beside it as ``PAGE-NAME.svg``."""
    parts = [f"# {_plain(title)}", _markdown_table(*_summary(runs))]
    for name, figure in figures.items():
        picture = path.with_name(f"{path.stem}-{name}.svg")
        write_text(picture, _svg(figure))
        parts.append(f"![{name}]({picture.name})")
    for heading, table in tables_of(runs).items():
        parts += [f"## {_plain(heading)}", _markdown_table(*table)]
    write_text(path, "\n\n".join(parts) + "\n")


def html_page(title: str, runs: Sequence[TrackedRun], figures: Mapping[str, "Figure"]) -> str:
    """The page with its figures inside."""
    parts = [f"<h1>{html.escape(title)}</h1>", _html_table(*_summary(runs))]
    for name, figure in figures.items():
        picture = base64.b64encode(_svg(figure).encode()).decode()
        parts.append(f'<p><img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{picture}"></p>')
    for heading, table in tables_of(runs).items():
        parts += [f"<h2>{html.escape(heading)}</h2>", _html_table(*table)]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#222}}
table{{border-collapse:collapse;max-width:100%}} img{{max-width:100%}}
th,td{{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;vertical-align:top;overflow-wrap:anywhere}}
</style></head>
<body>
{body}
</body></html>
"""


def _svg(figure: "Figure") -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_plain(str(cell)) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, with no cell, tag, link or picture of its own."""
    for character in "\\|<>[]*_`":
        text = (
            text.replace(character, "\\" + character)
            if character not in "<>"
            else text.replace(character, html.escape(character))
        )
    return " ".join(text.split())


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{'<wbr>'.join(map(html.escape, folded(column, 1)))}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
