"""Figures of one training step: what it holds, where its time goes, what is padding, and whether it can be resumed."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.figures import numbers
from course_lib.figures.style import COLOURS, canvas, curve, end_label, hollow, label_beside, name_rows
from course_lib.lessons.basic_loop.lab import Moment, padding_share

KINDS = ("parameters", "optimizer states", "gradients", "activations")
MB = 1e6
PHASE_NAMES = {"optimizer": "update"}


def memory_over_steps(moments: Sequence[Moment]) -> Figure:
    """Bytes by kind, stacked, over the time of two or more steps, with a dot and its MB at the peak of each.

    An optimizer makes its states as its step begins, and the meter sees them only when it has ended. So in an update
    what is held after the step is drawn from the moment before it.
    """
    seconds = np.array([moment.seconds for moment in moments])
    held = [np.array([moment.held[kind] for moment in moments]) / MB for kind in KINDS]
    total = np.sum(held, axis=0)
    begins = [0] + [i for i in range(1, len(moments)) if moments[i].phase != moments[i - 1].phase]
    names = [PHASE_NAMES.get(moments[begin].phase, moments[begin].phase) for begin in begins]
    for begin, after in zip(begins, _highest(total, begins), strict=True):
        if moments[begin].phase == "optimizer" and after > begin:
            for height in (*held, total):
                height[after - 1] = height[after]
    peaks = _highest(total, [i for i in begins if moments[i].phase == "forward"])
    title = "Held at most: " + ", ".join(f"{total[peak]:.0f} MB in step {i}" for i, peak in enumerate(peaks, start=1))
    with canvas(title, width=7.0, height=3.3) as (figure, axes):
        axes.stackplot(seconds, *held, colors=[COLOURS[kind] for kind in KINDS], step="post", linewidth=0)
        top = total.max() * 1.25
        axes.set(xlabel="seconds", ylabel="MB held", xlim=(0, seconds[-1]), ylim=(0, top))
        base = np.zeros(len(moments))
        for kind, height in zip(KINDS, held, strict=True):
            _name_area(axes, seconds, base, height, total, kind)
            base += height
        for name, (begin, end) in zip(names, pairwise(seconds[[*begins, -1]]), strict=True):
            axes.axvline(begin, color=COLOURS["neutral"], linewidth=0.8, linestyle=":")
            look = {"ha": "center", "va": "top", "fontsize": 8, "color": COLOURS["neutral"]}
            axes.text((begin + end) / 2, top, name, rotation=90 if end - begin < 0.09 * seconds[-1] else 0, **look)
        for peak in peaks:
            point = seconds[peak], total[peak]
            axes.plot(*point, "o", color="black", markersize=6, markeredgecolor="white", zorder=5, clip_on=False)
            right = moments[peak].phase == "optimizer"  # to its left the gradients' name may be
            shift, side = ((4, 4), "left") if right else ((-7, 4), "right")
            text = f"{total[peak]:.0f} MB"
            label_beside(axes, point, shift, text, ha=side, va="bottom", fontweight="bold", fontsize=9)
    numbers.tell(
        figure,
        "MB held when each phase holds the most",
        ["phase", "seconds", *KINDS, "all"],
        [
            (name, seconds[at], *(of[at] for of in held), total[at])
            for name, at in zip(names, _highest(total, begins), strict=True)
        ],
    )
    return figure


def _highest(total: np.ndarray, begins: Sequence[int]) -> list[int]:
    """The first moment at which the most is held, of each part that begins at one of these and ends at the next."""
    return [begin + int(total[begin:end].argmax()) for begin, end in pairwise([*begins, len(total)])]


def _name_area(
    axes: Axes, seconds: np.ndarray, base: np.ndarray, height: np.ndarray, total: np.ndarray, name: str
) -> None:
    """Write an area's name into its tallest part, or above it where that is too narrow."""
    tall = np.flatnonzero(height >= 0.6 * height.max())
    parts = np.split(tall, np.flatnonzero(np.diff(tall) > 1) + 1)
    part = max(parts, key=lambda part: seconds[part[-1]] - seconds[part[0]])
    left, right = seconds[part[0]], seconds[part[-1]]
    if right - left > 0.15 * seconds[-1]:
        x = (left + right) / 2
        held = np.searchsorted(seconds, x, side="right") - 1  # what is drawn there is what the moment before it held
        axes.text(x, base[held] + height[held] / 2, name, ha="center", va="center", color="white", fontweight="bold")
    else:
        under = (seconds >= left - 0.2 * seconds[-1]) & (seconds <= left)
        above = left, total[under].max()
        label_beside(axes, above, (-4, 2), name, ha="right", va="bottom", color=COLOURS[name], fontweight="bold")


