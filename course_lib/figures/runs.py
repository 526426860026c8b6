"""Figures of tracked runs: curves by step, and final values side by side."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, end_label, label_beside

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
                panel.plot(
                    curve["step"],
                    curve["value"],
                    marker="o",
                    markersize=3,
                    linewidth=1.6,
                    label=name,
                    color=SERIES[number % len(SERIES)],
                    linestyle=("-", "--", ":")[number // len(SERIES) % 3],
                )
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
        axes.scatter(
            known[metric],
            places,
            zorder=3,
            color=[COLOURS["neutral"]] * (len(known) - equal) + [COLOURS["right"]] * equal,
        )
        axes.set_yticks(places, known["name"])
        axes.set(xlabel=metric)
        axes.grid(axis="x")
        axes.margins(y=0.15)
    return figure


def compare_groups(metrics: pd.DataFrame, name: str, groups: Mapping[str, str]) -> Figure:
    """A thin curve for each run, and a thick one for the mean of each group, named at its end.

    Args:
        metrics: as ``tracking.collect.metrics_frame`` gives it.
        name: metric, for example ``train/loss``.
        groups: group by run id; runs of other ids are left out.
    """
    chosen = metrics[(metrics["metric"] == name) & metrics["run"].isin(groups)]
    curves = chosen.pivot(index="step", columns="run", values="value")
    names = list(dict.fromkeys(groups.values()))
    means = {group: curves[[run for run in curves if groups[run] == group]].mean(axis=1) for group in names}
    ends = curves.iloc[-1]
    last = {group: mean.iloc[-1] for group, mean in means.items()}
    within = max(float(np.ptp(ends[[run for run in curves if groups[run] == group]])) for group in names)
    title = f"Groups end {max(last.values()) - min(last.values()):.2g} apart, runs of one group up to {within:.2g}"
    colours = {group: SERIES[number % len(SERIES)] for number, group in enumerate(names)}
    with canvas(title, width=6.6, height=3.2) as (figure, axes):
        for run in curves:
            axes.plot(curves.index, curves[run], color=colours[groups[run]], linewidth=0.9, alpha=0.6, label=run)
        for group, mean in means.items():
            axes.plot(mean.index, mean, color=colours[group], label=f"mean of {group}")
        axes.set(xlabel="optimizer step", ylabel=name)
        room = 0.07 * float(np.ptp(axes.get_ylim()))  # between two names
        height = -float("inf")
        for group in sorted(names, key=last.__getitem__):
            height = max(last[group], height + room)
            end_label(axes, curves.index[-1], height, group, colours[group])
    return figure


def compare_seeds(losses: pd.DataFrame, constant: float, name: str) -> Figure:
    """The final loss of every run: a column of points for each setting, their mean, and the loss of a constant.

    Args:
        losses: in nats; a row for each seed, a column for each setting.
        constant: loss of a constant, in nats.
        name: of what the settings set.
    """
    means, spread = losses.mean(), losses.std()
    better = losses.max().max() < constant
    title = (
        f"Settings are {np.ptp(means):.2g} nats apart; seeds spread by {spread.min():.2g} to {spread.max():.2g}, "
        f"and {'all runs beat' if better else 'not all beat'} a constant"
    )
    with canvas(title, width=6.6, height=3.2) as (figure, axes):
        axes.axhline(constant, color=COLOURS["wrong"], linestyle="--", linewidth=1.4, label="a constant")
        for place, (setting, colour) in enumerate(zip(losses, SERIES, strict=False)):
            axes.plot(
                [place] * len(losses), losses[setting], "o", color=colour, alpha=0.7, markersize=7, label="every seed"
            )
            axes.plot([place - 0.18, place + 0.18], [means[setting]] * 2, color=colour, label="mean")
            label_beside(axes, (place + 0.18, means[setting]), (5, 0), f"mean {means[setting]:.3f}", va="center")
        end_label(axes, len(means) - 0.4, constant, "a constant", COLOURS["wrong"])
        axes.set_xticks(range(len(means)), [f"{name} {setting:g}" for setting in losses])
        axes.set(xlim=(-0.5, len(means) - 0.4), ylabel="test loss (nats)")
    return figure


def confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """A confusion matrix, ``counts[actual][predicted]``, shaded by the share of its row."""
    matrix = np.array(counts)
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(min=1)
    worst = int(np.diag(shares).argmin())
    title = f"Of {matrix[worst].sum()} texts that are {labels[worst]}, {matrix[worst, worst]} are recognised"
    with canvas(title, width=4.8, height=3.4) as (figure, axes):
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), count in np.ndenumerate(matrix):
            axes.text(
                column,
                row,
                str(count),
                ha="center",
                va="center",
                color="white" if shares[row, column] > 0.5 else "black",
            )
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel="predicted", ylabel="actual")
        axes.grid(visible=False)
    return figure
