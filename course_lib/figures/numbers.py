"""A figure's numbers as tables, for readers who cannot see it: read from what has been drawn, or told beside it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedFormatter, FuncFormatter

Table: TypeAlias = dict[str, Any]
MOST_ROWS, MOST_COLUMNS = 32, 12
"""Of a table of lines; of longer ones every n-th point and the last are taken, and the caption says so."""
MOST_SPANS = 16
"""Of one kind in one lane of a time line, or points in one place."""
KEY = re.compile(r"\s*\((?:[^()]*:[^()]*|logarithmic)\)")
"""What a label says of colours, marks and scale, as in "copies (grey: waiting)"."""


def tables(figure: Figure) -> list[Table]:
    """Tables that were told, and those of all axes that hold data.

    Each has ``caption``, ``columns`` and ``rows`` of short texts. A row is one text with tabs, which a notebook's
    file has in one line.
    """
    drawn = [table for axes in figure.axes for table in (*_lines(axes), *_bars(axes), *_points(axes), *_images(axes))]
    return [*getattr(figure, "told", ()), *drawn]


def tell(figure: Figure, caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Give a figure of words or of cells a table that cannot be read from what is drawn."""
    told = {"caption": caption, "columns": list(columns), "rows": ["\t".join(map(_short, row)) for row in rows]}
    figure.told = [*getattr(figure, "told", ()), told]  # type: ignore[attr-defined]


def _title(axes: Axes) -> str:
    said = [axes.get_title(loc=place) for place in ("left", "center", "right")]  # type: ignore[arg-type]
    return " ".join(next((text for text in said if text), "").split())


