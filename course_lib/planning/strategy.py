"""The search: every legal layout of a model over a cluster, pruned by memory, ranked by predicted throughput.

What fits with a chance of less than half does not fit.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any

from course_lib.errors import ConfigError
from course_lib.planning import cost, hardware, memory, to_launchers
from course_lib.planning.cost import WAITING, Cost
from course_lib.planning.hardware import Cluster, accelerators
from course_lib.planning.intervals import chance_that_it_fits
from course_lib.planning.layouts import NOTHING, TRIED, default_batch, layouts, variants
from course_lib.planning.memory import HOST_USABLE, RUNTIME, USABLE, Memory
from course_lib.planning.models import Model
from course_lib.planning.plan import FAMILIES, Loss, Plan

LIKELY = 0.8
"""Chance to fit from which on a layout is proposed before all that are less likely to, however fast they are."""
AT_LEAST = 0.5
"""Chance from which on a layout fits: that of a peak of :data:`course_lib.planning.memory.USABLE`."""


class NothingFits(ConfigError):
    """No layout divides the GPUs and the batch, or none fits; the message says the smallest change that would."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its memory and its cost."""

    plan: Plan
    memory: Memory
    cost: Cost
    chance: float
    """That it fits, by the errors of published runs; AT_LEAST or more."""


@dataclass(frozen=True)
class Failed:
    """The layout of a family that comes nearest to fitting, and what would make it fit."""

    family: str
    plan: Plan
    memory: Memory
    remedy: str


@dataclass(frozen=True)
class Search:
    """All that fits, in the order of :func:`place`, and the families that do not."""

    model: Model
    cluster: Cluster
    candidates: list[Candidate]
    failed: list[Failed]
    considered: int

    @property
    def best(self) -> Candidate:
        """The fastest of those that are likely to fit; if none is, the fastest."""
        return self.candidates[0]

    def for_our_trainer(self) -> "Search":
        """The same, with what ``course train`` runs and is likely to fit before what other trainers run."""
        return replace(
            self,
            candidates=sorted(
                self.candidates,
                key=lambda candidate: (
                    candidate.chance < LIKELY or not to_launchers.runs_here(candidate.plan, self.model)
                ),
            ),
        )

    def best_of_each(self) -> list[Candidate]:
        """The first of each family, in the same order."""
        seen: dict[str, Candidate] = {}
        for candidate in self.candidates:
            seen.setdefault(family(candidate.plan), candidate)
        return list(seen.values())


def family(plan: Plan) -> str:
    """The family of strategies that a plan belongs to."""
    if plan.tensor * plan.pipeline > 1:
        return "3-D"
    if plan.expert > 1:
        return f"ZeRO-{plan.stage}" if plan.stage else "DDP"
    return {"ddp": "DDP", "fsdp": "FSDP", "deepspeed": f"ZeRO-{plan.stage}"}[plan.engine]


def search(
    model: Model,
    cluster: Cluster,
    sequence_length: int,
    global_batch: int | None = None,
    precision: str | None = None,
    families: Collection[str] = FAMILIES,
    settings: Mapping[str, Any] = NOTHING,
    losses: Collection[Loss] = TRIED,
) -> Search:
    """Rank every layout that fits: see :func:`place`.

    Args:
        model: what to train.
        cluster: what to train it on; all its GPUs are used.
        sequence_length: tokens; the architecture's context is its limit.
        global_batch: sequences of one step; default: :func:`default_batch`.
        precision: of the matmuls; default: the accelerator's 16-bit type.
        families: of ``FAMILIES``, those to look at.
        settings: fields of :class:`Plan` that every layout has: an optimizer, adapters, a loss.
        losses: to try where ``settings`` name none.

    Raises:
        ConfigError: a sequence that is too long.
        NothingFits: what it says.
    """
    if not 1 <= sequence_length <= (model.context or sequence_length):
        raise ConfigError(
            f"sequence length {sequence_length}, and {model.name} takes 1 to {model.context}",
            f"give --sequence-length {model.context}",
        )
    precision = precision or cluster.accelerator.half_precision()
    cluster.accelerator.matmul_rate(precision)
    asked = _Asked(model, cluster, sequence_length, global_batch, precision, families, settings, losses)
    candidates: list[Candidate] = []
    nearest_fit: dict[str, tuple[Plan, Memory]] = {}
    considered = 0
    for plan in (variant for layout in asked.layouts() for variant in variants(layout, model)):
        considered += 1
        held = memory.estimate(model, plan)
        if held.fits(cluster.accelerator.memory, cluster.host_memory):
            chance = chance_that_it_fits(held.total, cluster.accelerator.memory)
            candidates.append(Candidate(plan, held, cost.estimate(model, plan, cluster), chance))
            continue
        known = nearest_fit.get(family(plan))
        if known is None or taken(held, cluster) < taken(known[1], cluster):
            nearest_fit[family(plan)] = (plan, held)
    if not considered:
        raise NothingFits(
            f"a global batch of {asked.batch} on {cluster.gpus} GPUs divides among no layout of {model.name}",
            f"give --global-batch {-(-asked.batch // cluster.gpus) * cluster.gpus}",
        )
    if not candidates:
        closest, held = min(nearest_fit.values(), key=lambda pair: taken(pair[1], cluster))
        raise NothingFits(
            f"{model.name} does not fit on {cluster.gpus} x {cluster.accelerator.name}: the nearest layout "
            f"({closest.strategy}, micro-batch {closest.micro_batch}) takes {_of_what_there_is(held, cluster)}",
            _smallest_change(asked),
        )
    candidates.sort(key=place)
    fitting = {family(candidate.plan) for candidate in candidates}
    failed = [
        Failed(name, *nearest_fit[name], remedy=remedy(model, cluster, nearest_fit[name][0]))
        for name in FAMILIES
        if name in nearest_fit and name not in fitting
    ]
    return Search(model, cluster, candidates, failed, considered)


