"""A pipeline schedule is a table: for each rank, the actions that it runs, in order.

An action is (stage, kind, micro-batch) and prints as torch.distributed.pipelining prints it: ``2F0`` is the
forward of micro-batch 0 through stage 2. Generators write tables, passes rewrite them, and the validator, the
simulator, the figures and the executor all read the same table.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.errors import ConfigError

# --- compute: a stage's work on one micro-batch; B is I and W in one ---
F = "F"
"""Forward."""
B = "B"
"""The whole backward: the gradient of the input, then that of the weights."""
I = "I"  # noqa: E741 (the field's letter for it)
"""Only the gradient of the stage's input: what the stage before waits for (B in the zero-bubble paper)."""
W = "W"
"""Only the gradient of the stage's weights: nobody waits for it, so that it can fill a bubble."""
# --- communication: only in a table that has been lowered (passes.lower) ---
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
"""Activations to the next stage (F), gradients to the stage before (B); the stage is that of the rank that acts."""

COMPUTE = (F, B, I, W)
COMMUNICATION = (SEND_F, RECV_F, SEND_B, RECV_B)

_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|[FBIW])(\d+)")


class Action(NamedTuple):
    """One thing that a rank does: ``Action(2, "F", 0)`` is ``2F0``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read ``2F0`` or ``3SEND_B1``.

        Raises:
            ConfigError: the text is no action.
        """
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"`{text.strip()}` is no action",
                f"write stage, kind ({', '.join(COMPUTE + COMMUNICATION)}) and micro-batch, as in 2F0",
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))


Row = tuple[Action, ...]
"""What one rank does, in order."""


@dataclass(frozen=True)
class Schedule:
    """A table of actions, and where its stages live.

    Attributes:
        name: what made it, such as ``1f1b``.
        stage_ranks: the rank that holds each stage, by stage.
        microbatches: how many micro-batches one step takes.
        rows: the actions of each rank, in the order in which it runs them.
        overlapped: forwards that a runtime may run side by side with the whole backward right after them
            (DualPipeV); one that does not overlap them runs the one, then the other.
    """

    name: str
    stage_ranks: tuple[int, ...]
    microbatches: int
    rows: tuple[Row, ...]
    overlapped: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        for rank, row in enumerate(self.rows):
            if not row:
                raise ConfigError(f"rank {rank} of {self.name} has nothing to do", "give each rank a row of actions")

    @property
    def ranks(self) -> int:
        """Number of ranks of the table."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.stage_ranks)

    @property
    def lowered(self) -> bool:
        """Whether the sends and receives are in the table."""
        return any(action.kind in COMMUNICATION for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def crosses(self, stage: int) -> bool:
        """Whether stage ``stage`` and the next one live on different ranks."""
        return self.stage_ranks[stage] != self.stage_ranks[stage + 1]

    def source(self, action: Action) -> tuple[int, str] | None:
        """The stage and pass (F or B) whose output this compute action takes from another stage, or None."""
        if action.kind == F and action.stage > 0:  # activations come from above
            return action.stage - 1, F
        if action.kind in (B, I) and action.stage < self.stages - 1:  # gradients from below, of B or I there: called B
            return action.stage + 1, B
        return None  # the first F reads the batch, the last B the loss, and W what its own I left

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, row)) for row in self.rows)


def loop(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s lives on rank s mod ranks: each lap ends at the last rank and starts again at the first."""
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))  # 2 ranks, 2 stages each: 0 1 0 1


def v_shape(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Laps alternate in direction: with two stages per rank, the first rank holds the first and the last stage."""
    # 2 ranks, 2 stages each: 0 1 1 0. Where a lap turns, no message is sent: stages 1 and 2 are on rank 1.
    laps = [range(ranks) if lap % 2 == 0 else range(ranks - 1, -1, -1) for lap in range(stages_per_rank)]
    return tuple(rank for lap in laps for rank in lap)
