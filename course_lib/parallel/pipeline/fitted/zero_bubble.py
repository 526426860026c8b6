"""Tables fitted to measured times and a memory limit, by the zero-bubble paper's greedy rules.

The tables of ``schedules.py`` are drawn for F, I and W of equal length. Here the times are given: gradients of
weights go where a rank would wait, as long as it would not be the one that waits longest anyway. Several settings
of the rules are tried and the best table is kept.

Source: arXiv 2401.10241 section 3.1 (:func:`fit`: ZB-1p with a limit of p activations, ZB-2p with 2p) and section
6 (:func:`fit_v`: ZB-V), with the details of its repository, sail-sg/zero-bubble-pipeline-parallelism.
"""

from itertools import product

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import F, I, Schedule, W, loop, v_shape
from course_lib.parallel.pipeline.fitted.schedule_builder import ScheduleBuilder
from course_lib.parallel.pipeline.simulation import Costs, Number, exact


def fit(ranks: int, microbatches: int, costs: Costs, limit: Number) -> Schedule:
    """The best table found for one stage a rank.

    Args:
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        costs: of one micro-batch in one stage.
        limit: bytes that a rank may hold; in the unit of ``costs.activation``.

    Raises:
        ConfigError: a rank cannot hold even one micro-batch.
    """
    builders = [
        _fit(ScheduleBuilder(loop(ranks), microbatches, costs, exact(limit)), *settings)
        for settings in product((True, False), repeat=3)
    ]
    return min(builders, key=ScheduleBuilder.longest).schedule("zb_auto")


def _fit(builder: ScheduleBuilder, wait_for_first: bool, backward_first: bool, eager: bool) -> ScheduleBuilder:
    """One table: rounds of at most one forward and exactly one backward on every rank."""
    ranks = builder.ranks
    # --- warm-up: until the first gradient has come back to rank 0 ---
    _warm_up(builder, wait_for_first)
    # --- rounds: forwards down the ranks, then backwards up, W where a rank would wait ---
    for _ in range(1, builder.microbatches):
        wanted = [
            builder.left(rank, F) and not (backward_first and _holds_back(builder, rank)) for rank in range(ranks)
        ]
        for rank in range(ranks):
            if not all(wanted[rank:]):  # a forward is of no use while a later rank takes none
                continue
            builder.make_room(rank)
            builder.fill(rank, F, max(builder.waits) - builder.waits[rank], beyond=True, within=eager)
            builder.put(rank, F)
        for rank in reversed(range(ranks)):
            builder.fill(rank, I, max(builder.waits) - builder.waits[rank], beyond=True, within=eager)
            if rank == 0 and not builder.left(rank, F):
                builder.put_weights(rank)
            builder.put(rank, I)
    return builder


def _warm_up(builder: ScheduleBuilder, wait_for_first: bool) -> None:
    """The first micro-batch down and up again, with further forwards while its gradient is on the way."""
    ranks, total = builder.ranks, builder.microbatches
    # --- micro-batch 0 down ---
    for rank in range(ranks):
        builder.put(rank, F)
    # --- how many more forwards each rank can do before its gradient is back, by time and by memory ---
    more = [0] * ranks
    last = ranks - 1
    gradient = builder.clock[last] + builder.length[last, I]  # when the first gradient leaves the rank below
    for rank in reversed(range(last)):
        clock, forward = builder.clock[rank], builder.length[rank, F]
        while more[rank] + 1 < total and builder.fits(rank, more[rank] + 1):
            arrival = gradient + builder.latency
            if clock + forward > arrival if wait_for_first else clock >= arrival:
                break
            clock += forward
            more[rank] += 1
        gradient = max(clock, gradient + builder.latency) + builder.length[rank, I]
    # --- no rank more than the one above, whose outputs they need ---
    for rank in range(1, ranks):
        while more[rank] > 0 and more[rank - 1] <= more[rank] < total - 1:
            more[rank] -= 1
    # --- these forwards, and micro-batch 0 up ---
    for rank in range(ranks):
        for _ in range(more[rank]):
            builder.put(rank, F)
    for rank in reversed(range(ranks)):
        builder.put(rank, I)


