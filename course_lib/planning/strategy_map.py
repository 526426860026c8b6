"""Maps over many searches: the best strategy by model and number of GPUs, and a rule of thumb set beside it."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_lib.planning import hardware, models, strategy
from course_lib.planning.models import Model
from course_lib.planning.strategy import Candidate

SIZES = ("gpt2", "gpt2-xl", "facebook/opt-2.7b", "llama-7b", "facebook/opt-13b", "facebook/opt-30b", "llama-2-70b")
"""From a tenth of a billion to seventy billion parameters."""
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Place:
    """One model on so many GPUs.

    Attributes:
        model: what is trained.
        gpus: how many.
        best: the fastest layout; None where nothing fits.
        why_not: where nothing fits, what would.
    """

    model: Model
    gpus: int
    best: Candidate | None
    why_not: str = ""

    @property
    def family(self) -> str:
        """The best layout's family, with what the layout needs beside it to fit; empty where nothing fits."""
        if self.best is None:
            return ""
        name = strategy.family(self.best.plan)
        return name + (" + offload" if self.best.plan.offload != "none" else "")


def survey(gpu: str, names: Sequence[str] = SIZES, counts: Sequence[int] = GPU_COUNTS, *,
           sequence_length: int = 1024, batch_per_gpu: int = 4,
           families: Sequence[str] = strategy.FAMILIES) -> list[list[Place]]:
    """The best layout of every model on every number of GPUs.

    Args:
        gpu: an accelerator or SageMaker instance.
        names: models, a row each.
        counts: numbers of GPUs, a column each.
        sequence_length: tokens.
        batch_per_gpu: sequences of a step for each GPU, whatever the layout.
        families: of ``strategy.FAMILIES``, those to look at.
    """
    return [[_place(model, gpu, count, sequence_length, batch_per_gpu, families) for count in counts]
            for model in map(models.load, names)]


def _place(model: Model, gpu: str, count: int, length: int, batch: int, families: Sequence[str]) -> Place:
    try:
        result = strategy.search(model, hardware.cluster(gpu, count), length, batch * count, families=families)
    except strategy.NothingFits as why:
        return Place(model, count, None, why.instead)
    return Place(model, count, result.best)


def rule_of_thumb(parameters: float, gpus: int) -> tuple[str, ...]:
    """Families that selection guides recommend by size and number of GPUs alone.

    Under 1 billion parameters DDP, or FSDP where memory asks for it; to 10 billion DDP with checkpointing on one or
    two GPUs, FSDP or ZeRO-3 on more; beyond, offload on up to four, then ZeRO-3.
    """
    if parameters < 1e9:
        return ("DDP",) if gpus < 4 else ("DDP", "FSDP")
    if parameters < 10e9:
        return ("DDP",) if gpus <= 2 else ("FSDP",) if gpus < 8 else ("FSDP", "ZeRO-3")
    return ("FSDP + offload",) if gpus <= 4 else ("ZeRO-3", "ZeRO-3 + offload")


@dataclass(frozen=True)
class Disagreement:
    """Where the search prefers another family than the rule.

    Attributes:
        place: model, GPUs, and the search's choice.
        rule: what the rule recommends.
        fits: the fastest layout of the rule's families; None where none fits.
        because: why the search does not take it.
    """

    place: Place
    rule: tuple[str, ...]
    fits: Candidate | None
    because: str


def disagreements(places: Sequence[Sequence[Place]], gpu: str, *, sequence_length: int = 1024,
                  batch_per_gpu: int = 4) -> list[Disagreement]:
    """Hold a survey against :func:`rule_of_thumb`; the arguments are the survey's."""
    cases = []
    for place in (cell for row in places for cell in row):
        rule = rule_of_thumb(place.model.parameters, place.gpus)
        if place.family in rule:
            continue
        named = [name.removesuffix(" + offload") for name in rule]
        own = _place(place.model, gpu, place.gpus, sequence_length, batch_per_gpu, named).best
        if place.best is None:
            because = "nothing fits"
        elif own is None:
            because = f"{' or '.join(named)} does not fit"
        elif own.plan == place.best.plan:  # the rule's family, with offload or without, against the rule
            without = "fits" if own.plan.offload == "none" else "does not fit"
            because = f"{strategy.family(own.plan)} {without} without offload"
        else:
            speed = own.cost.tokens_per_second / place.best.cost.tokens_per_second
            because = f"{own.plan.strategy} fits, and reaches {speed:.0%} of the speed"
        cases.append(Disagreement(place, rule, own, because))
    return cases