@dataclass(frozen=True)
class _Asked:
    """The arguments of :func:`search`."""

    model: Model
    cluster: Cluster
    sequence_length: int
    global_batch: int | None
    precision: str
    families: Collection[str]
    settings: Mapping[str, Any]
    losses: Collection[Loss]

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        given = self.global_batch
        return default_batch(self.cluster.gpus, self.sequence_length) if given is None else given

    def layouts(self) -> Iterator[Plan]:
        """The layouts of the families."""
        gpus, offload = (self.cluster.gpus, self.cluster.gpus_per_node), self.cluster.accelerator.has_host
        layout_sizes = (*gpus, self.sequence_length, self.batch, self.precision, offload)
        every = layouts(self.model, *layout_sizes, self.settings, self.losses)
        return (layout for layout in every if family(layout) in self.families)

    def anything_fits(self) -> bool:
        """Whether some layout fits at micro-batch 1 with recomputation."""
        capacity, host = self.cluster.accelerator.memory, self.cluster.host_memory
        recomputing = (replace(plan, checkpointing="full") for plan in self.layouts())
        return any(memory.estimate(self.model, plan).fits(capacity, host) for plan in recomputing)


def _of_what_there_is(held: Memory, cluster: Cluster) -> str:
    """How much of a GPU and of the host what does not fit takes, and its chance to fit all the same."""
    there = cluster.accelerator.memory
    chance = chance_that_it_fits(held.total, there)
    gpu = f"{held.total / 2**30:.1f} of {there / 2**30:.1f} GiB per GPU, a chance of {chance:.0%}"
    if not held.host:
        return gpu
    return f"{gpu} and {held.host / 2**30:.1f} of {cluster.host_memory / 2**30:.1f} GiB of host memory for each"


def place(candidate: Candidate) -> tuple[float, ...]:
    """Key that candidates are sorted by.

    First those that fit with a chance of LIKELY or more, of each group the fastest first: what differs by less than a
    thousandth is equal, and fewer, larger micro-batches have fewer kernels to launch.
    """
    return (
        candidate.chance < LIKELY,
        -round(1000 * log(candidate.cost.tokens_per_second)),
        candidate.plan.accumulation,
    )


def taken(held: Memory, cluster: Cluster) -> float:
    """Share of what may be taken of a GPU or of its host's memory, the larger of the two; up to 1 it fits."""
    return max(
        held.total / USABLE / (cluster.accelerator.memory - RUNTIME),
        held.host / HOST_USABLE / max(cluster.host_memory, 1.0),
    )


def needed(held: Memory) -> float:
    """Bytes of GPU memory with which ``held`` fits, with a chance of AT_LEAST."""
    return held.total / USABLE + RUNTIME


def remedy(model: Model, cluster: Cluster, plan: Plan) -> str:
    """The smallest change after which a layout fits: more GPUs, or a larger one."""

    def fits(gpus: int) -> bool:
        return memory.estimate(model, replace(plan, data=gpus)).fits(cluster.accelerator.memory, cluster.host_memory)

    # More shards never need more, but where experts are filled up to a shard for each.
    if (
        plan.stage
        and plan.tensor * plan.pipeline * plan.replicas * plan.expert == 1
        and not memory.expert_padding(model, plan)
        and fits(64 * plan.data)
    ):
        enough = bisect_left(range(64 * plan.data), True, lo=plan.data, key=fits)
        return f"fits from {enough * plan.context} GPUs on"
    held = memory.estimate(model, plan)
    size = needed(held)
    if size <= cluster.accelerator.memory:
        return f"would need {held.host / HOST_USABLE / 2**30:,.0f} GiB of host memory for each GPU"
    larger = [chip for chip in accelerators().values() if chip.memory >= size and chip.name != "CPU"]
    if larger:
        chip = min(larger, key=lambda larger_chip: larger_chip.memory)
        return f"fits on a GPU with {size / 2**30:.1f} GiB, such as {chip.name}"
    return f"would need a GPU with {size / 2**30:,.0f} GiB; shard it instead"


