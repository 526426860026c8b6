"""Cells of a lesson as a page shows them: without calls that only print, imports, and colours for one background."""

import ast
import html
import re

import nbformat
from pygments.lexers import PythonLexer

from book.hanging_lines import highlighted

SHOWING = {"record", "measure", "takeaway", "display", "check", "predict"}
"""Functions that put on the page what earlier cells have found."""
DRAWING = {"figures", "drawings", "drawn", "diagrams"}
"""Names under which lessons import what draws."""
COUNTING = {
    "abs",
    "all",
    "any",
    "dict",
    "enumerate",
    "float",
    "int",
    "len",
    "list",
    "max",
    "min",
    "range",
    "round",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
    "zip",
}
METHODS = {"items", "values", "keys", "map", "format", "round"}
"""Calls that find nothing out: arithmetic on what is there."""
SHOWN_IN = {"pd.DataFrame", "pd.Series"}
MOSTLY = 0.75
"""Share of a cell's statements that are imports, from which on it is folded."""
BOX = re.compile(r"<div style='border-left:6px (?P<edge>\w+) (?P<colour>#\w{6});[^']*'>")
BOXES = {
    "#8f6b00": "predicted",
    "#1f5f99": "measured",
    "#7a3e9d": "computed",
    "#00705c": "simulated",
    "#6b6b6b": "published",
    "#2e7d4f": "takeaway",
}
"""Kinds of the lessons' boxes by their colour (course_lib/lessons/boxes.py)."""
LISTING = re.compile(r"<pre (?:tabindex='0' )?style=\"font-family:ui-monospace.*?</pre>", re.DOTALL)
FOLD = {"imports": ("Imports", "Hide the imports"), "shows": ("Code of this output", "Hide the code")}


def parts(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """A code cell as the page has it: what is read, and folded to its result what only puts it on the page.

    Imports are folded, at a cell's beginning too; listings are one part, and what is folded already. The outputs
    stand below the last.
    """
    if "hide-input" in cell.metadata.get("tags", []):
        return [cell]
    try:
        statements = ast.parse(cell.source).body
    except SyntaxError:  # a magic of Jupyter
        return [cell]
    imported = [isinstance(statement, (ast.Import, ast.ImportFrom)) for statement in statements]
    if sum(imported) > 2 and sum(imported) >= MOSTLY * len(statements):
        return [_folded(cell, "imports")]
    leading = imported.index(False) if False in imported else 0
    if leading > 2:
        imports, rest = _split(cell, statements[leading], "imports")
        return [_folded(imports, "imports"), *parts(rest)]
    if len(statements) == 1 and _called(statements[0]) == "source":
        return [_tagged(cell, "remove-input")]
    called = map(_called, statements)
    shows = [name in SHOWING or name.partition(".")[0] in DRAWING for name in called]
    plain = [one or _is_arithmetic(statement) for one, statement in zip(shows, statements, strict=True)]
    if not any(shows) or not cell.outputs:
        return [cell]
    if all(plain):
        return [_folded(cell, "shows")]
    tail = next((at for at, one in enumerate(shows) if one and all(plain[at:])), None)
    if tail is None:
        return [cell]
    read, shown = _split(cell, statements[tail], "read")
    return [read, _folded(shown, "shows")]


def _split(cell: nbformat.NotebookNode, at: ast.stmt, name: str) -> list[nbformat.NotebookNode]:
    """A cell in two, the second from a statement on, with the outputs; the first takes the name into its id."""
    lines = cell.source.splitlines()
    first = min(node.lineno for node in (at, *getattr(at, "decorator_list", ()))) - 1
    before = nbformat.v4.new_code_cell("\n".join(lines[:first]).rstrip(), id=f"{cell.id}-{name}")
    cell.source = "\n".join(lines[first:])
    return [before, cell]


def _called(statement: ast.stmt) -> str:
    """Dotted name of the function that a statement calls; empty where it is no call alone."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _is_arithmetic(statement: ast.stmt) -> bool:
    """Whether a statement only counts on, or shows as a table, what names hold."""
    if not isinstance(statement, (ast.Assign, ast.Expr)):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, ast.Expr) and not calls:
        return False
    return all(
        ast.unparse(call.func) in COUNTING | SHOWN_IN
        or (isinstance(call.func, ast.Attribute) and call.func.attr in METHODS)
        for call in calls
    )


def _folded(cell: nbformat.NotebookNode, why: str) -> nbformat.NotebookNode:
    show, hide = FOLD[why]
    cell.metadata["mystnb"] = {"code_prompt_show": show, "code_prompt_hide": hide}
    return _tagged(cell, "hide-input")


def _tagged(cell: nbformat.NotebookNode, tag: str) -> nbformat.NotebookNode:
    cell.metadata["tags"] = [*cell.metadata.get("tags", []), tag]
    return cell


def in_the_pages_colours(text: str) -> str:
    """An output's HTML with its boxes and listings in the page's colours, rather than in their own."""

    def listing(match: re.Match[str]) -> str:
        code = html.unescape(re.sub(r"<[^>]*>", "", match[0]))
        return highlighted(code, PythonLexer()).replace("class='highlight'", "class='highlight listing'", 1)

    text = BOX.sub(lambda m: f"<div class='box box-{BOXES.get(m['colour'], 'kept')}'>", text)
    text = text.replace(' border="1" class="dataframe"', ' class="dataframe"')
    return LISTING.sub(listing, text)


def numbers(output: nbformat.NotebookNode) -> str:
    """HTML of a figure's numbers as tables, folded; empty where the figure has none.

    Args:
        output: whose picture's metadata may have ``numbers``: tables with ``caption``, ``columns`` and ``rows``
            (course_lib/figures/numbers.py).
    """
    tables = [
        table
        for about in output.get("metadata", {}).values()
        if isinstance(about, dict)
        for table in about.get("numbers", [])
    ]
    shown = "".join(
        f"<table><caption>{html.escape(table['caption'])}</caption><thead>{_row('th', table['columns'])}"
        f"</thead><tbody>{''.join(map(_cells, table['rows']))}</tbody></table>"
        for table in tables
    )
    return f"<details class='numbers'><summary>The figure's numbers</summary>{shown}</details>" if shown else ""


def _cells(row: str) -> str:
    return _row("td", row.split("\t"))


def _row(tag: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"


def with_side_notes(source: str, more: str) -> str:
    """A lesson's first cell with its time, its needs and one more paragraph in the margin, beside the title."""
    said = re.findall(r"^\*\*(?:Time|You need)\*\*.*?(?=\n\n|\Z)", source, flags=re.MULTILINE | re.DOTALL)
    for paragraph in said:
        source = source.replace(paragraph, "").replace("\n\n\n\n", "\n\n")
    title, _, rest = source.partition("\n")
    note = "\n\n".join([*said, more])
    return f"{title}\n\n```{{margin}}\n{note}\n```\n{rest}"
