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
    boards = [
        _fit(ScheduleBuilder(loop(ranks), microbatches, costs, exact(limit)), *settings)
        for settings in product((True, False), repeat=3)
    ]
    return min(boards, key=ScheduleBuilder.longest).schedule("zb_auto")


def _fit(board: ScheduleBuilder, wait_for_first: bool, backward_first: bool, eager: bool) -> ScheduleBuilder:
    """One table: rounds of at most one forward and exactly one backward on every rank."""
    ranks = board.ranks
    # --- warm-up: until the first gradient has come back to rank 0 ---
    _warm_up(board, wait_for_first)
    # --- rounds: forwards down the ranks, then backwards up, W where a rank would wait ---
    for _ in range(1, board.microbatches):
        wanted = [board.left(rank, F) and not (backward_first and _holds_back(board, rank)) for rank in range(ranks)]
        for rank in range(ranks):
            if not all(wanted[rank:]):  # a forward is of no use while a later rank takes none
                continue
            board.make_room(rank)
            board.fill(rank, F, max(board.waits) - board.waits[rank], beyond=True, within=eager)
            board.put(rank, F)
        for rank in reversed(range(ranks)):
            board.fill(rank, I, max(board.waits) - board.waits[rank], beyond=True, within=eager)
            if rank == 0 and not board.left(rank, F):
                board.put_weights(rank)
            board.put(rank, I)
    return board


def _warm_up(board: ScheduleBuilder, wait_for_first: bool) -> None:
    """The first micro-batch down and up again, with further forwards while its gradient is on the way."""
    ranks, total = board.ranks, board.microbatches
    # --- micro-batch 0 down ---
    for rank in range(ranks):
        board.put(rank, F)
    # --- how many more forwards each rank can do before its gradient is back, by time and by memory ---
    more = [0] * ranks
    last = ranks - 1
    gradient = board.clock[last] + board.length[last, I]  # when the first gradient leaves the rank below
    for rank in reversed(range(last)):
        clock, forward = board.clock[rank], board.length[rank, F]
        while more[rank] + 1 < total and board.fits(rank, more[rank] + 1):
            arrival = gradient + board.latency
            if clock + forward > arrival if wait_for_first else clock >= arrival:
                break
            clock += forward
            more[rank] += 1
        gradient = max(clock, gradient + board.latency) + board.length[rank, I]
    # --- no rank more than the one above, whose outputs they need ---
    for rank in range(1, ranks):
        while more[rank] > 0 and more[rank - 1] <= more[rank] < total - 1:
            more[rank] -= 1
    # --- these forwards, and micro-batch 0 up ---
    for rank in range(ranks):
        for _ in range(more[rank]):
            board.put(rank, F)
    for rank in reversed(range(ranks)):
        board.put(rank, I)


