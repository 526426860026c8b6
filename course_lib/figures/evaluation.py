"""Figure of a metric computed in several ways, against the number of ranks: the right one is a flat line."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, end_label


def metric_by_ranks(ranks: Sequence[int], right: float, wrong: Mapping[str, Sequence[float]], metric: str) -> Figure:
    """One line per way of computing a metric.

    Args:
        ranks: numbers of ranks, ascending.
        right: the metric over all rows, once each.
        wrong: for each wrong way, its value at each number of ranks.
        metric: its name.
    """
    values = [value for series in wrong.values() for n, value in zip(ranks, series, strict=True) if n > 1]
    furthest = max(values, key=lambda value: abs(value - right))
    better = sum(value > right for value in values)
    title = (f"The same model: {metric} off by up to {abs(furthest - right):.3f}, "
             f"and {better} of {len(values)} wrong values look better")
    with canvas(title, width=7.6, height=3.6) as (figure, axes):
        axes.axhline(right, color=COLOURS["right"], linewidth=3)
        low, high = min([*values, right]), max([*values, right])
        room = (high - low or 0.01) * 0.09
        coloured = list(zip(wrong.items(), SERIES[1:], strict=False))
        ends = sorted([(right, "right, at any number", COLOURS["right"])]
                      + [(series[-1], name, colour) for (name, series), colour in coloured])
        shown = -1.0
        for value, name, colour in ends:
            shown = max(value, shown + room)  # labels of lines that end close together step aside
            end_label(axes, ranks[-1] + 0.1, shown, name, colour)  # where the axes end
        for (_, series), colour in coloured:
            axes.plot(ranks, series, "o--", color=colour)
        axes.set(xlabel="ranks", ylabel=metric, xticks=list(ranks))
        axes.set_xlim(ranks[0] - 0.2, ranks[-1] + 0.1)
        return figure
