"""Figures of plans: the map of strategies, memory of a rank by kind, and predictions against measurements."""

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.figures.style import COLOURS, Look, canvas, hollow, label_right, name_rows
from course_lib.lessons.pipeline.explorer import Explorer
from course_lib.lessons.planning.diagrams import KIND_COLOURS
from course_lib.planning import strategy
from course_lib.planning.hardware import Accelerator
from course_lib.planning.memory import RUNTIME, USABLE, Memory, estimate
from course_lib.planning.models import Model
from course_lib.planning.plan import Engine, Plan
from course_lib.planning.strategy_map import OFFLOAD, Place

FAMILY_COLOURS = {
    "DDP": "#56B4E9",
    "ZeRO-1": "#B7E3D4",
    "ZeRO-2": "#66C2A5",
    "ZeRO-3": "#009E73",
    "FSDP": "#0072B2",
    "3-D": "#CC79A7",
}
ENGINES: dict[str, tuple[Engine, int]] = {
    "DDP": ("ddp", 0),
    "ZeRO-1": ("deepspeed", 1),
    "ZeRO-2": ("deepspeed", 2),
    "ZeRO-3": ("deepspeed", 3),
    "FSDP": ("fsdp", 3),
}
"""Engine and ZeRO stage by the name of a data-parallel strategy."""


def strategy_map(places: Sequence[Sequence[Place]], gpu: str) -> Figure:
    """Model size by number of GPUs, coloured by the fastest strategy that fits, framed where it offloads.

    Strategies that are as fast as the fastest, to within ``planning.strategy_map.TIE``, stand in one cell; the first,
    which is the simplest, gives the colour.

    Args:
        places: one row per model, as :func:`course_lib.planning.strategy_map.survey` gives them.
        gpu: its name, for the title.
    """
    empty = sum(place.best is None for row in places for place in row)
    whole = sum(len(row) for row in places)
    title = f"{gpu}: what fits, and what is fastest (nothing fits in {empty} of {whole} cells)"
    with canvas(title, width=8.2, height=0.52 * len(places) + 1.3) as (figure, axes):
        for y, row in enumerate(places):
            for x, place in enumerate(row):
                _place(axes, x, y, place)
        axes.set_xticks(range(len(places[0])), [str(place.gpus) for place in places[0]])
        axes.set_yticks(
            range(len(places)),
            [f"{row[0].model.name.split('/')[-1]}\n{_billions(row[0])}" for row in places],
            fontsize=9,
        )
        axes.set(xlabel="GPUs", xlim=(-0.5, len(places[0]) - 0.5), ylim=(-0.5, len(places) - 0.5))
        axes.grid(visible=False)
    return figure


def _billions(place: Place) -> str:
    return f"{place.model.parameters / 1e9:.3g} B"


def _place(axes: Axes, x: int, y: int, place: Place) -> None:
    if place.best is None:
        axes.text(x, y, "nothing", ha="center", va="center", fontsize=8, color=COLOURS["neutral"])
        axes.plot(x, y, linestyle="None", label="nothing")
        return
    family, *others = (strategy.family(candidate.plan) for candidate in place.equals)
    offloaded = OFFLOAD in place.families[0]
    says = " = ".join([family, *others]) + " offloaded" * offloaded
    axes.plot(x, y, linestyle="None", label=says)  # unseen: for the figure's table
    axes.add_patch(
        Rectangle(
            (x - 0.47, y - 0.45),
            0.94,
            0.9,
            facecolor=FAMILY_COLOURS[family],
            edgecolor=COLOURS["gradients"],
            linewidth=2.5 if offloaded else 0,
        )
    )
    dark = family in ("FSDP", "ZeRO-3")
    text = " =\n".join([family, *others])
    look: Look = {"fontsize": 8 if len(others) < 2 else 7, "color": "white" if dark else "black", "fontweight": "bold"}
    axes.text(x, y, text, ha="center", va="center", **look)


def memory(predicted: Mapping[str, float], simulated: Mapping[str, float], title: str) -> Figure:
    """Memory of one rank by kind: the formula hollow, what was simulated solid.

    Args:
        predicted: bytes by kind, by formula.
        simulated: bytes by the same kinds.
        title: the finding.
    """
    with canvas(title, height=0.55 * len(predicted) + 1.2) as (figure, axes):
        for place, kind in enumerate(predicted):
            colour = KIND_COLOURS.get(kind, COLOURS["neutral"])
            axes.barh(place - 0.19, predicted[kind] / 2**30, height=0.36, **hollow(colour))
            size = simulated[kind] / 2**30
            axes.barh(place + 0.19, size, height=0.36, color=colour, label="simulated")
            label_right(axes, size, place + 0.19, f"{size:.2f}", 4, fontsize=9)
        name_rows(axes, predicted, "GiB on one rank")
        look = {"xycoords": "axes fraction", "fontsize": 9, "color": COLOURS["neutral"]}
        axes.annotate("hollow: formula\nsolid: simulated", (0.99, 0.04), ha="right", va="bottom", **look)
    return figure


