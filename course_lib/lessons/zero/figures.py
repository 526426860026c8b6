"""Figures of ZeRO: what each stage holds and moves; the formula hatched, the measurement solid."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, canvas, hollow, label_above, label_beside, label_right, name_rows, stack

Bill = Mapping[tuple[int, int], Mapping[str, float]]
KINDS = ("parameters", "gradients", "optimizer states")


def memory(measured: Bill, predicted: Bill, elements: int) -> Figure:
    """Bytes of model states per parameter, by stage and number of ranks.

    Args:
        measured: bytes by kind, by (stage, N).
        predicted: the same by formula.
        elements: parameters of the model.
    """
    stages, sizes = (sorted({key[i] for key in measured}) for i in (0, 1))
    worst = max(abs(held[kind] / predicted[key][kind] - 1) for key, held in measured.items() for kind in held)
    title = f"Each stage splits one more kind; each measured within {worst:.3%} of the formula"
    with canvas(
        title, width=7.8, height=3.7, ncols=len(stages), sharey=True, width_ratios=[1.0] * (len(stages) - 1) + [1.8]
    ) as (figure, axes):
        for stage, panel in zip(stages, axes, strict=True):
            for place, ranks in enumerate(sizes):
                foreseen, counted = (
                    {kind: of[stage, ranks][kind] / elements for kind in KINDS} for of in (predicted, measured)
                )
                stack(panel, place - 0.2, foreseen, COLOURS, size=0.36, predicted=True)
                total = stack(panel, place + 0.2, counted, COLOURS, size=0.36)
                label_above(panel, place, total, f"{total:.3g}", fontsize=9)
            panel.set_title("plain" if stage == 0 else f"stage {stage}", fontsize=10)
            panel.set_xticks(range(len(sizes)), [str(n) for n in sizes])
            panel.set_xlabel("ranks N", loc="left")
        axes[0].set_ylabel("bytes per parameter, on each rank")
        axes[0].set_ylim(0, 19)
        for height, kind in zip((2, 6, 12), KINDS, strict=True):
            axes[-1].annotate(kind, (len(sizes) - 0.4, height), va="center", color=COLOURS[kind], fontweight="bold")
        look = {"va": "center", "fontsize": 9, "color": COLOURS["neutral"]}
        axes[-1].annotate("hatched: formula\nsolid: measured", (len(sizes) - 0.4, 15), **look)
        axes[-1].set_xlim(-0.6, len(sizes) + 2.2)
    return figure


def volume(measured: Mapping[str, float], predicted: Mapping[str, float], title: str) -> Figure:
    """Elements that a rank sends in a step, as multiples of the model.

    Args:
        measured: Ψ (N−1)/N's, by the name of the way of training.
        predicted: the same by formula.
        title: what the figure finds.
    """
    names = list(measured)
    with canvas(title, height=1.1 + 0.45 * len(names)) as (figure, axes):
        for place, name in enumerate(names):
            axes.barh(place + 0.2, predicted[name], height=0.36, **hollow(COLOURS["communication"]))
            axes.barh(place - 0.2, measured[name], height=0.36, color=COLOURS["communication"], label="measured")
            label_right(axes, measured[name], place - 0.2, f"{measured[name]:.2f}", 4, fontsize=9)
        name_rows(axes, names, "elements sent by a rank in a step, in units of Ψ (N − 1)/N", grid=False)
        axes.set_xlim(0, 4.4)
        shortest = min(range(len(names)), key=lambda place: max(measured[names[place]], predicted[names[place]]))
        look = {"ha": "right", "va": "center", "fontsize": 9, "color": COLOURS["neutral"]}
        axes.annotate("hatched: formula\nsolid: measured", (4.35, shortest), **look)
    return figure


def large(
    formula: Mapping[int, Mapping[str, float]], published: Mapping[int, float], capacity: float, name: str
) -> Figure:
    """Model states of a large model a GPU, by stage, beside the published totals.

    Args:
        formula: GB by kind, by stage.
        published: GB in all, by stage.
        capacity: GB of the GPU that the line shows.
        name: the model and the cluster, for the title.
    """
    stages = sorted(formula)
    first = next(stage for stage in stages if sum(formula[stage].values()) < capacity)
    where = "plain data parallel" if first == 0 else f"stage {first}"
    with canvas(f"{name}: the model states fit from {where} on", height=3.2) as (figure, axes):
        for place, stage in enumerate(stages):
            kinds = {kind: formula[stage][kind] for kind in KINDS}
            total = stack(axes, place, kinds, COLOURS, size=0.36, predicted=True)
            label_above(axes, place, total, f"{total:.4g} GB")
            printed = {"color": COLOURS["neutral"], "linewidth": 1.5, "label": "as the paper printed it"}
            axes.plot([place - 0.24, place + 0.24], [published[stage]] * 2, **printed)
        gpu, right = f"{capacity:.0f} GB GPU", len(stages) - 0.52
        axes.axhline(capacity, color=COLOURS["wrong"], linewidth=1.2, linestyle="--", label=gpu)
        label_beside(axes, (right, capacity), (0, 3), gpu, ha="right", color=COLOURS["wrong"])
        line = "black line: as the paper printed it"
        axes.annotate(line, (right, 70), ha="right", color=COLOURS["neutral"], fontsize=9)
        axes.set_xticks(range(len(stages)), ["plain" if stage == 0 else f"stage {stage}" for stage in stages])
        axes.set_ylabel("GB per GPU")
        axes.set_xlim(-0.5, len(stages) - 0.5)
        axes.set_ylim(0, 1.15 * max(sum(formula[stage].values()) for stage in stages))
        bottom = 0.0
        for kind in KINDS:
            height = formula[stages[0]][kind]
            look = {"va": "center", "color": COLOURS[kind], "fontweight": "bold", "fontsize": 9}
            axes.annotate(kind, (0.23, bottom + height / 2), **look)
            bottom += height
    return figure
