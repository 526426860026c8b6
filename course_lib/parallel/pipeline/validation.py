"""Prove that a table can run, before a rank starts: a wrong one would hang, or train on wrong gradients.

Checked in turn: every action stands on the rank of its stage; every micro-batch goes through every stage once
forward and once backward; no action comes before what it needs; no rank waits for ever, with sends that are
buffered and with sends that block until they are received; and how many micro-batches each rank holds at most.
"""

from itertools import accumulate

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import (
    COMMUNICATION,
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
from course_lib.parallel.pipeline.passes import lower, partner, without_communication

NEEDS = {B: F, I: F, W: I, SEND_F: F}
"""What must come before a kind of action in the same row, for the same stage and micro-batch."""


def check(schedule: Schedule) -> tuple[int, ...]:
    """Prove a table, with or without its sends and receives; without them, its lowered form is proved.

    Args:
        schedule: the table.

    Returns:
        The peak of :func:`in_flight` on each rank.

    Raises:
        ConfigError: the first fault found; the message names the action.
    """
    # --- phase 1: each rank's row by itself, and nothing is missing ---
    for rank in range(schedule.ranks):
        _check_cells(schedule, rank)
    _check_complete(schedule)
    for rank in range(schedule.ranks):
        _check_order(schedule, rank)
    # --- phase 2: the rows together. Lowering finds waits in a circle; where a table has its own sends and receives,
    # these are compared with the lowered ones, and then it is the table itself that is walked. ---
    lowered = lower(without_communication(schedule))
    if schedule.lowered:
        _check_messages(schedule, lowered)
        lowered = schedule
    _run_blocking(lowered)
    return in_flight(schedule)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches that each rank holds at once, counted for each of its stages.

    A stage holds a micro-batch from its forward until the end of its whole backward (B, or W where it is split).
    """
    peaks = []
    for row in schedule.rows:
        changes = ((action.kind == F) - (action.kind in (B, W)) for action in row)
        peaks.append(max(accumulate(changes, initial=0)))
    return tuple(peaks)


def _check_cells(schedule: Schedule, rank: int) -> None:
    """Each action of a row is one that there is, stands on the rank of its stage, and stands there once."""
    seen: set[Action] = set()
    for action in schedule.rows[rank]:
        if action.kind not in COMPUTE + COMMUNICATION:
            raise ConfigError(
                f"rank {rank} of {schedule.name} has {action} of unknown kind",
                f"choose from {', '.join(COMPUTE + COMMUNICATION)}",
            )
        if not 0 <= action.stage < schedule.stages or not 0 <= action.microbatch < schedule.microbatches:
            raise ConfigError(
                f"rank {rank} of {schedule.name} has {action}",
                f"there are {schedule.stages} stages and {schedule.microbatches} micro-batches, from 0",
            )
        if schedule.stage_ranks[action.stage] != rank:
            raise ConfigError(
                f"rank {rank} of {schedule.name} has {action}",
                f"stage {action.stage} lives on rank {schedule.stage_ranks[action.stage]}",
            )
        if action in seen:  # it would add the same gradient twice, and nothing would look wrong
            raise ConfigError(f"rank {rank} of {schedule.name} has {action} twice", "take one away")
        seen.add(action)


def _check_order(schedule: Schedule, rank: int) -> None:
    """Each action of a row comes after what it needs of its own stage."""
    seen: set[Action] = set()
    for action in schedule.rows[rank]:
        needed = _needed(action)
        if needed and not seen.intersection(needed):
            raise ConfigError(
                f"rank {rank} of {schedule.name} has {action} before {' or '.join(map(str, needed))}", "put it later"
            )
        seen.add(action)


def _needed(action: Action) -> tuple[Action, ...]:
    """What must come before an action in its own row: one of these."""
    if action.kind == SEND_B:  # the gradient of an input comes from either kind of backward
        return action._replace(kind=I), action._replace(kind=B)
    return (action._replace(kind=NEEDS[action.kind]),) if action.kind in NEEDS else ()


def _check_complete(schedule: Schedule) -> None:
    """Every micro-batch goes once through every stage, forward and backward."""
    present = {action for row in schedule.rows for action in row}
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            # One F; and either one B, or one I and one W.
            forward, whole, of_input, of_weights = (Action(stage, kind, microbatch) for kind in COMPUTE)
            if forward not in present:
                raise ConfigError(f"{schedule.name} lacks {forward}", "each stage takes each micro-batch forward once")
            if whole in present and present & {of_input, of_weights}:
                raise ConfigError(
                    f"{schedule.name} has {whole} and {of_input} or {of_weights}",
                    "a backward is whole or split, not both",
                )
            if whole not in present and not present >= {of_input, of_weights}:
                raise ConfigError(
                    f"{schedule.name} lacks {of_weights if of_input in present else of_input}",
                    f"each stage takes each micro-batch backward once, as {whole}, or as {of_input} and {of_weights}",
                )


def _check_messages(schedule: Schedule, lowered: Schedule) -> None:
    """The sends and receives of a lowered table are the right ones, and come before they are needed."""
    for rank, (row, right) in enumerate(zip(schedule.rows, lowered.rows, strict=True)):
        if missing := sorted(set(right) - set(row)):
            raise ConfigError(f"rank {rank} of {schedule.name} lacks {missing[0]}", "lower the table again")
        if surplus := sorted(set(row) - set(right)):
            raise ConfigError(f"rank {rank} of {schedule.name} has {surplus[0]}, which has no use", "take it away")
        received = set()
        for action in row:
            awaited = _awaited(schedule, action)
            if awaited and awaited not in received:
                raise ConfigError(f"rank {rank} of {schedule.name} has {action} before {awaited}", "put it later")
            if action.kind in (RECV_F, RECV_B):
                received.add(action)


def _awaited(schedule: Schedule, action: Action) -> Action | None:
    """The receive that a computation needs, or None where its input is at hand."""
    source = schedule.source(action)
    if source is None or schedule.stage_ranks[source[0]] == schedule.stage_ranks[action.stage]:
        return None
    return action._replace(kind=RECV_F if action.kind == F else RECV_B)


def _run_blocking(lowered: Schedule) -> None:
    """Walk a lowered table with sends and receives that return only when both sides have come to them."""
    # The strictest runtime there can be: what runs here also runs where sends are buffered, with less waiting.
    heads = [iter(row) for row in lowered.rows]
    at = [next(row, None) for row in heads]  # what each rank has come to; None at the end of its row
    moved = True
    while moved:
        moved = False
        for rank, action in enumerate(at):
            if action is None:
                continue
            if action.kind in COMMUNICATION:
                # Both sides have come to the message, and go on together; or this rank stays where it is.
                peer = lowered.stage_ranks[partner(action).stage]
                if at[peer] != partner(action):
                    continue
                at[peer] = next(heads[peer], None)
            at[rank] = next(heads[rank], None)
            moved = True
    stuck = [f"rank {rank} in {action}" for rank, action in enumerate(at) if action is not None]
    if stuck:
        raise ConfigError(
            f"{lowered.name} hangs where sends block until they are received: {', '.join(stuck)}",
            "both ranks must come to their common messages in one order",
        )
