"""What this machine can run, how soon its processes start, and what several of them bring."""

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, PREDICTED, canvas

STATES = {
    "ok": {"color": COLOURS["right"], "marker": "o"},
    "slow": {"color": COLOURS["gradients"], "marker": "D"},
    "cannot": {"color": COLOURS["wrong"], "marker": "X"},
}
"""How a check's state is drawn, in the order of the columns."""

TEXT_WIDTH = 77
"""Characters of the remarks in a line."""
LINE_HEIGHT = 0.14
"""Inches."""


def capabilities(findings: Mapping[str, tuple[str, str, str]]) -> Figure:
    """A row a check: its state by place, colour and shape, and what was found or what to do.

    Args:
        findings: state (`ok`, `slow` or `cannot`), detail and advice, by the name of the check.
    """
    order = list(STATES)
    rows = sorted(findings.items(), key=lambda row: order.index(row[1][0]))
    remarks = [_remark(*found[1:]) for _, found in rows]
    lines = [remark.count("\n") + 1.6 for remark in remarks]
    counts = [f"{sum(found[0] == state for found in findings.values())} {word}"
              for state, word in zip(order, ("run well", "slowly", "not at all"), strict=True)]
    with canvas(f"Of {len(rows)} things on this machine: {', '.join(counts)}",
                height=0.6 + LINE_HEIGHT * sum(lines)) as (figure, axes):
        axes.set(xlim=(-0.5, 22), ylim=(sum(lines), -1.4))
        axes.axis("off")
        places = {state: 1.4 * column for column, state in enumerate(STATES)}
        for state, look in STATES.items():
            axes.text(places[state], -0.7, state, ha="center", va="center", fontsize=8, fontweight="bold",
                      color=look["color"])
        top = 0.0
        for (name, (state, *_)), remark, height in zip(rows, remarks, lines, strict=True):
            middle = top + height / 2
            axes.axhline(top, color="#e3e3e3", linewidth=0.8)
            axes.plot(places[state], middle, markersize=7, **STATES[state])
            axes.text(3.5, middle, name, va="center", fontsize=8, fontweight="bold")
            axes.text(7.6, middle, remark, va="center", fontsize=7, linespacing=1.2,
                      color=COLOURS["neutral"] if state == "ok" else "black")
            top += height
    return figure


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
    ratio = predicted[most] / median(measured[most])
    compared = f"{ratio:.1f} times sooner" if ratio >= 1 else f"{1 / ratio:.1f} times later"
    with canvas(f"{most} processes have run {compared} than {most} new interpreters would") as (figure, axes):
        for place, (count, seconds) in enumerate(measured.items()):
            _pair(axes, place, predicted[count], seconds, COLOURS["communication"], "{:.2f} s")
        axes.set_xticks(range(len(measured)), [f"{count} process{'es' * (count > 1)}" for count in measured])
        axes.set(ylabel="seconds")
    return figure


def throughput(predicted: float, measured: Mapping[str, float]) -> Figure:
    """Samples a second of several settings, the last one beside its prediction.

    Args:
        predicted: samples/s of the last setting.
        measured: samples/s by setting; the last is compared with the first.
    """
    first, *_, last = measured
    title = (f"{last}: {measured[last] / measured[first]:.2f} times the speed of {first}, "
             f"predicted {predicted / measured[first]:.0f}")
    with canvas(title) as (figure, axes):
        for place, (setting, rate) in enumerate(measured.items()):
            _pair(axes, place, predicted if setting == last else None, [rate], COLOURS["forward"], "{:.0f}")
        axes.set_xticks(range(len(measured)), list(measured))
        axes.set(ylabel="samples a second, all ranks")
    return figure


def _pair(axes: Axes, place: float, predicted: float | None, measured: Sequence[float], colour: str,
          number: str) -> None:
    """A hollow bar for a prediction, a solid one for the median of the measurements, and a dot for each of them."""
    apart = 0.0 if predicted is None else 0.2
    bars = [(place + apart, median(measured), max(measured), "measured", {"color": colour})]
    if predicted is not None:
        bars.append((place - apart, predicted, predicted, "predicted", {**PREDICTED, "edgecolor": colour}))
    for x, height, top, name, look in bars:
        axes.bar(x, height, 0.36, **look)
        axes.annotate(f"{name}\n{number.format(height)}", (x, top), xytext=(0, 5), textcoords="offset points",
                      ha="center", fontsize=8.5)
    if len(measured) > 1:
        axes.plot([place + apart] * len(measured), measured, "o", color="black", markersize=3, alpha=0.7)
    axes.margins(y=0.2)
