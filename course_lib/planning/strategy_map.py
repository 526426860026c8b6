"""Maps over many searches: the best strategy by model and number of GPUs, and a rule of thumb set beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from course_lib.planning import hardware, models, strategy
from course_lib.planning.models import Model
from course_lib.planning.strategy import Candidate

SIZES = ("gpt2", "gpt2-xl", "facebook/opt-2.7b", "llama-7b", "facebook/opt-13b", "facebook/opt-30b", "llama-2-70b")
"""From a tenth of a billion to seventy billion parameters."""
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
LENGTH = 1024
"""Tokens of a sequence."""
BATCH_PER_GPU = 4
"""Sequences of a step for each GPU, whatever the layout."""
TIE = 0.03
"""A layout that is slower than the fastest by at most this share ties with it: the planner cannot tell them apart."""
SIMPLEST_FIRST = ("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "3-D")
"""Families in the order in which equals are taken."""
OFFLOAD = " + offload"


@dataclass(frozen=True)
class Place:
    """One model on so many GPUs.

    Attributes:
        model: what is trained.
        gpus: how many.
        equals: the best layout of each family that is as fast as the fastest, to within ``TIE``, the simplest family
            first; empty where nothing fits.
        why_not: where nothing fits, what would.
    """

    model: Model
    gpus: int
    equals: tuple[Candidate, ...]
    why_not: str = ""

    @property
    def best(self) -> Candidate | None:
        """The simplest of the layouts that are as fast as the fastest; None where nothing fits."""
        return self.equals[0] if self.equals else None

    @property
    def families(self) -> tuple[str, ...]:
        """Of each of ``equals`` its family, with what it needs beside it to fit."""
        return tuple(_named(candidate) for candidate in self.equals)


def _named(candidate: Candidate) -> str:
    return strategy.family(candidate.plan) + (OFFLOAD if candidate.plan.offload != "none" else "")


def survey(
    gpu: str,
    names: Sequence[str] = SIZES,
    counts: Sequence[int] = GPU_COUNTS,
    families: Sequence[str] = strategy.FAMILIES,
) -> list[list[Place]]:
    """The best layout of every model on every number of GPUs.

    Args:
        gpu: an accelerator or SageMaker instance.
        names: models, a row each.
        counts: numbers of GPUs, a column each.
        families: of ``strategy.FAMILIES``, those to look at.
    """
    return [[_place(model, gpu, count, families) for count in counts] for model in map(models.load, names)]


def _place(model: Model, gpu: str, count: int, families: Sequence[str]) -> Place:
    try:
        result = strategy.search(model, hardware.cluster(gpu, count), LENGTH, BATCH_PER_GPU * count, families=families)
    except strategy.NothingFits as why:
        return Place(model, count, (), why.instead)
    enough = (1 - TIE) * result.best.cost.tokens_per_second
    return Place(
        model,
        count,
        tuple(
            sorted(
                (
                    candidate
                    for candidate in result.best_of_each()
                    if candidate.cost.tokens_per_second >= enough
                    and (candidate.chance >= strategy.LIKELY or candidate is result.best)
                ),
                key=lambda candidate: SIMPLEST_FIRST.index(strategy.family(candidate.plan)),
            )
        ),
    )


RULE = ((1e9, inf, "DDP"), (10e9, 2, "DDP"), (10e9, inf, "FSDP"), (inf, 4, "offload"), (inf, inf, "ZeRO-3"))
"""A rule of thumb, as guides print them: below so many parameters, on up to so many GPUs, this. The first that fits."""


def rule_of_thumb(parameters: float, gpus: int) -> str:
    """The family that ``RULE`` recommends, or "offload", whichever family does it."""
    return next(family for below, up_to, family in RULE if parameters < below and gpus <= up_to)


def rule_in_words() -> str:
    """``RULE`` as a guide prints it."""
    sizes = {1e9: "below a billion parameters", 10e9: "up to ten billion", inf: "beyond that"}
    said: dict[str, list[str]] = {}
    for below, up_to, family in RULE:
        said.setdefault(sizes[below], []).append(family if up_to == inf else f"{family} on up to {up_to} GPUs")
    return "; ".join(f"{size}, {' and '.join(part)}{' on more' * (len(part) > 1)}" for size, part in said.items())


def follows(place: Place, rule: str) -> bool:
    """Whether one of a place's equals is what the rule recommends."""
    return any(OFFLOAD in name if rule == "offload" else name == rule for name in place.families)


@dataclass(frozen=True)
class Disagreement:
    """Place where none of the search's equals is what the rule recommends.

    Attributes:
        place: model, GPUs, and the search's choice.
        rule: what the rule recommends.
        fits: the fastest layout of the rule's family, or for offload the search's own; None where none fits.
        because: why the search does not take it.
    """

    place: Place
    rule: str
    fits: Candidate | None
    because: str


def disagreements(places: Sequence[Sequence[Place]], gpu: str) -> list[Disagreement]:
    """Hold a survey of a GPU against :func:`rule_of_thumb`."""
    cases = []
    for place in (cell for row in places for cell in row):
        rule = rule_of_thumb(place.model.parameters, place.gpus)
        if follows(place, rule):
            continue
        own = place.best if rule == "offload" else _place(place.model, gpu, place.gpus, (rule,)).best
        if place.best is None:
            because = "nothing fits"
        elif rule == "offload":
            because = f"{place.families[0]} fits without offload"
        elif own is None:
            because = f"{rule} does not fit"
        elif own.plan.offload != "none" and _named(own) in place.families:
            because = f"{rule} does not fit without offload"
        else:
            speed = own.cost.tokens_per_second / max(other.cost.tokens_per_second for other in place.equals)
            because = f"{own.plan.strategy} fits, and reaches {speed:.0%} of the speed"
        cases.append(Disagreement(place, rule, own, because))
    return cases