def _holds_back(board: ScheduleBuilder, rank: int) -> bool:
    """Whether a rank had better wait for the next gradient than begin a forward that the next rank cannot use yet."""
    if rank + 1 == board.ranks or board.done[rank, F] < board.done[rank + 1, F] + 2:
        return False
    clock = board.clock[rank]
    gradient = board.clock[rank + 1] + board.length[rank + 1, F] + board.length[rank + 1, I] + board.latency
    if clock >= gradient:
        return True
    over = board.held[rank] + board.activation[rank] - board.limit
    weights = min(len(board.owed[rank]), -(-over // board.kept[rank])) if over > 0 and board.kept[rank] else 0
    if clock + board.length[rank, F] + weights * board.length[rank, W] <= gradient:
        return False
    return gradient - clock <= max(board.waits) - board.waits[rank]


def fit_v(ranks: int, microbatches: int, costs: Costs, limit: Number | None = None) -> Schedule:
    """The best table found for two stages a rank in a V.

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
    boards = []
    for settings in product((True, False), repeat=2):
        boards.append(_fit_v(ScheduleBuilder(v_shape(ranks, 2), microbatches, costs, most), [0] * ranks, *settings))
        worst = None
        while worst is None or max(boards[-1].waits) < worst:  # again, knowing how long each rank waits
            worst = max(boards[-1].waits)
            empty = ScheduleBuilder(v_shape(ranks, 2), microbatches, costs, most)
            boards.append(_fit_v(empty, boards[-1].waits, *settings))
    return min(boards, key=ScheduleBuilder.longest).schedule("zbv_auto")


def _fit_v(board: ScheduleBuilder, expected: list[int], spill_forward: bool, spill_backward: bool) -> ScheduleBuilder:
    """One attempt: rounds of at most one forward and exactly one backward on every rank.

    A micro-batch makes four laps: forward down and up the V, back down and up again as gradients.
    """
    _warm_up_v(board)
    ranks, total = board.ranks, board.microbatches
    down, up = range(ranks), range(2 * ranks - 1, ranks - 1, -1)  # the first and the second stage of each rank

    def fill(rank: int, stage: int, kind: str, spill: bool) -> None:
        allowed = max(*board.waits, max(expected) - expected[rank])
        board.fill(stage, kind, allowed - board.waits[rank], spill)

    for _ in range(2 * total):
        returning = [
            board.done[down[rank], I] < board.done[up[rank], I]
            and (rank == ranks - 1 or board.arrival(down[rank], I) is not None or not board.left(up[rank], I))
            for rank in range(ranks)
        ]
        for rank in sorted(range(ranks), key=lambda rank: (not returning[rank], -rank if returning[rank] else rank)):
            stage = down[rank] if returning[rank] else up[rank]
            fill(rank, stage, I, spill=returning[rank] or spill_backward)
            board.put(stage, I)
        for rank in range(ranks):
            forward = _next_forward(board, down[rank], up[rank])
            if forward is not None:
                board.make_room(forward)
                fill(rank, forward, F, spill=spill_forward)
                board.put(forward, F)
    return board


def _next_forward(board: ScheduleBuilder, down: int, up: int) -> int | None:
    """Which of a rank's two stages goes forward next: the second if its input is there, else the first."""
    if not board.left(up, F):
        return None
    if board.done[up, F] >= board.done[down, F]:
        return down
    if up == down + 1 or board.arrival(up, F) is not None:
        return up
    return down if board.left(down, F) and (down == 0 or board.arrival(down, F) is not None) else None


def _warm_up_v(board: ScheduleBuilder) -> None:
    """The first micro-batches down the V and up, then more of both so that no rank has fewer than the one above."""
    ranks, total = board.ranks, board.microbatches
    # --- micro-batch 0 down the V, and up; on its way each rank fills its wait with forwards of its first stage ---
    for rank in range(ranks):
        board.put(rank, F)
    board.put(ranks, F)
    for rank in reversed(range(ranks - 1)):
        returns = board.arrival(2 * ranks - 1 - rank, F) or 0
        while (
            board.fits(rank, 2 + 2 * rank)
            and board.clock[rank] + board.length[rank, F] <= returns
            and board.done[rank, F] < total - rank
        ):
            for above in range(rank + 1):
                board.put(above, F)
        board.put(2 * ranks - 1 - rank, F)
    # --- level the ranks, first stages and second stages in turn ---
    rising = False
    for rank in range(1, ranks):
        while _behind(board, rank):
            for below in reversed(range(rank, ranks)):
                stage = 2 * ranks - 1 - below if rising else below
                if board.left(stage, F):
                    board.put(stage, F)
            rising = not rising


def _behind(board: ScheduleBuilder, rank: int) -> bool:
    """Whether a rank has fewer forwards than the one above it, or no more of the second stage."""
    last = board.stages - 1
    down, up = board.done[rank, F], board.done[last - rank, F]
    down_above, up_above = board.done[rank - 1, F], board.done[last - rank + 1, F]
    return down + up < down_above + up_above or up <= up_above < board.microbatches
