"""A simulated rank's memory beside the memory model's formula, kind by kind."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from course_lib.planning import memory, models, vocabulary
from course_lib.planning.models import Model

if TYPE_CHECKING:  # it loads torch
    from course_lib.planning.simulate import Setting, Simulated


@dataclass(frozen=True)
class Difference:
    """One kind of memory by the formula and by the simulation, in bytes."""

    kind: str
    formula: float
    simulated: float

    @property
    def error(self) -> float:
        """Of the formula, relative to what was simulated."""
        return self.formula / self.simulated - 1 if self.simulated else math.nan


def compare(model: str | Model, setting: "Setting", simulated: "Simulated") -> list[Difference]:
    """The simulated rank beside :func:`course_lib.planning.memory.estimate`.

    Gradients are those that wait for the optimizer; a block's whole gradient is among the buffers, with gathered
    parameters and all temporary tensors, at the time of the peak.

    Raises:
        ConfigError: the formula has no such engine.
    """
    known, plan = models.load(model), setting.plan()
    formula = memory.estimate(known, plan)
    if setting.strategy == "tp" and known.has_head:  # DTensor makes a split embedding's gradient whole; ours does not
        more = (1 - 1 / vocabulary.ranks_of_vocabulary(known, plan)) * known.vocab * known.hidden
        formula = replace(formula, gradients=formula.gradients + plan.bytes.gradients * more)
    waiting = simulated.resident["gradients"]
    passing = ("parameter copies", "communication buffers", "temporaries")
    buffers = sum(simulated.at_peak[kind] for kind in passing)
    if setting.strategy in ("fsdp", "zero3", "hsdp"):
        buffers += max(0, simulated.at_peak["gradients"] - waiting)
    rows = [
        Difference("parameters", formula.parameters, simulated.resident["parameters"]),
        Difference("gradients", formula.gradients, waiting),
        Difference("optimizer", formula.optimizer, simulated.resident["optimizer states"]),
    ]
    rows.append(Difference("model states", formula.states, sum(row.simulated for row in rows)))
    rows += [
        Difference("activations", formula.activations, simulated.peak["activations"]),
        Difference("logits", formula.logits, simulated.peak["logits"]),
        Difference("buffers", formula.buffers, buffers),
        Difference("total", formula.total, simulated.total),
    ]
    return rows