def time_by_phase(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Figure:
    """Milliseconds of a step by phase: measured solid, predicted hollow.

    Args:
        measured: ms by phase.
        predicted: ms of those phases for which there is a prediction.
    """
    longest = max(measured, key=measured.__getitem__)
    title = f"{longest.capitalize()} takes {measured[longest] / sum(measured.values()):.0%} of a step"
    with canvas(title, width=6.4, height=2.8) as (figure, axes):
        for row, (phase, ms) in enumerate(measured.items()):
            axes.barh(row, ms, height=0.42, color=COLOURS[phase], label="measured")
            axes.text(ms, row, f" {_milliseconds(ms)}", va="center")
            if phase in predicted:
                axes.barh(row + 0.4, predicted[phase], height=0.22, **hollow(COLOURS[phase]))
                said = f"   predicted {_milliseconds(predicted[phase])}"
                axes.text(predicted[phase], row + 0.42, said, va="center", color=COLOURS["neutral"], fontsize=9)
        name_rows(axes, measured)
        axes.set(xlabel="ms per step", xlim=(0, 1.25 * max([*measured.values(), *predicted.values()])))
    return figure


def _milliseconds(ms: float) -> str:
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def padding_grids(lengths: np.ndarray, orders: Mapping[str, Sequence[np.ndarray]]) -> Figure:
    """Batches as grids of tokens, longest row first in each: tokens coloured, padding grey.

    Args:
        lengths: int [rows], tokens of each row of the data.
        orders: by name, the batches to draw, as row numbers.
    """
    shares = {name: padding_share(lengths, batches) for name, batches in orders.items()}
    title = "Padding: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    columns = np.arange(max(lengths[rows].max() for batches in orders.values() for rows in batches))
    colours = ListedColormap(["white", COLOURS["idle"], COLOURS["forward"]])
    with canvas(title, width=6.4, height=3.2, ncols=len(orders), sharex=True, sharey=True) as (figure, panels):
        for axes, (name, batches) in zip(panels, orders.items(), strict=True):
            tokens = [-np.sort(-lengths[rows])[:, None] for rows in batches]
            bands = [0 + (columns < long.max()) + (columns < long) for long in tokens]
            axes.imshow(np.concatenate(bands), cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest")
            for edge in np.cumsum([len(rows) for rows in batches])[:-1]:
                axes.axhline(edge - 0.5, color="black", linewidth=0.5)
            axes.grid(visible=False)
            axes.set(title=name, xlabel="tokens in the row", xlim=(-0.5, columns[-1] + 0.5))
        panels[0].set(ylabel="row (a line ends a batch)")
        *_, last = orders.values()
        _write_into_widest(panels[0], lengths, next(iter(orders.values())), "padding", COLOURS["neutral"], right=True)
        _write_into_widest(panels[-1], lengths, last, "tokens", "white", right=False)
    numbers.tell(
        figure,
        "Batches, as they are padded",
        ["order", "batch", "rows", "longest row (tokens)", "padding"],
        [
            (name, str(i), len(rows), lengths[rows].max(), f"{padding_share(lengths, [rows]):.0%}")
            for name, batches in orders.items()
            for i, rows in enumerate(batches)
        ],
    )
    return figure


def _write_into_widest(
    axes: Axes, lengths: np.ndarray, batches: Sequence[np.ndarray], text: str, colour: str, right: bool
) -> None:
    """Write into the batch that takes the most tokens, at its right or left end."""
    widest = int(np.argmax([lengths[rows].max() for rows in batches]))
    middle = sum(map(len, batches[:widest])) + (len(batches[widest]) - 1) / 2
    x = lengths[batches[widest]].max() - 1.5 if right else 0.5
    axes.text(
        x, middle, text, ha="right" if right else "left", va="center", color=colour, fontsize=8, fontweight="bold"
    )


def resumed_losses(
    whole: Sequence[float], resumed: Mapping[int, float], wrong: Mapping[int, float], wrong_name: str
) -> Figure:
    """The losses of a run, and of the same run stopped and resumed.

    Args:
        whole: loss of each step, from step 1.
        resumed: losses by step after the stop, from a whole checkpoint.
        wrong: losses by step after the stop, from a part of the checkpoint.
        wrong_name: which part.
    """
    apart = max(abs(whole[step - 1] - loss) for step, loss in resumed.items())
    title = (
        f"The resumed run repeats all {len(resumed)} losses to the bit"
        if apart == 0
        else f"The resumed run differs by up to {apart:.1e}"
    )
    with canvas(title, width=6.4, height=2.6) as (figure, axes):
        curve(axes, whole, color=COLOURS["idle"], linewidth=7, solid_capstyle="round", label="the whole run")
        for losses, line, kind, name in ((wrong, "o--", "wrong", wrong_name), (resumed, "o-", "right", "resumed")):
            colour = COLOURS[kind]
            curve(axes, losses, line, color=colour, markersize=4, linewidth=1.2, label=name)
        axes.axvline(min(resumed) - 0.5, color=COLOURS["neutral"], linestyle=":", linewidth=1)
        axes.text(min(resumed) - 0.6, min(whole), "stopped here ", ha="right", va="bottom", color=COLOURS["neutral"])
        look = {"va": "bottom", "color": COLOURS["neutral"], "fontweight": "bold"}
        label_beside(axes, (1, max(whole[:4])), (0, 8), "the whole run", **look)
        axes.margins(y=0.22)  # room for that name
        end_label(axes, max(resumed), resumed[max(resumed)], "resumed", COLOURS["right"])
        end_label(axes, max(wrong), wrong[max(wrong)], wrong_name, COLOURS["wrong"])
        axes.set(xlabel="optimizer step", ylabel="loss (nats per target)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
