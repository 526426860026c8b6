"""Figures of tensor parallelism: what it sends and holds, what each axis of the grid sends, what their order costs."""

from collections.abc import Collection, Mapping
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.figures import numbers
from course_lib.figures.style import COLOURS, PREDICTED, canvas, label_right, name_rows, stack, upright_grid
from course_lib.parallel.topology import AXES, RankGrid

AXIS_COLOURS = {"dp": COLOURS["gradients"], "pp": COLOURS["activations"], "tp": COLOURS["communication"]}
"""An axis has the colour of what it carries: gradients, activations; partial sums have none of their own."""
CARRIES = {"dp": "dp: gradients", "pp": "pp: hidden states", "tp": "tp: partial sums"}
PARTS = {"compute": COLOURS["forward"], **AXIS_COLOURS, "idle": COLOURS["idle"]}
OUTLINE = {**PREDICTED, "hatch": None, "edgecolor": "black", "linestyle": "--"}
"""A prediction over a solid bar: hatching on a colour is hard to look at."""
KB, MB = 1e3, 1e6
VISIBLE = 0.002
"""Share of the longest bar, about a pixel, from which on a part of one can be seen."""


def sent_and_held(sent: Mapping[str, int], held: Mapping[str, int], predicted: Mapping[str, float]) -> Figure:
    """Bytes that a rank sends in a step, and the most activations that it holds, for several ways to run one model.

    Args:
        sent: bytes, by the name of the way.
        held: bytes, likewise.
        predicted: bytes held, for those ways for which there is a prediction.
    """
    plain, sequence = list(held)[-2:]
    saved = 1 - held[sequence] / held[plain]
    more = sent[sequence] / sent[plain] - 1
    title = f"Sequence parallelism: {more:+.0%} bytes sent, {-saved:.0%} activations held"
    with canvas(title, ncols=2, height=2.9, sharey=True) as (figure, (left, right)):
        for row, name in enumerate(held):
            for axes, value, colour in (
                (left, sent[name] / KB, COLOURS["communication"]),
                (right, held[name] / MB, COLOURS["activations"]),
            ):
                axes.barh(row, value, height=0.55, color=colour, label="measured")
                label_right(axes, value, row, f"{value:.3g}")
            if name in predicted:
                right.barh(row, predicted[name] / MB, height=0.74, **OUTLINE, label="predicted")
        name_rows(left, held, "kB sent by a rank in a step", room=0.18)
        right.set_xlabel("MB of activations at the peak\n(broken line: predicted)")
        upright_grid(right)
        right.margins(x=0.18)
    return figure


def bytes_by_axis(grid: RankGrid, sent: Mapping[str, int], predicted: Mapping[str, float]) -> Figure:
    """The ranks of a grid with their links, as wide as what one rank sends along them, and the same as bars.

    Args:
        grid: the ranks.
        sent: bytes that the first rank sent in a step, by axis.
        predicted: the same by formula.
    """
    most = max(sent, key=lambda axis: sent[axis])
    others = sum(sent.values()) - sent[most]
    title = f"The {most} axis sends {sent[most] / others:.1f} times what the others send together"
    with canvas(title, ncols=2, width=7.4, height=3.5, width_ratios=(3, 2)) as (figure, (left, right)):
        _links(left, grid, sent)
        for row, axis in enumerate(AXES):
            value = sent[axis] / KB
            right.barh(row, value, height=0.5, color=AXIS_COLOURS[axis], label="measured")
            right.barh(row, predicted[axis] / KB, height=0.7, **OUTLINE, label="predicted")
            label_right(right, value, row, f"{value:.0f}", 6)
        name_rows(right, AXES, "kB sent by rank 0 in a step\n(broken line: predicted)", room=0.17, fontweight="bold")
    links = {axis: [f"{a}–{b}" for line in grid.lines(axis) for a, b in pairwise(line)] for axis in AXES}
    numbers.tell(
        figure,
        "Links between ranks",
        ["axis: what it carries", "ranks"],
        [(CARRIES[axis], ", ".join(links[axis])) for axis in AXES],
    )
    return figure


