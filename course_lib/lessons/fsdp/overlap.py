"""Measurements of lesson 06: FSDP over a slow link, waits for weights, and prefetch that hides them.

The functions run on ranks (:func:`course_lib.launching.launch.launch`) and return plain numbers.
"""

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW

from course_lib.lessons.fsdp.lab import Build, averaged, batch_loss, engine_of, sizes
from course_lib.lessons.slow_link import Link, OverSlowLink, Waits, timeline
from course_lib.parallel import blocks
from course_lib.parallel.clock import Clock, Stamp, between
from course_lib.parallel.tp_collectives import gathered


def block_seconds(build: Build, rows: int) -> float:
    """Seconds of a block's forward: the least of all blocks and ranks in two steps with so many rows per rank."""
    engine, clock = engine_of("scratch", build), Clock(Accelerator().device)
    begun, ended = _stamps_of_blocks(engine.module, clock)
    for step in range(2):
        batch_loss(engine, step, rows * dist.get_world_size()).backward()
    clock.settle()
    own = torch.tensor(min(map(between, begun, ended)), device=clock.device)
    return min(gathered(own[None], None, 0).tolist())


def _stamps_of_blocks(module: nn.Module, clock: Clock) -> tuple[list[Stamp], list[Stamp]]:
    """Two lists that fill with begin and end of each block's forward, without what it waits for before."""
    begun: list[Stamp] = []
    ended: list[Stamp] = []
    for block in blocks.blocks(module).values():
        block.register_forward_pre_hook(lambda *_: begun.append(clock.stamp()))
        block.register_forward_hook(lambda *_: ended.append(clock.stamp()))
    return begun, ended


