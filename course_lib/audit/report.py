"""An audit as text, a line per layout and a sentence per parameter, or as JSON."""

import json
from collections.abc import Iterator

from course_lib.audit.session import Audited
from course_lib.audit.verdict import Verdict

VISIBLE = 1e-4
"""Relative difference that a log of four digits shows."""
SHOWN = 12
"""Sentences per layout; of the others their number is said."""


def as_json(audited: Audited) -> str:
    """All verdicts."""
    return json.dumps({"clean": audited.clean, "verdicts": [verdict.as_dict() for verdict in audited.verdicts],
                       "refused": {str(layout): why for layout, why in audited.refused.items()}}, indent=1)


def lines(audited: Audited) -> Iterator[str]:
    """A line per layout, and under it a sentence per parameter that is wrong."""
    parameters = len(audited.reference.gradients)
    yield f"{'layout':<18}{'loss apart':<12}{'norm, of the reference':<24}gradients that agree"
    for verdict in audited.verdicts:
        found, right = verdict.norm
        agree = parameters - len(verdict.wrong)
        share = f"{found / right:.6g}" if right else "-"
        yield f"{verdict.layout!s:<18}{verdict.loss_apart:<12.1e}{share:<24}{agree} of {parameters}"
        yield from (f"  {sentence}" for sentence in sentences(verdict))
    for layout, why in audited.refused.items():
        yield f"{layout!s:<18}not run: {why}"


def sentences(verdict: Verdict) -> Iterator[str]:
    """What is wrong, and what would not have shown it."""
    for finding in verdict.wrong[:SHOWN]:
        yield finding.sentence
    if len(verdict.wrong) > SHOWN:
        yield f"and {len(verdict.wrong) - SHOWN} more, see --json"
    hidden = [what for what, apart in (("the losses", verdict.loss_apart), ("the weights after them",
                                                                            verdict.weights_apart)) if apart < VISIBLE]
    if verdict.wrong and hidden:
        yield f"{' and '.join(hidden)} do not show it in two steps: they agree to four digits"
    if verdict.weights and not verdict.wrong:
        yield f"the gradients agree, the weights do not: {', '.join(verdict.weights[:3])}"
    if verdict.buffers:
        yield f"buffers differ: {', '.join(verdict.buffers[:3])}"
