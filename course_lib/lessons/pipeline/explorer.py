"""An interactive pipeline schedule: what ``course schedule`` prints and draws, with sliders."""

import html
from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from course_lib.errors import ConfigError
from course_lib.figures.style import picture_metadata
from course_lib.figures.timelines import gantt
from course_lib.lessons import widget_display
from course_lib.parallel.pipeline.fitted.search import build, stage_costs, stages_for
from course_lib.parallel.pipeline.schedules import KINDS
from course_lib.parallel.pipeline.simulation import Costs, simulate
from course_lib.parallel.pipeline.validation import check


def view(
    name: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    forward: float,
    input: float,
    weight: float,
    message: float,
) -> tuple[str, Figure]:
    """A schedule's table with its bubble and memory as text, and its time line.

    Args:
        name: a key of ``schedules.KINDS``.
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        stages_per_rank: where the schedule takes any number; else it takes its own.
        forward: time of F of one micro-batch in all stages of a rank.
        input: the same for I, the gradient of the input.
        weight: the same for W, the gradient of the weights.
        message: time of a message between two ranks.

    Raises:
        ConfigError: these numbers do not allow the schedule.
    """
    stages = stages_for(name, stages_per_rank if KINDS[name].stages_per_rank is None else None)
    costs = stage_costs(Costs(forward, input, weight, message), stages)
    schedule = build(name, ranks, microbatches, stages, costs)
    in_flight = check(schedule)
    timeline = simulate(schedule, costs)
    facts = (
        f"step {float(timeline.makespan):g}, bubble {float(timeline.bubble):.2%} ({timeline.bubble})",
        f"held at most, by rank: {', '.join(f'{float(peak):g}' for peak in timeline.peak_activations)} "
        f"(1 is a micro-batch in all stages of a rank); parts in flight: {', '.join(map(str, in_flight))}",
    )
    title = f"{name} on {ranks} ranks, {microbatches} micro-batches: {float(timeline.bubble):.1%} idle"
    return "\n".join((str(schedule), "", *facts)), gantt({"": timeline}, title)


class Explorer(widgets.VBox):
    """A drawing, a text and controls; a page that shows no widgets shows the drawing as it was at the start.

    No ``Output`` widget shows them, so ``ipywidgets.interact`` is not used either: nbclient answers those over the
    socket on which it waits for the cell's reply, and now and then waits for ever (jupyter/nbclient, issue 312).

    Args:
        controls: by the names of ``view``'s arguments; they stand in two columns below the drawing.
        view: text and figure for the controls' values; a ConfigError is shown in their place.

    Attributes:
        controls: as given.
        picture: the drawing.
        said: the text.
    """

    def __init__(self, controls: Mapping[str, widgets.Widget], view: Callable[..., tuple[str, Figure]]):
        for key, control in controls.items():
            control.description, control.continuous_update = key.replace("_", " "), False
            control.style = {"description_width": "8em"}
        self.controls, self.view = controls, view
        self.picture = widgets.Image(format="png", layout={"max_width": "100%"})
        self.said = widgets.HTML()
        for control in controls.values():
            control.observe(self.refresh, names="value")
        self.refresh()
        self.fallback, self.fallback_text, self.fallback_said = bytes(self.picture.value), self.text, self.shown
        columns = widgets.GridBox(
            list(controls.values()), layout={"grid_template_columns": "repeat(2, max-content)", "grid_gap": "0 1.5em"}
        )
        super().__init__([self.picture, columns, self.said])

    def refresh(self, _: Mapping[str, Any] | None = None) -> None:
        """Draw and say what the controls' values give."""
        try:
            self.text, figure = self.view(**{key: control.value for key, control in self.controls.items()})
        except ConfigError as error:
            self.text, self.shown, self.picture.layout.display = str(error), {}, "none"
        else:
            self.picture.value, self.picture.layout.display = widget_display.png(figure), ""
            self.shown = picture_metadata(figure)
        self.said.value = f"<pre style='margin:0;overflow-x:auto'>{html.escape(self.text)}</pre>" if self.text else ""

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return (widget_display.bundle(self, self.fallback, self.fallback_text), {"image/png": self.fallback_said})


def explorer(**start: Any) -> Explorer:
    """A schedule's drawing above sliders; a combination that is not legal shows the rule instead.

    Args:
        **start: values to begin with, by the names of :func:`view`'s arguments.
    """
    controls: dict[str, widgets.Widget] = {
        "name": widgets.Dropdown(options=list(KINDS), value="1f1b"),
        "ranks": widgets.IntSlider(value=4, min=1, max=8),
        "microbatches": widgets.IntSlider(value=8, min=1, max=24),
        "stages_per_rank": widgets.IntSlider(value=2, min=1, max=4),
    } | {
        cost: widgets.FloatSlider(value=value, min=least, max=4, step=0.1)
        for cost, value, least in (("forward", 1, 0.1), ("input", 1, 0.1), ("weight", 1, 0.1), ("message", 0, 0))
    }
    for key, value in start.items():
        controls[key].value = value
    return Explorer(controls, view)


with_sliders = Explorer
"""The same, by the name of what it does."""