def _links(axes: Axes, grid: RankGrid, sent: Mapping[str, int]) -> None:
    """Copies side by side, stages from left to right in each, tensor-parallel ranks one below the other."""
    step = grid.pp + 0.9
    places = {
        rank: (place.dp * step + place.pp, -1.5 * place.tp)
        for rank in range(grid.world_size)
        for place in [grid.coordinates(rank)]
    }
    width = {axis: 2 + 9 * sent[axis] / max(sent.values()) for axis in AXES}
    for axis in ("dp", "pp", "tp"):
        for line in grid.lines(axis):
            for here, there in pairwise(line):
                (x, y), (to_x, to_y) = places[here], places[there]
                bend = 0.18 if grid.coordinates(here).tp else -0.18
                arc = f"arc3,rad={bend}" if axis == "dp" else "arc3"
                look = {"color": AXIS_COLOURS[axis], "linewidth": width[axis], "shrinkA": 0, "shrinkB": 0}
                link = look | {"arrowstyle": "-", "connectionstyle": arc}
                axes.annotate("", (to_x, to_y), (x, y), arrowprops=link, zorder=1)
    for rank, (x, y) in places.items():
        axes.scatter(x, y, s=330, color="white", edgecolor="black", linewidth=1.2, zorder=3)
        axes.text(x, y, str(rank), ha="center", va="center", zorder=4, fontweight="bold")
    bottom = min(y for _, y in places.values())
    for copy in range(grid.dp):
        axes.text(copy * step + (grid.pp - 1) / 2, bottom - 1.05, f"copy {copy}", ha="center", va="center", fontsize=9)
    for row, (axis, text) in enumerate(CARRIES.items()):
        axes.text(-0.4, 2.1 - 0.42 * row, text, color=AXIS_COLOURS[axis], fontweight="bold", fontsize=9, va="center")
    axes.set(xlim=(-0.5, (grid.dp - 1) * step + grid.pp - 0.5), ylim=(bottom - 1.3, 2.4))
    axes.axis("off")


def orders(steps: Mapping[str, Mapping[str, float]], half: Mapping[str, Mapping[str, float]]) -> Figure:
    """Seconds of a step for each order of the axes as stacked bars, and below them half the GPUs.

    Args:
        steps: seconds by part, by the name of the order.
        half: the same with half the GPUs, in the best order; one row.
    """
    rows = {**dict(sorted(steps.items(), key=lambda item: sum(item[1].values()))), **half}
    totals = [sum(parts.values()) for parts in rows.values()]
    best, *_, worst, with_half = totals
    finding = "slower" if worst > with_half else "quicker"
    title = f"The worst order takes {worst / best:.1f} times as long as the best, and is {finding} than half the GPUs"
    with canvas(title, height=3.9) as (figure, axes):
        for row, parts in enumerate(rows.values()):
            parts = {part: parts[part] for part in PARTS}
            end = stack(axes, row, parts, PARTS, size=0.66, lies=True, edgecolor="white", linewidth=0.5)
            label_right(axes, end, row, f"{end:.1f} s")
        _name_parts(axes, rows.values())
        axes.axhline(len(steps) - 0.5, color="black", linewidth=0.8, linestyle=":")
        name_rows(axes, rows, "computed seconds of a step, nothing hidden behind computation", room=0.13, fontsize=9)
        axes.set_ylim(len(rows) - 0.5, -0.5)
    return figure


def _name_parts(axes: Axes, rows: Collection[Mapping[str, float]]) -> None:
    """A square of its colour and a name above the bars for each part; parts too short to be seen share a line."""
    longest = max(sum(parts.values()) for parts in rows)
    seen = [part for part in PARTS if max(parts[part] for parts in rows) > VISIBLE * longest]
    names, hidden = list(seen), [part for part in PARTS if part not in seen]
    handles = [Patch(facecolor=PARTS[part], edgecolor=COLOURS["neutral"], linewidth=0.5) for part in seen]
    if hidden:
        handles.append(Patch(alpha=0))
        names.append(f"{', '.join(hidden)}: too short to be seen")
    spaces = {"borderaxespad": 0.2, "handlelength": 1.0, "columnspacing": 1.4}
    axes.legend(handles, names, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9, **spaces)