def rank(held: Memory, chip: Accelerator, title: str) -> Figure:
    """Peak memory of one rank, by formula: a row per kind, each beginning where the one above ends.

    Two lines are the limits: what :meth:`course_lib.planning.memory.Memory.fits` lets tensors fill, and the GPU's
    whole memory.
    """
    gib = 2**30
    kinds = {"CUDA and libraries": float(RUNTIME), **held.at_peak()}
    usable, whole = usable_bytes(chip) / gib, chip.memory / gib
    total = sum(kinds.values()) / gib
    with canvas(title, height=3.0) as (figure, axes):
        left, room = 0.0, 1.42 * max(total, whole)
        for row, (kind, size) in enumerate(kinds.items()):
            colour = KIND_COLOURS.get(kind, COLOURS["neutral"])
            axes.barh(row, size / gib, left=left, height=0.72, **hollow(colour, kind))
            left += size / gib
            ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            said = f"{kind} {size / gib:.1f}"
            axes.text(left + 0.008 * room, row, said, va="center", fontsize=9, zorder=4, bbox=ground)
        for limit, style, name in ((usable, "--", "usable"), (whole, "-", chip.name)):
            axes.axvline(limit, color=COLOURS["wrong"], linewidth=1.6, linestyle=style, zorder=3, label=name)
        look = {"va": "center", "fontsize": 9, "color": COLOURS["wrong"]}
        axes.text(usable - 0.008 * room, -0.85, f"usable {usable:.1f}", ha="right", **look)
        axes.text(whole + 0.008 * room, -0.85, f"{chip.name} {whole:.1f}", **look)
        axes.set(yticks=[], xlabel="GiB on one rank, by formula", xlim=(0, room), ylim=(len(kinds) - 0.5, -1.3))
        axes.grid(visible=False)
    return figure


def usable_bytes(chip: Accelerator) -> float:
    """Bytes up to which a rank may fill a GPU, with what CUDA takes: the limit of ``Memory.fits``."""
    return RUNTIME + (chip.memory - RUNTIME) * USABLE


def memory_view(
    model: Model,
    chip: Accelerator,
    strategy: str,
    ranks: int,
    micro_batch: int,
    accumulation: int,
    sequence_length: int,
    recompute: bool,
    compiled: bool,
) -> tuple[str, Figure]:
    """Memory of a rank under a data-parallel strategy, in words and drawn.

    Args:
        model: what is trained.
        chip: on which GPU.
        strategy: a key of ``ENGINES``.
        ranks: GPUs.
        micro_batch: sequences of one rank.
        accumulation: micro-batches of one step.
        sequence_length: tokens.
        recompute: every block's activations in the backward pass.
        compiled: by torch.compile, as the search's layouts of DDP and FSDP are.
    Raises:
        ConfigError: there is no such plan.
    """
    engine, stage = ENGINES[strategy]
    plan = Plan(
        sequence_length,
        engine=engine,
        stage=stage,
        data=ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing="full" if recompute else "none",
        compiled=compiled,
        loss="chunked",
    )
    held = estimate(model, plan)
    verdict = "fits" if held.fits(chip.memory) else "does not fit"
    how = "compiled" if compiled else "not compiled"
    title = f"{plan.strategy} on {ranks} x {chip.name}, {how}: {verdict}"
    text = (
        f"{model.name}, {title}. {held.total / 2**30:.1f} GiB per rank, and {RUNTIME / 2**30:.1f} that CUDA takes; "
        f"{usable_bytes(chip) / 2**30:.1f} are usable"
    )
    return text, rank(held, chip, title)


def memory_explorer(model: Model, chip: Accelerator, plan: Plan) -> Explorer:
    """Drawing of :func:`memory_view` above its controls, which begin at a data-parallel plan."""

    def powers(most: int, value: int) -> widgets.SelectionSlider:
        return widgets.SelectionSlider(options=sorted({2**n for n in range(most + 1)} | {value}), value=value)

    strategy = next(name for name, engine in ENGINES.items() if engine == (plan.engine, plan.stage))
    controls: dict[str, widgets.Widget] = {
        "strategy": widgets.Dropdown(options=list(ENGINES), value=strategy),
        "ranks": powers(10, plan.data),
        "micro_batch": powers(6, plan.micro_batch),
        "accumulation": powers(6, plan.accumulation),
        "sequence_length": powers(15, plan.sequence_length),
        "recompute": widgets.Checkbox(value=plan.checkpointing == "full"),
        "compiled": widgets.Checkbox(value=plan.compiled),
    }
    return Explorer(controls, lambda **chosen: memory_view(model, chip, **chosen))
