"""A figure's numbers as tables, for readers who cannot see it: read from what has been drawn."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

Table: TypeAlias = dict[str, Any]
MOST_ROWS, MOST_COLUMNS = 32, 12
"""Of a table; of longer lines every n-th point is taken, and the caption says so."""
MOST_SPANS = 16
"""Of one kind in one lane of a time line."""


def tables(figure: Figure) -> list[Table]:
    """The tables of all axes that hold data, each with ``caption``, ``columns`` and ``rows`` of short texts.

    A row is one text with tabs, which a notebook's file has in one line.
    """
    return [table for axes in figure.axes for table in (*_lines(axes), *_bars(axes), *_points(axes), *_images(axes))]


def _caption(axes: Axes, more: str = "") -> str:
    said = [axes.get_title(loc=place) for place in ("left", "center", "right")]  # type: ignore[arg-type]
    title = next((text for text in said if text), "") or axes.get_ylabel() or axes.get_xlabel()
    return ", ".join(filter(None, [" ".join(title.split()), more]))


def _table(axes: Axes, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    step = -(-len(rows) // MOST_ROWS)
    more = f"one row of {step}" if step > 1 else ""
    return {"caption": _caption(axes, more), "columns": [" ".join(name.split()) for name in columns],
            "rows": ["\t".join(map(_short, row)) for row in rows[::step or 1]]}


def _short(value: Any) -> str:
    """A number in four digits; words as they are."""
    return " ".join(value.split()) if isinstance(value, str) else f"{float(value):.4g}"


def _ticks(axes: Axes, axis: str) -> dict[float, str]:
    """Words at places of an axis, where they say anything else than the place's number."""
    place = axes.xaxis if axis == "x" else axes.yaxis
    labels = [label.get_text() for label in place.get_ticklabels()]
    words = dict(zip(map(float, place.get_ticklocs()), labels, strict=False))
    return words if any(text and text.replace("−", "-") not in {f"{at:g}", f"{at:.1f}", f"{at:.2f}"}
                        for at, text in words.items()) else {}


def _named(words: Mapping[float, str], at: float) -> Any:
    return next((text for place, text in words.items() if abs(place - at) < 0.5 and text), at)


def _lines(axes: Axes) -> Iterator[Table]:
    """Lines over the same places are columns of one table; those of two points that mark a place are left out."""
    words, groups = _ticks(axes, "x"), dict[bytes, list[Line2D]]()
    for line in axes.get_lines():
        x = np.asarray(line.get_xdata(), float)
        if len(x) > 2 or (len(x) == 2 and not str(line.get_label()).startswith("_")):
            groups.setdefault(x.tobytes(), []).append(line)
    for lines in groups.values():
        lines = lines[:MOST_COLUMNS]
        names = [str(line.get_label()) for line in lines]
        many = [f"line {at}" for at in range(1, len(lines) + 1)]
        unnamed = many if len(lines) > 1 else [axes.get_ylabel() or "value"]
        columns = [axes.get_xlabel() or "at", *(other if name.startswith("_") else name
                                                for name, other in zip(names, unnamed, strict=True))]
        places = [_named(words, x) for x in np.asarray(lines[0].get_xdata(), float)]
        heights = [np.asarray(line.get_ydata(), float) for line in lines]
        yield _table(axes, columns, list(zip(places, *heights, strict=True)))


def _colour(patch: Patch) -> str:
    return to_hex(patch.get_facecolor() if patch.get_fill() else patch.get_edgecolor())


def _legend(axes: Axes) -> dict[str, str]:
    """What a legend, of the axes or of the figure, says of colours."""
    legends = [legend for legend in (axes.get_legend(), *axes.figure.legends) if legend]
    return {_colour(patch): text.get_text() for legend in legends
            for patch, text in zip(legend.get_patches(), legend.get_texts(), strict=False)}


def _meaning(bar: Rectangle, label: str, legend: Mapping[str, str]) -> str:
    """What a bar is of: its label's words, or the legend's for its colour; hollow ones are predicted."""
    said = legend.get(_colour(bar), "") if label.startswith("_") else label
    return said if bar.get_fill() or "predicted" in said else f"{said} predicted".strip()


def _bars(axes: Axes) -> Iterator[Table]:
    """All bars of some axes as one table: which, from where to where; as broken bars have them too.

    Of a time line's many, one row has all of one kind in one lane.
    """
    rows: list[tuple[Any, ...]] = []
    lies, words, legend = False, {axis: _ticks(axes, axis) for axis in "xy"}, _legend(axes)
    for container in axes.containers:
        if isinstance(container, BarContainer):
            lies = container.orientation == "horizontal"
            name = str(container.get_label())
            for bar in container.patches:
                at, start, size = ((bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) if lies else
                                   (bar.get_x() + bar.get_width() / 2, bar.get_y(), bar.get_height()))
                which = _named(words["y" if lies else "x"], at)
                rows.append((which, _meaning(bar, name, legend), start, start + size))
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and not isinstance(collection, PathCollection):
            paths = collection.get_paths()
            if all(np.shape(path.vertices) == (5, 2) for path in paths):  # broken bars
                lies, boxes = True, [path.get_extents() for path in paths]
                rows += [(_named(words["y"], (box.y0 + box.y1) / 2), "", box.x0, box.x1) for box in boxes]
    if len(rows) > MOST_ROWS:
        spans: dict[tuple[Any, Any], list[str]] = {}
        for which, of, start, end in rows:
            spans.setdefault((which, of), []).append(f"{start:.3g}–{end:.3g}")
        yield _table(axes, ["bar", "of", f"from–to {axes.get_xlabel() if lies else axes.get_ylabel()}".strip()],
                     [(*key, ", ".join(parts[:MOST_SPANS]) + ", …" * (len(parts) > MOST_SPANS))
                      for key, parts in spans.items()])
    elif rows:
        unit = axes.get_xlabel() if lies else axes.get_ylabel()
        columns, keep = ["bar", "of", "from", f"to ({unit})" if unit else "to"], [True] * 4
        keep[1] = any(row[1] for row in rows)
        keep[2] = any(row[2] for row in rows)
        yield _table(axes, [name for name, kept in zip(columns, keep, strict=True) if kept],
                     [[value for value, kept in zip(row, keep, strict=True) if kept] for row in rows])


def _points(axes: Axes) -> Iterator[Table]:
    for collection in axes.collections:
        if isinstance(collection, PathCollection) and len(places := np.asarray(collection.get_offsets())):
            yield _table(axes, [axes.get_xlabel() or "at", axes.get_ylabel() or "value"], places.tolist())


def _images(axes: Axes) -> Iterator[Table]:
    for image in axes.get_images():
        cells: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        if cells.ndim == 2 and cells.shape[1] <= 2 * MOST_COLUMNS:
            columns = [str(_named(_ticks(axes, "x"), at)) for at in range(cells.shape[1])]
            yield _table(axes, [axes.get_ylabel() or "row", *columns],
                         [[_named(_ticks(axes, "y"), at), *row] for at, row in enumerate(cells)])
