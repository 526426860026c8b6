"""Figures of wrong gradients: losses that agree beside norms that do not, and what each optimizer makes of them."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, canvas, curve, end_label, label_beside, name_rows


def curves(losses: Mapping[str, Sequence[float]], norms: Mapping[str, Sequence[float]]) -> Figure:
    """Two trainings: their losses on the left, the norms of their gradients on the right.

    Args:
        losses: nats per word by step; the right training first, then the wrong one.
        norms: of the whole gradient by step, likewise.
    """
    (right, of_right), (wrong, of_wrong) = norms.items()
    apart = max(abs(a - b) for a, b in zip(losses[right], losses[wrong], strict=True))
    times = sum(of_wrong) / sum(of_right)
    title = f"The losses are {apart:.0e} nats apart, the gradients differ by a factor of {times:.2f}"
    with canvas(title, ncols=2, height=2.9) as (figure, both):
        for axes, by_run, unit in zip(
            both, (losses, norms), ("loss, nats per word", "norm of the gradient"), strict=True
        ):
            for run, values, colour, style in zip(
                by_run, by_run.values(), (COLOURS["right"], COLOURS["wrong"]), ("-", "--"), strict=True
            ):
                look = {"linewidth": 4, "alpha": 0.5} if style == "-" else {"linewidth": 1.8, "alpha": 1}
                curve(axes, values, style, color=colour, label=run, **look)
                if by_run is norms:
                    end_label(axes, len(values), values[-1], run, colour)
            axes.set_xlabel("step")
            axes.set_ylabel(unit)
        both[0].text(0.97, 0.92, f"{right} and {wrong}: two curves", transform=both[0].transAxes, ha="right", va="top")
        both[1].set_ylim(bottom=0)
    return figure


def by_setting(apart: Mapping[str, float], seen: float) -> Figure:
    """By how much the losses of the wrong training leave the right one's, optimizer by optimizer.

    Args:
        apart: largest difference of the losses, in nats.
        seen: difference that one would see in a curve, in nats.
    """
    shown = sum(value > seen for value in apart.values())
    with canvas(f"{shown} of {len(apart)} settings show a wrong gradient in the loss", height=2.7) as (figure, axes):
        for row, value in enumerate(apart.values()):
            colour = COLOURS["wrong" if value > seen else "neutral"]
            axes.plot(value, row, "o", color=colour, markersize=9, label="difference")
            side, ha = (1, "left") if value > seen else (-1, "right")  # away from the broken line
            label_beside(axes, (value, row), (9 * side, 0), f"{value:.1g}", va="center", ha=ha, color=colour)
        axes.axvline(seen, color="black", linestyle="--", linewidth=1.2, label="what a curve shows")
        axes.set_xscale("log")
        name_rows(axes, apart, "largest difference of the losses, nats\n(broken line: what a curve shows)", room=0.2)
        axes.grid(axis="y")
        axes.margins(y=0.15)
    return figure
