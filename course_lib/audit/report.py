"""An audit as text, a line per layout and a sentence per parameter, or as JSON."""

import functools
import json
import textwrap
from collections.abc import Iterator

from course_lib.audit.session import Audited
from course_lib.audit.verdict import Verdict

VISIBLE = 1e-4
"""Relative difference that a log of four digits shows."""
WIDTH = 110
SHOWN = 12
"""Sentences per layout; of the others their number is said."""


def as_json(audited: Audited) -> str:
    """All verdicts; what is infinite is null."""
    tree = json.dumps(
        {
            "clean": audited.clean,
            "notes": audited.notes,
            "verdicts": [verdict.as_dict() for verdict in audited.verdicts],
            "failed": {str(layout): why for layout, why in audited.failed.items()},
            "refused": {str(layout): why for layout, why in audited.refused.items()},
        }
    )
    return json.dumps(json.loads(tree, parse_constant=lambda name: None), indent=1)  # JSON has no infinity


_wrapped = functools.partial(textwrap.wrap, width=WIDTH, break_long_words=False, break_on_hyphens=False)


def lines(audited: Audited) -> Iterator[str]:
    """A line per layout, and under it a sentence per cause of what is wrong."""
    parameters = len(audited.reference.gradients)
    for note in audited.notes:
        yield from textwrap.wrap(note, WIDTH)
    yield f"{'layout':<18}{'loss apart':<12}{'norm, of the reference':<24}gradients that agree"
    for verdict in audited.verdicts:
        observed, right = verdict.norm
        agree = parameters - len(verdict.wrong)
        share = f"{observed / right:.6g}" if right else "-"
        yield f"{verdict.layout!s:<18}{verdict.loss_apart:<12.1e}{share:<24}{agree} of {parameters}"
        for sentence in sentences(verdict):
            yield from _wrapped(sentence, initial_indent="  ", subsequent_indent="    ")
    for how, which in (("failed", audited.failed), ("not run", audited.refused)):
        for layout, why in which.items():
            yield from _wrapped(f"{layout!s:<18}{how}: {why}", subsequent_indent=" " * 18)


def sentences(verdict: Verdict) -> Iterator[str]:
    """Sentences on what is wrong, and on what would not have shown it."""
    told = verdict.told
    yield from told[:SHOWN]
    if len(told) > SHOWN:
        yield f"and {len(told) - SHOWN} more, see --json"
    if verdict.untried:
        yield verdict.untried
    if verdict.loss_is:
        yield verdict.loss_is
    hidden = [
        what
        for what, apart in (("the losses", verdict.loss_apart), ("the weights after them", verdict.weights_apart))
        if apart < VISIBLE
    ]
    if verdict.wrong and hidden:
        yield f"{' and '.join(hidden)} do not show it in two steps: they agree to four digits"
    if verdict.weights and not verdict.wrong:
        yield f"the gradients agree, the weights do not: {', '.join(verdict.weights[:3])}"
    elif not verdict.wrong and not verdict.losses_agree:
        yield (
            "the gradients agree, the losses do not, as no mean or sum over the ranks is that of one process: let "
            "each rank's `loss` be that of its whole step, over all its micro-batches"
        )
    if verdict.buffers:
        yield f"buffers differ: {', '.join(verdict.buffers[:3])}"