def _smallest_change(asked: _Asked) -> str:
    """Options that would let one layout in, after a search that found none."""
    cluster, chip = asked.cluster, asked.cluster.accelerator
    of_this_kind = partial(hardware.cluster, cluster.instance or chip.name, memory_gb=chip.memory / 2**30)
    larger = sorted(
        (other for other in accelerators().values() if other.memory > chip.memory), key=lambda other: other.memory
    )
    shorter = [asked.sequence_length >> halvings for halvings in range(1, asked.sequence_length.bit_length())]
    changes: list[Iterator[tuple[str, _Asked]]] = [
        (
            (f"--gpus {count}", replace(asked, cluster=of_this_kind(count)))
            for count in range(2 * cluster.gpus, 64 * cluster.gpus + 1, cluster.gpus)
        ),
        (
            (
                f"--gpu {other.name}",
                replace(asked, cluster=hardware.cluster(other.name, cluster.gpus), precision=other.half_precision()),
            )
            for other in larger
        ),
        (
            (f"--sequence-length {length}", replace(asked, sequence_length=length))
            for length in shorter
            if length >= 128
        ),
    ]
    options = (next((option for option, change in tried if change.anything_fits()), None) for tried in changes)
    hints = [option for option in options if option]
    return "it fits with " + " or ".join(hints) if hints else "take a smaller model, or more GPUs of a larger kind"


def explain(result: Search) -> list[str]:
    """Sentences: why the best plan, what the next best is and costs, what would have to change for the others."""
    elsewhere = _faster_elsewhere(result)
    second = next((c for c in result.best_of_each() if family(c.plan) != family(result.best.plan)), None)
    return [
        _why_best(result, "the fastest that `course train` runs" if elsewhere else "the fastest"),
        *([_who_runs(elsewhere, result)] if elsewhere else []),
        *([_next_best(second, result.best)] if second else []),
        *(_why_not(failure, result.cluster) for failure in result.failed),
    ]


def _faster_elsewhere(result: Search) -> Candidate | None:
    """The fastest of those that are likely to fit and run with other trainers alone, where the best runs here."""
    if result.best.chance < LIKELY or not to_launchers.runs_here(result.best.plan, result.model):
        return None
    elsewhere = max(
        (c for c in result.candidates if c.chance >= LIKELY and not to_launchers.runs_here(c.plan, result.model)),
        default=result.best,
        key=lambda candidate: candidate.cost.tokens_per_second,
    )
    return elsewhere if _gain(elsewhere, result.best) >= 0.005 else None


def _gain(candidate: Candidate, best: Candidate) -> float:
    """By what share of its speed a layout is faster than the best."""
    return candidate.cost.tokens_per_second / best.cost.tokens_per_second - 1


def _why_best(result: Search, first: str) -> str:
    """Of how many it is ``first``, how its step's time divides, and the memory that stays free."""
    best, spent = result.best, result.best.cost
    shares = sorted(((getattr(spent, name) / spent.step, name) for name in WAITING), reverse=True)
    rest = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)
    free = result.cluster.accelerator.memory - needed(best.memory)
    likely = sum(candidate.chance >= LIKELY for candidate in result.candidates)
    among = f"{likely or 'none'} of them with a chance of {LIKELY:.0%}{' or more' if likely else ''}"
    return (
        f"{best.plan.strategy} is {first} of {len(result.candidates)} layouts that fit, {among}, of "
        f"{result.considered} tried: {spent.compute / spent.step:.0%} of a step computes"
        f"{f'; beside it {rest}' if rest else ''}. {free / 2**30:.1f} GiB per GPU stay free beyond the "
        "planner's margin."
    )


def _who_runs(elsewhere: Candidate, result: Search) -> str:
    """By how much a layout for other trainers is faster, with which, and why `course train` does not run it."""
    return (
        f"Faster by {_gain(elsewhere, result.best):.0%} with {to_launchers.elsewhere(elsewhere.plan, result.model)}: "
        f"{elsewhere.plan.strategy}, micro-batch {elsewhere.plan.micro_batch}, with a chance of "
        f"{elsewhere.chance:.0%} to fit; `course train` {to_launchers.why_not(elsewhere.plan, result.model)}."
    )


def _next_best(second: Candidate, best: Candidate) -> str:
    """How fast it is, and what takes longer there."""
    more = {
        name: getattr(second.cost, name) / second.cost.step - getattr(best.cost, name) / best.cost.step
        for name in WAITING
    }
    worst = max(more, key=lambda name: more[name])
    because = f", {worst} takes {more[worst]:.0%} more of the step" if more[worst] >= 0.005 else ""
    return (
        f"Next best: {second.plan.strategy}, at {second.cost.tokens_per_second / best.cost.tokens_per_second:.1%} of "
        f"its speed, with a chance of {second.chance:.0%} to fit{because}."
    )


def _why_not(failure: Failed, cluster: Cluster) -> str:
    """How much memory a family is short of, and its remedy."""
    short, of = needed(failure.memory) - cluster.accelerator.memory, ""
    if short <= 0:
        short, of = failure.memory.host / HOST_USABLE - cluster.host_memory, " of host memory per GPU"
    return (
        f"{failure.family} does not fit: {failure.plan.strategy} is {short / 2**30:.1f} GiB{of} short; "
        f"{failure.remedy}."
    )