def _holds_back(builder: ScheduleBuilder, rank: int) -> bool:
    """Whether a rank had better wait for the next gradient than begin a forward that the next rank cannot use yet."""
    if rank + 1 == builder.ranks or builder.done[rank, F] < builder.done[rank + 1, F] + 2:
        return False
    clock = builder.clock[rank]
    gradient = builder.clock[rank + 1] + builder.length[rank + 1, F] + builder.length[rank + 1, I] + builder.latency
    if clock >= gradient:
        return True
    over = builder.held[rank] + builder.activation[rank] - builder.limit
    weights = min(len(builder.owed[rank]), -(-over // builder.kept[rank])) if over > 0 and builder.kept[rank] else 0
    if clock + builder.length[rank, F] + weights * builder.length[rank, W] <= gradient:
        return False
    return gradient - clock <= max(builder.waits) - builder.waits[rank]


def fit_v(ranks: int, microbatches: int, costs: Costs, limit: Number | None = None) -> Schedule:
    """The best table found for two stages per rank in a V.

    Args:
        ranks: ranks of the pipeline.
        microbatches: micro-batches of one step.
        costs: of one micro-batch in one stage, the same for all stages.
        limit: bytes that a rank may hold; None: two activations for each rank, as much as 1F1B.

    Raises:
        ConfigError: too few micro-batches, or too little memory to begin with.
    """
    if microbatches < 2 * ranks:
        raise ConfigError(
            f"a fitted ZB-V with {microbatches} micro-batches on {ranks} ranks",
            f"it takes at least as many as stages, {2 * ranks}",
        )
    most = 2 * ranks * costs.of("activation", 2 * ranks)[0] if limit is None else exact(limit)
    builders = []
    for settings in product((True, False), repeat=2):
        builders.append(_fit_v(ScheduleBuilder(v_shape(ranks, 2), microbatches, costs, most), [0] * ranks, *settings))
        worst = None
        while worst is None or max(builders[-1].waits) < worst:  # again, knowing how long each rank waits
            worst = max(builders[-1].waits)
            empty = ScheduleBuilder(v_shape(ranks, 2), microbatches, costs, most)
            builders.append(_fit_v(empty, builders[-1].waits, *settings))
    return min(builders, key=ScheduleBuilder.longest).schedule("zbv_auto")


def _fit_v(builder: ScheduleBuilder, expected: list[int], spill_forward: bool, spill_backward: bool) -> ScheduleBuilder:
    """One attempt: rounds of at most one forward and exactly one backward on every rank.

    A micro-batch makes four laps: forward down and up the V, back down and up again as gradients.
    """
    _warm_up_v(builder)
    ranks, total = builder.ranks, builder.microbatches
    down, up = range(ranks), range(2 * ranks - 1, ranks - 1, -1)  # the first and the second stage of each rank

    def fill(rank: int, stage: int, kind: str, spill: bool) -> None:
        allowed = max(*builder.waits, max(expected) - expected[rank])
        builder.fill(stage, kind, allowed - builder.waits[rank], spill)

    for _ in range(2 * total):
        returning = [
            builder.done[down[rank], I] < builder.done[up[rank], I]
            and (rank == ranks - 1 or builder.arrival(down[rank], I) is not None or not builder.left(up[rank], I))
            for rank in range(ranks)
        ]
        for rank in sorted(range(ranks), key=lambda rank: (not returning[rank], -rank if returning[rank] else rank)):
            stage = down[rank] if returning[rank] else up[rank]
            fill(rank, stage, I, spill=returning[rank] or spill_backward)
            builder.put(stage, I)
        for rank in range(ranks):
            forward = _next_forward(builder, down[rank], up[rank])
            if forward is not None:
                builder.make_room(forward)
                fill(rank, forward, F, spill=spill_forward)
                builder.put(forward, F)
    return builder


def _next_forward(builder: ScheduleBuilder, down: int, up: int) -> int | None:
    """Which of a rank's two stages goes forward next: the second if its input is there, else the first."""
    if not builder.left(up, F):
        return None
    if builder.done[up, F] >= builder.done[down, F]:
        return down
    if up == down + 1 or builder.arrival(up, F) is not None:
        return up
    return down if builder.left(down, F) and (down == 0 or builder.arrival(down, F) is not None) else None


def _warm_up_v(builder: ScheduleBuilder) -> None:
    """The first micro-batches down the V and up, then more of both so that no rank has fewer than the one above."""
    ranks, total = builder.ranks, builder.microbatches
    # --- micro-batch 0 down the V, and up; on its way each rank fills its wait with forwards of its first stage ---
    for rank in range(ranks):
        builder.put(rank, F)
    builder.put(ranks, F)
    for rank in reversed(range(ranks - 1)):
        returns = builder.arrival(2 * ranks - 1 - rank, F) or 0
        while (
            builder.fits(rank, 2 + 2 * rank)
            and builder.clock[rank] + builder.length[rank, F] <= returns
            and builder.done[rank, F] < total - rank
        ):
            for above in range(rank + 1):
                builder.put(above, F)
        builder.put(2 * ranks - 1 - rank, F)
    # --- level the ranks, first stages and second stages in turn ---
    rising = False
    for rank in range(1, ranks):
        while _behind(builder, rank):
            for below in reversed(range(rank, ranks)):
                stage = 2 * ranks - 1 - below if rising else below
                if builder.left(stage, F):
                    builder.put(stage, F)
            rising = not rising


def _behind(builder: ScheduleBuilder, rank: int) -> bool:
    """Whether a rank has fewer forwards than the one above it, or no more of the second stage."""
    last = builder.stages - 1
    down, up = builder.done[rank, F], builder.done[last - rank, F]
    down_above, up_above = builder.done[rank - 1, F], builder.done[last - rank + 1, F]
    return down + up < down_above + up_above or up <= up_above < builder.microbatches
