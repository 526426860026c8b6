"""Figures of lesson 00: what this machine can run, how soon its processes start, and what several of them bring."""

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures import numbers
from course_lib.figures.style import COLOURS, canvas, hollow, label_above

STATES: dict[str, dict[str, Any]] = {
    "ok": {"color": COLOURS["right"], "marker": "o"},
    "slow": {"color": COLOURS["gradients"], "marker": "D"},
    "cannot": {"color": COLOURS["wrong"], "marker": "X"},
}
"""How a check's state is drawn, from the best to the worst."""

COLUMNS = 4
"""Of the checks that found nothing to mention."""
TEXT_WIDTH = 74
"""Characters in a line of what was found and what to do."""
LINE_HEIGHT = 0.16
"""Inches."""


def capabilities(findings: Mapping[str, tuple[str, str, str]]) -> Figure:
    """Checks of this machine by state, and beside those that are not `ok` what to do.

    Args:
        findings: state (`ok`, `slow` or `cannot`), detail and advice, by the name of the check.
    """
    names = {state: [name for name, finding in findings.items() if finding[0] == state] for state in STATES}
    counts = ", ".join(
        f"{len(names[state])} {word}" for state, word in zip(STATES, ("run well", "slowly", "not at all"), strict=True)
    )
    remarks = {name: _remark(detail, advice) for name, (state, detail, advice) in findings.items() if state != "ok"}
    grid_rows = -(-len(names["ok"]) // COLUMNS)
    total = 1.7 * grid_rows + sum(remark.count("\n") + 1.9 for remark in remarks.values())
    with canvas(f"Of {len(findings)} things on this machine: {counts}", height=0.55 + LINE_HEIGHT * total) as (
        figure,
        axes,
    ):
        axes.set(xlim=(0, 7), ylim=(total, 0))
        axes.axis("off")
        for i, name in enumerate(names["ok"]):
            _item(axes, 0.8 + 1.55 * (i % COLUMNS), 1.7 * (i // COLUMNS) + 0.85, name, "ok")
        axes.text(0, 0.85, "ok", va="center", fontsize=9, fontweight="bold", color=STATES["ok"]["color"])
        top = 1.7 * grid_rows
        for state in ("slow", "cannot"):
            for name in names[state]:
                height = remarks[name].count("\n") + 1.9
                axes.axhline(top, color="#e3e3e3", linewidth=0.8)
                look = {"fontsize": 9, "fontweight": "bold", "color": STATES[state]["color"]}
                axes.text(0, top + height / 2, state, va="center", **look)
                _item(axes, 0.8, top + height / 2, name, state)
                axes.text(2.35, top + height / 2, remarks[name], va="center", fontsize=7.5, linespacing=1.25)
                top += height
    numbers.tell(
        figure,
        "What this machine can run",
        ["check", "state", "found", "what to do"],
        [(name, *finding) for name, finding in findings.items()],
    )
    return figure


def _item(axes: Axes, x: float, y: float, name: str, state: str) -> None:
    """A check's mark and name."""
    axes.plot(x, y, markersize=7, clip_on=False, **STATES[state])
    axes.text(x + 0.13, y, name, va="center", fontsize=8.5)


def _remark(detail: str, advice: str) -> str:
    """What was found, and on lines of its own what to do about it."""
    return "\n".join(textwrap.fill(part, TEXT_WIDTH) for part in (detail, f"→ {advice}" * bool(advice)) if part)


def start_times(predicted: Mapping[int, float], measured: Mapping[int, Sequence[float]]) -> Figure:
    """Seconds until a number of processes have run an empty function, beside those of as many new interpreters.

    Args:
        predicted: seconds that new interpreters would take, by number of processes.
        measured: seconds of each repeat, by number of processes.
    """
    most = max(measured)
    title = (
        f"{most} process{'es' * (most > 1)} start in {median(measured[most]):.2f} s; fresh interpreters would "
        f"take {predicted[most]:.1f} s"
    )
    with canvas(title, height=2.9) as (figure, axes):
        for place, (count, seconds) in enumerate(measured.items()):
            _pair(axes, place, predicted[count], seconds, COLOURS["communication"], "{:.2f} s")
        axes.set_xticks(range(len(measured)), [f"{count} process{'es' * (count > 1)}" for count in measured])
        axes.set(ylabel="seconds")
    return figure


def throughput(predicted: float, measured: Mapping[str, Sequence[float]]) -> Figure:
    """Samples per second of several settings that took turns, the last one beside its prediction.

    Args:
        predicted: samples/s of the last setting.
        measured: samples/s of each turn, by setting; the median of the last is compared with that of the first.
    """
    names = {setting: setting.split("\n")[0] for setting in measured}
    first, *_, last = measured
    base = median(measured[first])
    title = (
        f"{names[last]}: {median(measured[last]) / base:.2f} times the speed of {names[first]}, "
        f"predicted {predicted / base:.0f}"
    )
    with canvas(title, height=2.9) as (figure, axes):
        for place, (setting, rates) in enumerate(measured.items()):
            _pair(axes, place, predicted if setting == last else None, rates, COLOURS["forward"], "{:.0f}")
        axes.set_xticks(range(len(measured)), list(measured))
        axes.set(ylabel="samples per second, all ranks")
    return figure


def _pair(
    axes: Axes, place: float, predicted: float | None, measured: Sequence[float], colour: str, number: str
) -> None:
    """A hollow bar for a prediction, a solid one for the median of the measurements, and a dot for each of them."""
    apart = 0.0 if predicted is None else 0.2
    solid = {"color": colour, "label": "measured"}
    bars: list[tuple[float, float, float, dict[str, Any]]] = [(place + apart, median(measured), max(measured), solid)]
    if predicted is not None:
        bars.append((place - apart, predicted, predicted, hollow(colour)))
    for x, height, top, look in bars:
        axes.bar(x, height, 0.36, **look)
        label_above(axes, x, top, f"{look['label']}\n{number.format(height)}", 5, fontsize=8.5)
    if len(measured) > 1:
        axes.plot(
            [place + apart] * len(measured), measured, "o", color="black", markersize=3, alpha=0.7, label="every try"
        )
    axes.margins(y=0.2)
