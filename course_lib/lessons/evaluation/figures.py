"""Figure of metrics put together in several ways, against the number of ranks: the right ones are flat lines."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, end_label, spread_out


def metric_by_ranks(
    ranks: Sequence[int],
    right: Mapping[str, tuple[float, float]],
    wrong: Mapping[str, Sequence[float]],
    metric: str,
    title: str,
) -> Figure:
    """One line per way of computing a metric, on an axis that begins at 0.

    Args:
        ranks: numbers of ranks, ascending.
        right: by name, the metric over all rows and its standard error, drawn as a band to both sides.
        wrong: by name, the value at each number of ranks.
        metric: its name.
        title: what the figure finds.
    """
    flat = list(zip(right.items(), (COLOURS["right"], COLOURS["neutral"]), strict=False))
    broken = list(zip(wrong.items(), SERIES[1:], strict=False))
    ends = sorted(
        [(value, name, colour) for (name, (value, _)), colour in flat]
        + [(values[-1], name, colour) for (name, values), colour in broken]
    )
    room = 0.075 * max(value for values in wrong.values() for value in values)
    with canvas(title, width=7.6, height=3.6) as (figure, axes):
        for (name, (value, error)), colour in flat:
            axes.axhspan(value - error, value + error, color=colour, alpha=0.25, linewidth=0)
            axes.axhline(value, color=colour, linewidth=3, label=f"{name} (standard error {error:.2g})")
        for (name, values), colour in broken:
            axes.plot(ranks, values, "o-", color=colour, label=name)
        shown = spread_out([value for value, *_ in ends], room)  # labels of lines that end close together step aside
        for height, (_, name, colour) in zip(shown, ends, strict=True):
            end_label(axes, ranks[-1] + 0.1, height, name, colour)  # where the axes end
        axes.set(xlabel="ranks\n(band: one standard error to each side)", ylabel=metric, xticks=list(ranks))
        axes.set_xlim(ranks[0] - 0.2, ranks[-1] + 0.1)
        axes.set_ylim(0, 1.12 * max(value for value, *_ in ends))
        return figure
