"""Plans drawn: the map of strategies, memory of a rank by kind, and predictions against measurements."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, PREDICTED, canvas
from course_lib.planning.atlas import Place

FAMILY_COLOURS = {"DDP": "#56B4E9", "ZeRO-1": "#B7E3D4", "ZeRO-2": "#66C2A5", "ZeRO-3": "#009E73", "FSDP": "#0072B2",
                  "3-D": "#CC79A7"}
KIND_COLOURS = {"parameters": COLOURS["parameters"], "gradients": COLOURS["gradients"],
                "optimizer": COLOURS["optimizer states"], "activations": COLOURS["activations"],
                "logits": "#8C4D76", "buffers": COLOURS["communication"]}


def strategy_map(places: Sequence[Sequence[Place]], gpu: str) -> Figure:
    """Model size by number of GPUs, coloured by the fastest strategy that fits, framed where it offloads.

    Args:
        places: a row a model, as :func:`course_lib.planning.atlas.survey` gives them.
        gpu: its name, for the title.
    """
    empty = sum(place.best is None for row in places for place in row)
    whole = sum(len(row) for row in places)
    title = f"{gpu}: what fits, and what is fastest ({empty} of {whole} places hold nothing)"
    with canvas(title, width=8.2, height=0.52 * len(places) + 1.3) as (figure, axes):
        for y, row in enumerate(places):
            for x, place in enumerate(row):
                _place(axes, x, y, place)
        axes.set_xticks(range(len(places[0])), [str(place.gpus) for place in places[0]])
        axes.set_yticks(range(len(places)), [f"{row[0].model.name.split('/')[-1]}\n{_billions(row[0])}"
                                             for row in places], fontsize=9)
        axes.set(xlabel="GPUs", xlim=(-0.5, len(places[0]) - 0.5), ylim=(-0.5, len(places) - 0.5))
        axes.grid(visible=False)
    return figure


def _billions(place: Place) -> str:
    return f"{place.model.parameters / 1e9:.3g} B"


def _place(axes: Axes, x: int, y: int, place: Place) -> None:
    if place.best is None:
        axes.text(x, y, "nothing", ha="center", va="center", fontsize=8, color=COLOURS["neutral"])
        return
    family, _, offloaded = place.family.partition(" + ")
    axes.bar(x, 0.9, width=0.94, bottom=y - 0.45, color=FAMILY_COLOURS[family],
             edgecolor=COLOURS["gradients"], linewidth=2.5 if offloaded else 0)
    dark = family in ("FSDP", "ZeRO-3")
    text = family + ("\noffload" if offloaded else "")
    if place.best.plan.checkpointing != "none":
        text += "\nrecompute"
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black", fontweight="bold")


def memory(predicted: Mapping[str, float], found: Mapping[str, float], title: str, name: str = "simulated") -> Figure:
    """Memory of one rank by kind: the formula hollow, what was found solid.

    Args:
        predicted: bytes by kind, by formula.
        found: bytes by the same kinds, simulated or measured.
        title: the finding.
        name: what the solid bars are.
    """
    with canvas(title, height=0.55 * len(predicted) + 1.2) as (figure, axes):
        for place, kind in enumerate(predicted):
            colour = KIND_COLOURS.get(kind, COLOURS["neutral"])
            axes.barh(place - 0.19, predicted[kind] / 2**30, height=0.36, **PREDICTED, edgecolor=colour)
            axes.barh(place + 0.19, found[kind] / 2**30, height=0.36, color=colour)
            axes.annotate(f"{found[kind] / 2**30:.2f}", (found[kind] / 2**30, place + 0.19), xytext=(4, 0),
                          textcoords="offset points", va="center", fontsize=9)
        axes.set_yticks(range(len(predicted)), list(predicted))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.set_xlabel("GiB on one rank")
        axes.annotate(f"hollow: formula\nsolid: {name}", (0.99, 0.04), xycoords="axes fraction", ha="right",
                      va="bottom", fontsize=9, color=COLOURS["neutral"])
    return figure
