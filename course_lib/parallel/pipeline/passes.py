"""Passes: each takes a table and returns another, as a compiler lowers a program step by step.

The generators write computations only; what depends on where stages live, sends and receives, is added here, once for
all schedules (as torch.distributed.pipelining does).
"""

from dataclasses import replace

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import (
    COMPUTE,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    B,
    F,
    I,
    Schedule,
    W,
)


def split_backward(schedule: Schedule) -> Schedule:
    """Each whole backward as the gradient of the input, then that of the weights."""
    rows = tuple(tuple(part for action in row for part in _split(action)) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _split(action: Action) -> tuple[Action, ...]:
    return (action._replace(kind=I), action._replace(kind=W)) if action.kind == B else (action,)


def merge_backward(schedule: Schedule) -> Schedule:
    """Each gradient of an input that its own gradient of the weights follows at once, as one whole backward.

    One walk through the stage is cheaper than two, and nothing is lost where nothing came between.
    """
    return replace(schedule, rows=tuple(map(_merged, schedule.rows)))


def _merged(row: tuple[Action, ...]) -> tuple[Action, ...]:
    merged: list[Action] = []
    for action in row:
        if merged and action.kind == W and merged[-1] == action._replace(kind=I):  # of the same stage and micro-batch
            merged[-1] = action._replace(kind=B)
        else:
            merged.append(action)
    return tuple(merged)


def without_communication(schedule: Schedule) -> Schedule:
    """The computations alone, in their order."""
    return replace(schedule, rows=tuple(tuple(a for a in row if a.kind in COMPUTE) for row in schedule.rows))


def lower(schedule: Schedule) -> Schedule:
    """Add the sends and receives between stages of different ranks.

    All ranks are walked in turn, an action at a time; when an output comes into being, its send is written into the
    sender's row and its receive into the receiver's at that same moment. So both rows hold their common messages in
    one order, and even sends that block until they are received cannot block for ever. The receiver may meet its
    receive long before it needs what comes: a runtime posts it and goes on.

    Raises:
        ConfigError: the table waits for itself, or has sends and receives already.
    """
    if schedule.lowered:
        raise ConfigError(f"{schedule.name} has its sends and receives already", "lower the table of computations")
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    position = [0] * schedule.ranks  # where each rank is in its row
    done: set[tuple[int, str, int]] = set()  # outputs that there are: stage, F or B, micro-batch
    left = sum(map(len, schedule.rows))
    while left:
        before = left
        # --- one round: each rank does its next action, if its input is there ---
        for rank, row in enumerate(schedule.rows):
            if position[rank] == len(row):
                continue
            action = row[position[rank]]
            source = schedule.source(action)
            if source is not None and (*source, action.microbatch) not in done:
                continue
            position[rank] += 1
            left -= 1
            rows[rank].append(action)
            done.add((action.stage, F if action.kind == F else B, action.microbatch))  # W adds what its I has added
            # --- its send and the other side's receive, in the same moment: one order for both ranks ---
            for message in messages(schedule, action):
                rows[schedule.stage_ranks[message.stage]].append(message)
        if left == before:  # a round in which nobody could do anything: nobody ever will
            heads = {rank: row[position[rank]] for rank, row in enumerate(schedule.rows) if position[rank] < len(row)}
            raise ConfigError(
                f"{schedule.name} waits for itself: {waiting(schedule, heads)}", "put what is waited for earlier"
            )
    return replace(schedule, rows=tuple(map(tuple, rows)))


def messages(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The send that this computation gives rise to, and its receive; nothing where no rank boundary is crossed."""
    stage, kind, microbatch = action
    if kind == F and stage + 1 < schedule.stages and schedule.crosses(stage):
        send = Action(stage, SEND_F, microbatch)
    elif kind in (B, I) and stage > 0 and schedule.crosses(stage - 1):
        send = Action(stage, SEND_B, microbatch)
    else:
        return ()
    return send, partner(send)


def partner(message: Action) -> Action:
    """The receive of a send, or the send of a receive: activations go up a stage, gradients down."""
    # Rank r's 1SEND_F0 is rank r + 1's 2RECV_F0: the stage is always that of the rank that acts.
    step, kind = {SEND_F: (1, RECV_F), RECV_F: (-1, SEND_F), SEND_B: (-1, RECV_B), RECV_B: (1, SEND_B)}[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


def waiting(schedule: Schedule, heads: dict[int, Action]) -> str:
    """Sentence on the ranks that wait: in which action, for what."""
    return ", ".join(
        f"rank {rank} in {head}"
        + (f" for {source[0]}{source[1]}{head.microbatch}" if (source := schedule.source(head)) else "")
        for rank, head in heads.items()
    )