def over_slow_link(
    build: Build,
    rows: int,
    link: Link,
    prefetch: bool,
    tries: int = 5,
    reductions: bool = False,
) -> Waits:
    """A step in which all-gathers take as long as over a link; on the CPU.

    The link is simulated: the data arrive as fast as they do here, and ``wait`` returns no earlier than the link
    would have let it. What is slow about it costs no computation, as on a GPU's own network card.

    Args:
        build: makes the model.
        rows: of this rank in a step.
        link: that the all-gathers go over.
        prefetch: gather a block while the one before it computes.
        tries: steps, an odd number.
        reductions: reduce-scatters go over the link too.

    Returns:
        The step whose waiting is the median, with what each of the steps waited.
    """
    engine, share = _slow_engine(build, prefetch)
    steps = [
        _slow_step(engine, link, link.seconds(share * sizes(build()).block), rows, step, reductions)
        for step in range(tries)
    ]
    middle = sorted(steps, key=lambda waits: waits.waited)[(tries - 1) // 2]
    return replace(middle, of_all=tuple(waits.waited for waits in steps))


@dataclass(frozen=True)
class Overlap:
    """Steps over a slow link with so many rows per rank.

    Attributes:
        rows: of each rank.
        link: that the collectives go over.
        forward: median seconds that a block computes forward, in the same steps.
        gather: seconds of a block's all-gather.
        steps: seconds of each step, by whether it prefetches.
        predicted: seconds of a step over no link, measured, and of its waits by
            :func:`course_lib.lessons.slow_link.timeline`, likewise.
    """

    rows: int
    link: Link
    forward: float
    gather: float
    steps: dict[bool, list[float]]
    predicted: dict[bool, float]

    @property
    def medians(self) -> dict[bool, float]:
        return {prefetch: statistics.median(tries) for prefetch, tries in self.steps.items()}

    @property
    def gain(self) -> float:
        """Median step without prefetch over the one with it."""
        return self.medians[False] / self.medians[True]


def overlaps(build: Build, rows: Sequence[int], balanced: int, tries: int = 5) -> list[Overlap]:
    """Steps with and without prefetch over one link, for several numbers of rows; on the CPU.

    The link is such that a block's all-gather takes as long as its forward with ``balanced`` rows, a tenth of it
    latency. All-gathers and reduce-scatters share it. All steps take turns, and blocks are timed in them: what else the
    machine does meets the prediction as it meets the measurement.

    Args:
        build: makes the model.
        rows: per rank, for each of the experiments.
        balanced: one of ``rows``.
        tries: steps of each way; an odd number.
    """
    engines = {prefetch: _slow_engine(build, prefetch) for prefetch in (False, True)}
    bill, share = sizes(build()), engines[True][1]
    clock = Clock(Accelerator().device)
    stamps = {prefetch: _stamps_of_blocks(engine.module, clock) for prefetch, (engine, _) in engines.items()}
    forwards: dict[int, list[float]] = {count: [] for count in rows}

    def seconds(count: int, prefetch: bool, link: Link, step: int) -> float:
        for seen in stamps[prefetch]:
            seen.clear()
        taken = _slow_step(engines[prefetch][0], link, 0.0, count, step, reductions=True)
        forwards[count] += map(between, *stamps[prefetch])
        return averaged(torch.tensor(taken.step, dtype=torch.float64))

    def median_forward(count: int) -> float:
        return averaged(torch.tensor(statistics.median(forwards[count]), dtype=torch.float64))

    # --- the first turn is slow; the second says how long a block takes, and so what the link is ---
    for step in range(2):
        forwards[balanced].clear()
        for count in rows:
            for prefetch in engines:
                seconds(count, prefetch, Link(0.0), step)
    alone = median_forward(balanced)
    link = Link(0.1 * alone, share * bill.block / (0.9 * alone))
    gather, root = (link.seconds(share * size) for size in (bill.block, bill.root))
    # --- in turns: over no link, and over the link in both ways ---
    steps: dict[int, dict[bool, list[float]]] = {count: {False: [], True: []} for count in rows}
    unlinked: dict[int, list[float]] = {count: [] for count in rows}
    for count in rows:
        forwards[count].clear()
    for step in range(tries):
        for count in rows:
            unlinked[count].append(seconds(count, True, Link(0.0), step))
            for prefetch, of_all in steps[count].items():
                of_all.append(seconds(count, prefetch, link, step))
    measured = []
    for count in rows:
        forward = median_forward(count)
        predicted = {
            prefetch: statistics.median(unlinked[count])
            + timeline(bill.blocks, forward, gather, gather, prefetch, root).waited
            for prefetch in engines
        }
        measured.append(Overlap(count, link, forward, gather, steps[count], predicted))
    return measured


def _slow_engine(build: Build, prefetch: bool) -> tuple[OverSlowLink, float]:
    """FSDP over a slow link, and the share of a collective's bytes that a rank sends, (N - 1) / N."""
    model = build().to(Accelerator().device)
    ranks = dist.get_world_size()
    return OverSlowLink(model, AdamW(model.parameters()), prefetch=prefetch), (ranks - 1) / ranks


def _slow_step(engine: OverSlowLink, link: Link, gather: float, rows: int, step: int, reductions: bool) -> Waits:
    clock = Clock(Accelerator().device)
    spans = engine.slow_down(link, reductions)
    dist.barrier()
    begin = clock.stamp()
    batch_loss(engine, step, rows * dist.get_world_size()).backward()
    finish = clock.stamp()
    clock.settle()
    start, end = clock.seconds(begin), clock.seconds(finish)
    return Waits(gather, end - start, [(since - start, until - start) for since, until in spans])


# --- A trace ---


@dataclass(frozen=True)
class TraceEvent:
    """A span in a trace of ``fully_shard``, in milliseconds from the first one's beginning.

    Attributes:
        lane: ``compute``, ``all-gather`` from where it is asked for to where it is needed, or ``reduce-scatter``.
        block: its number; None for the root.
        early: a gather that was asked for while another block still had to compute.
    """

    lane: str
    block: int | None
    begin: float
    end: float
    early: bool = False


def fsdp_events(events: Iterable[Any]) -> list[TraceEvent]:
    """Events of FSDP2 in a profiler's: those that the engine names ``FSDP::… (transformer.h.3)``.

    Args:
        events: of ``torch.profiler.profile.events()``: ``name``, and ``time_range`` in microseconds.
    """
    named = sorted(
        (
            (event.time_range.start / 1e3, event.time_range.end / 1e3, match["what"], _number(match["module"]))
            for event in events
            if (match := _FSDP.fullmatch(event.name))
        ),
        key=lambda event: event[0],
    )
    start = named[0][0]
    spans: list[TraceEvent] = []
    since: dict[tuple[str, int | None], float] = {}
    for begin, end, what, block in named:
        begin, end = begin - start, end - start
        if what in ("pre_forward", "pre_backward"):
            since["compute", block] = end
        elif what == "all_gather":
            since["all-gather", block] = begin
        elif what == "all_gather_copy_out":
            spans.append(TraceEvent("all-gather", block, since["all-gather", block], begin))
        elif what in ("post_forward", "post_backward_accumulate") and block is not None:
            spans.append(TraceEvent("compute", block, since["compute", block], begin))
        elif what == "post_backward_reduce":
            spans.append(TraceEvent("reduce-scatter", block, begin, end))
    computed = sorted((span for span in spans if span.lane == "compute"), key=lambda span: span.begin)

    def is_early(span: TraceEvent) -> bool:
        following = next((other for other in computed if other.end > span.begin), None)
        return span.lane == "all-gather" and following is not None and following.block != span.block

    marked = [replace(span, early=span.block is not None and is_early(span)) for span in spans]
    return sorted(marked, key=lambda span: span.begin)


_FSDP = re.compile(r"FSDP::(?P<what>\w+)(?: \((?P<module>[\w.]+)\))?")


def _number(module: str | None) -> int | None:
    return int(module.rsplit(".", 1)[1]) if module else None
