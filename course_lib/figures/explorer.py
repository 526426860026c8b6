"""An interactive pipeline schedule: what ``course schedule`` prints and draws, with sliders."""

import html
import io
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib.errors import ConfigError
from course_lib.figures.pipeline import gantt
from course_lib.parallel.pipeline.fitted.search import build, stage_costs, stages_for
from course_lib.parallel.pipeline.schedules import KINDS
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check


def view(name: str, ranks: int, microbatches: int, stages_per_rank: int, forward: float, input: float, weight: float,
         message: float) -> tuple[str, Figure]:
    """A schedule's table with its bubble and memory as text, and its time line.

    Args:
        name: a key of ``schedules.KINDS``.
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        stages_per_rank: where the schedule takes any number; else it takes its own.
        forward: time of F of one micro-batch in all stages of a rank; ``input`` and ``weight`` likewise.
        message: time of a message between two ranks.

    Raises:
        ConfigError: these numbers do not allow the schedule.
    """
    stages = stages_for(name, stages_per_rank if KINDS[name].stages_per_rank is None else None)
    costs = stage_costs(Costs(forward, input, weight, message), stages)
    schedule = build(name, ranks, microbatches, stages, costs)
    in_flight = check(schedule)
    timeline = simulate(schedule, costs)
    facts = (f"step {float(timeline.makespan):g}, bubble {float(timeline.bubble):.2%} ({timeline.bubble})",
             f"held at most, by rank: {', '.join(f'{float(peak):g}' for peak in timeline.peak_bytes)} "
             f"(1 is a micro-batch in all stages of a rank); parts in flight: {', '.join(map(str, in_flight))}")
    title = f"{name} on {ranks} ranks, {microbatches} micro-batches: {float(timeline.bubble):.1%} idle"
    return "\n".join((str(schedule), "", *facts)), gantt({"": timeline}, title)


def explorer(**start: Any) -> widgets.VBox:
    """Sliders above what :func:`view` says; a combination that is not legal shows the rule instead.

    Args:
        **start: values to begin with, by the names of :func:`view`'s arguments.
    """
    controls: dict[str, widgets.Widget] = {
        "name": widgets.Dropdown(options=list(KINDS), value="1f1b"),
        "ranks": widgets.IntSlider(value=4, min=1, max=8),
        "microbatches": widgets.IntSlider(value=8, min=1, max=24),
        "stages_per_rank": widgets.IntSlider(value=2, min=1, max=4),
    } | {cost: widgets.FloatSlider(value=value, min=least, max=4, step=0.1) for cost, value, least in (
        ("forward", 1, 0.1), ("input", 1, 0.1), ("weight", 1, 0.1), ("message", 0, 0))}
    for key, value in start.items():
        controls[key].value = value
    return with_sliders(controls, view)


def with_sliders(controls: Mapping[str, widgets.Widget], view: Callable[..., tuple[str, Figure]]) -> widgets.VBox:
    """Controls above a text and a figure that follow them.

    No ``Output`` widget shows them, so ``ipywidgets.interact`` is not used either: nbclient answers those over the
    socket on which it waits for the cell's reply, and now and then waits for ever (jupyter/nbclient, issue 312).

    Args:
        controls: by the names of ``view``'s arguments.
        view: text and figure for the controls' values; a ConfigError is shown in their place.
    """
    for key, control in controls.items():
        control.description, control.continuous_update = key.replace("_", " "), False
        control.style = {"description_width": "8em"}
    text, picture = widgets.HTML(), widgets.Image(format="png")

    def refresh(_: Mapping[str, Any] | None = None) -> None:
        try:
            said, figure = view(**{key: control.value for key, control in controls.items()})
        except ConfigError as error:
            said, picture.layout.display = str(error), "none"
        else:
            picture.value, picture.layout.display = _png(figure), ""
        text.value = f"<pre>{html.escape(said)}</pre>" if said else ""

    for control in controls.values():
        control.observe(refresh, names="value")
    refresh()
    return widgets.VBox([*controls.values(), text, picture])


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=figure.dpi, bbox_inches="tight")
    return image.getvalue()
