"""Figures of tracked runs: curves by step, and final values side by side."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas

SMALLER_IS_BETTER = ("loss", "perplexity", "seconds", "mib")


def compare_curves(metrics: pd.DataFrame, names: Sequence[str]) -> Figure:
    """A panel for each metric, a curve for each run.

    Args:
        metrics: as ``tracking.collect.metrics_frame`` gives it.
        names: metrics, for example ``train/loss`` and ``eval/accuracy``.
    """
    chosen = metrics[metrics["metric"].isin(names)]
    runs = list(dict.fromkeys(zip(chosen["run"], chosen["name"], strict=True)))
    count = f"{len(runs)} run" + "s" * (len(runs) != 1)
    with canvas(
        f"{count} by optimizer step", width=3.6 * len(names) + 1.2, height=3.2, ncols=len(names), squeeze=False
    ) as (figure, axes):
        for panel, metric in zip(axes[0], names, strict=True):
            for number, (run, name) in enumerate(runs):
                curve = chosen[(chosen["run"] == run) & (chosen["metric"] == metric)].sort_values("step", kind="stable")
                # One point of a curve is no line, so each is marked.
                look = {"color": SERIES[number % len(SERIES)], "linestyle": ("-", "--", ":")[number // len(SERIES) % 3]}
                points = {"marker": "o", "markersize": 3, "linewidth": 1.6}
                panel.plot(curve["step"], curve["value"], label=name, **points, **look)
            panel.set(xlabel="optimizer step", ylabel=metric)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
    return figure


def compare_results(runs: pd.DataFrame, metric: str) -> Figure:
    """The last value of one metric in each run, the best run, or those that share its value, on top and marked.

    Args:
        runs: as ``tracking.collect.runs_frame`` gives it; runs without the metric are left out.
        metric: one of its columns, for example ``test/accuracy``.
    """
    smaller = metric.rpartition("/")[2].endswith(SMALLER_IS_BETTER)
    known = runs.dropna(subset=[metric]).sort_values(metric, ascending=not smaller, kind="stable")
    best = known.iloc[-1]
    equal = int((known[metric] == best[metric]).sum())
    places = range(len(known))
    finding = f"{best['name']} has the best {metric}" if equal == 1 else f"{equal} runs share the best {metric}"
    with canvas(f"{finding}: {best[metric]:.4g}", height=1.1 + 0.32 * len(known)) as (figure, axes):
        axes.hlines(places, known[metric].min(), known[metric], color=COLOURS["idle"])
        colours = [COLOURS["neutral"]] * (len(known) - equal) + [COLOURS["right"]] * equal
        axes.scatter(known[metric], places, zorder=3, color=colours)
        axes.set_yticks(places, known["name"])
        axes.set(xlabel=metric)
        axes.grid(axis="x")
        axes.margins(y=0.15)
    return figure