def _table(
    axes: Axes, columns: Sequence[str], rows: Sequence[Sequence[Any]], most: int = MOST_ROWS, caption: str = ""
) -> Table:
    step = -(-len(rows) // most) or 1
    kept = [row for at, row in enumerate(rows) if at % step == 0 or at == len(rows) - 1]
    thinned = f"one of every {step} rows, and the last" if step > 1 else ""
    caption = caption or _title(axes) or _unit(axes, "y") or _unit(axes, "x")
    return {
        "caption": ", ".join(filter(None, [caption, thinned])),
        "columns": [" ".join(_plain(name).split()) for name in columns],
        "rows": ["\t".join(map(_short, row)) for row in kept],
    }


def _short(value: Any) -> str:
    """A number in four digits; words as they are."""
    return " ".join(_plain(value).split()) if isinstance(value, str) else _digits(float(value), 4)


def _digits(value: float, digits: int) -> str:
    rounded = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in rounded and abs(value) < 1e8 else rounded


class _Words(NamedTuple):
    """Words of an axis at its places in place of numbers; on a linear one, what is near a place is of it."""

    names: dict[float, str]
    reach: float
    numbered: bool = True

    @property
    def rows(self) -> bool:
        """Whether the places are rows or columns of named things."""
        return bool(self.names) and self.reach > 0

    def at(self, at: float) -> Any:
        """The name of the place, or the number itself; nothing on an axis without ticks."""
        return next(
            (
                text
                for place, text in self.names.items()
                if text and (np.isclose(place, at, rtol=1e-6, atol=0) or abs(place - at) < self.reach)
            ),
            at if self.numbered else "",
        )


def _words(axes: Axes, which: str) -> _Words:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if not isinstance(axis.get_major_formatter(), FixedFormatter | FuncFormatter):
        return _Words({}, 0, len(axis.get_ticklocs()) > 0)
    # The formatter has the words of panels that share this axis too, whose own are not drawn.
    places = [float(at) for at in axis.get_ticklocs()]
    names = dict(zip(places, map(_plain, axis.get_major_formatter().format_ticks(places)), strict=True))
    return _Words(names, 0.5 if axis.get_scale() == "linear" else 0)


def _plain(text: str) -> str:
    """Text without the marks of its mathematics."""
    return re.sub(r"\\mathdefault|[${}]", "", text) if "$" in text else text


def _unit(axes: Axes, which: str) -> str:
    """The label of an axis, which panels that share it often write only once, without its key to what is drawn."""
    sharing = getattr(axes, f"get_shared_{which}_axes")().get_siblings(axes)
    labels = [getattr(panel, f"get_{which}label")() for panel in (axes, *sharing)]
    labels.append(getattr(axes.get_figure(root=True), f"get_sup{which}label")())
    return " ".join(KEY.sub("", next(filter(None, labels), "")).split())


def _said(label: object) -> str:
    """A label, unless matplotlib gave it."""
    return "" if str(label).startswith("_") else str(label)


def _lines(axes: Axes) -> Iterator[Table]:
    """Lines over the same places, or some of them, are columns of one table; those in one place are rows of another.

    Lines without a label guide the eye, and are left out.
    """
    words = {axis: _words(axes, axis) for axis in "xy"}
    curves, marks = list[list[Line2D]](), dict[tuple[str, str], list[tuple[Any, str, str]]]()
    for line in axes.get_lines():
        if not (name := _said(line.get_label())) or not len(np.asarray(line.get_xdata())):
            continue
        if mark := _mark(axes, line, words):
            (where, unit), place, values = mark
            marks.setdefault((where or "at", unit or "value"), []).append((place, name, values))
        elif beside := next((lines for lines in curves if _within(line, lines[0])), None):
            beside.append(line)
        else:
            curves.append([line])
    yield from (_curves(axes, lines[:MOST_COLUMNS], words) for lines in curves)
    for (where, unit), rows in marks.items():
        yield _without_empty(axes, [where, "of", unit], rows)


def _mark(axes: Axes, line: Line2D, words: Mapping[str, _Words]) -> tuple[tuple[str, str], Any, str] | None:
    """Of a line in one place, which is a row, a column or from edge to edge: the units of place and values, and these.

    Returns:
        None for a curve.
    """
    units = _unit(axes, "x"), _unit(axes, "y")
    x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
    if line.get_transform() is not axes.transData:  # from edge to edge
        return (
            (("", units[1]), "everywhere", _short(y[0]))
            if np.ptp(y) == 0
            else (("", units[0]), "everywhere", _short(x[0]))
        )
    if words["y"].rows and np.ptp(y) < 1:
        return units[::-1], words["y"].at(float(y.mean())), _joined(map(words["x"].at, _once(x)))
    if np.ptp(x) < 1 if words["x"].rows else np.ptp(x) == 0:
        return units, words["x"].at(float(x.mean())), _joined(_once(y))
    lone = np.ptp(y) == 0 and line.get_linestyle() == "None"
    return (("", units[0]), "", _joined(_once(x))) if lone else None


def _places(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata(), float).tolist()


def _within(line: Line2D, other: Line2D) -> bool:
    """Whether a line is over the same places as another, or over some of them."""
    own, others = _places(line), _places(other)
    distinct = all(len(set(places)) == len(places) for places in (own, others))
    return own == others or (distinct and set(own) <= set(others))


def _curves(axes: Axes, lines: Sequence[Line2D], words: Mapping[str, _Words]) -> Table:
    columns = [_unit(axes, "x") or "at", *(str(line.get_label()) for line in lines)]
    places, heights = _places(lines[0]), list[list[Any]]()
    for line in lines:
        column = [words["y"].at(y) for y in np.asarray(line.get_ydata(), float)]
        at = dict(zip(_places(line), column, strict=True))
        heights.append(column if len(column) == len(places) else [at.get(x, "") for x in places])
    caption = ": ".join(filter(None, dict.fromkeys([_title(axes), _unit(axes, "y")])))
    return _table(
        axes, columns, list(zip((words["x"].at(x) or x for x in places), *heights, strict=True)), caption=caption
    )


def _once(values: np.ndarray) -> Sequence[float]:
    return values[:1].tolist() if np.ptp(values) == 0 else values.tolist()


def _joined(values: Iterable[Any]) -> str:
    texts = list(map(_short, values))
    return ", ".join(texts[:MOST_SPANS]) + f", … ({len(texts)} in all)" * (len(texts) > MOST_SPANS)


def _without_empty(axes: Axes, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table without the columns that say nothing: no word and no number but 0."""
    keep = [any(row[at] for row in rows) or at == len(columns) - 1 for at in range(len(columns))]
    return _table(
        axes,
        [name for name, kept in zip(columns, keep, strict=True) if kept],
        [[value for value, kept in zip(row, keep, strict=True) if kept] for row in rows],
        most=len(rows),
    )


def _colour(patch: Patch) -> str:
    return to_hex(patch.get_facecolor() if patch.get_fill() else patch.get_edgecolor())


def _legend(axes: Axes) -> dict[str, str]:
    """What a legend, of the axes or of the figure, says of colours."""
    legends = [legend for legend in (axes.get_legend(), *axes.figure.legends) if legend]
    return {
        _colour(patch): text.get_text()
        for legend in legends
        for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=False)
    }


def _meaning(bar: Rectangle, label: str, legend: Mapping[str, str]) -> str:
    """What a bar is of: its label's words, or the legend's for its colour; hollow ones are predicted."""
    said = _said(label) or legend.get(_colour(bar), "")
    return said if bar.get_fill() or "predicted" in said else f"{said} predicted".strip()


def _bars(axes: Axes) -> Iterator[Table]:
    """All bars of some axes as one table: which, of what, from where to where.

    Of a time line's many, one row has all of one kind in one lane. A label's ``#n`` is what a span carries,
    as the number of its micro-batch.
    """
    lies, words, legend = False, {axis: _words(axes, axis) for axis in "xy"}, _legend(axes)
    rows = list[tuple[Any, str, float, float]]()
    for container in axes.containers:
        if isinstance(container, BarContainer):
            lies = container.orientation == "horizontal"
            rows += [
                _bar(bar, lies, words, _meaning(bar, str(container.get_label()), legend)) for bar in container.patches
            ]
    lone = [patch for patch in axes.patches if isinstance(patch, Rectangle) and _said(patch.get_label())]
    rows += [_bar(block, True, words, str(block.get_label())) for block in lone]
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and not isinstance(collection, PathCollection):
            paths = collection.get_paths()
            if all(np.shape(path.vertices) == (5, 2) for path in paths):  # broken bars
                boxes, of = [path.get_extents() for path in paths], _said(collection.get_label())
                rows += [(words["y"].at((box.y0 + box.y1) / 2), of, box.x0, box.x1) for box in boxes]
                lies = True
    lies = lies or bool(lone)
    which, unit = _unit(axes, "y" if lies else "x") or "bar", _unit(axes, "x" if lies else "y")
    if len(rows) > MOST_ROWS and len(lanes := _by_lane(rows)) < len(rows):
        yield _without_empty(axes, [which, "of", f"from–to {unit}".strip()], lanes)
    elif rows:
        end = f"to ({unit})" if any(start for _, _, start, _ in rows) else unit
        yield _without_empty(axes, [which, "of", "from", end if unit else "to"], rows)


def _bar(bar: Rectangle, lies: bool, words: Mapping[str, _Words], of: str) -> tuple[Any, str, float, float]:
    middle, start, size = (
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width())
        if lies
        else (bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height())
    )
    return words["y" if lies else "x"].at(middle), of, start, start + size


def _by_lane(rows: Iterable[tuple[Any, str, float, float]]) -> list[tuple[Any, str, str]]:
    spans = dict[tuple[Any, str], list[str]]()
    for which, of, start, end in rows:
        kind, _, number = of.partition(" #")
        span = f"{_digits(start, 3)}–{_digits(end, 3)}"
        spans.setdefault((which, kind), []).append(f"{number}: {span}" if number else span)
    return [(*key, ", ".join(parts[:MOST_SPANS]) + ", …" * (len(parts) > MOST_SPANS)) for key, parts in spans.items()]


def _points(axes: Axes) -> Iterator[Table]:
    """Points of all collections, but of a drawing without axes."""
    words = {axis: _words(axes, axis) for axis in "xy"}
    rows = [
        (_said(collection.get_label()), words["x"].at(x), words["y"].at(y))
        for collection in axes.collections
        if isinstance(collection, PathCollection) and axes.axison
        for x, y in np.asarray(collection.get_offsets()).tolist()
    ]
    if rows:
        yield _without_empty(axes, ["of", _unit(axes, "x") or "at", _unit(axes, "y") or "value"], rows)


def _images(axes: Axes) -> Iterator[Table]:
    for image in axes.get_images():
        cells: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        if cells.ndim == 2 and cells.shape[1] <= 2 * MOST_COLUMNS:
            columns = [str(_words(axes, "x").at(at)) for at in range(cells.shape[1])]
            written = {
                (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text() for text in axes.texts
            }
            rows = [
                [_words(axes, "y").at(at), *(written.get((at, place), cell) for place, cell in enumerate(row))]
                for at, row in enumerate(cells)
            ]
            both = _unit(axes, "y"), _unit(axes, "x")
            caption = _title(axes) or (f"{both[0]} (rows) by {both[1]} (columns)" if all(both) else "")
            yield _table(axes, [both[0] or "row", *columns], rows, caption=caption)
