"""The V-shaped tables, ZB-V and DualPipeV: two stages per rank, down the ranks and up again.

Rank r of p holds stage r, on the way down, and stage 2p - 1 - r, on the way up. The last rank turns the V round without
a message, and the first one has both the batch and the loss::

    rank 0    0       7        stages of 4 ranks
    rank 1     1     6
    rank 2      2   5
    rank 3       3 4

Sources: ZB-V, Qi et al. 2023, arXiv 2401.10241, section 6; DualPipeV, deepseek-ai/DualPipe and DeepSeek-V3, arXiv
2412.19437, section 3.2.1.
"""

from collections import Counter

from course_lib.parallel.pipeline.actions import Action, B, F, I, Row, W


class RowBuilder:
    """A row under construction: each stage takes its micro-batches in order, forward and backward."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, bool]] = Counter()  # the next micro-batch, by stage and whether forward
        self._owed: list[Action] = []  # each W whose I has been written

    def forward(self, stage: int) -> None:
        self._add(stage, F)

    def backward(self, stage: int) -> None:
        self._add(stage, B)

    def input(self, stage: int) -> None:
        """The gradient of the input alone; that of the weights is owed."""
        self._owed.append(Action(stage, W, self._add(stage, I)))

    def weight(self, stage: int | None = None) -> None:
        """The gradient of the weights that has been owed for longest (of one stage, if given), if any is owed."""
        owed = next((action for action in self._owed if stage in (None, action.stage)), None)
        if owed:
            self._owed.remove(owed)
            self.actions.append(owed)

    def _add(self, stage: int, kind: str) -> int:
        microbatch = self._next[stage, kind == F]
        self._next[stage, kind == F] += 1
        self.actions.append(Action(stage, kind, microbatch))
        return microbatch


def zbv(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """No bubble where F, I and W take equally long, and no more activations than 1F1B (Qi et al. 2023, section 6)."""
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - rank  # its two stages; the ranks from it to the turn
    # Written for enough micro-batches to fill the pipeline; of fewer, what is too much is struck out at the end.
    full = max(microbatches, 2 * ranks - 1)
    row = RowBuilder()
    # --- warm-up: the first micro-batches go down the V and come up again ---
    for _ in range(2 * behind - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(behind):
        row.forward(up)
        row.input(up)
        row.weight(up)
    # --- steady state: the rank's two stages in turn, F I W of each: no rank ever waits ---
    for turn in range(full - ranks):
        if turn < full - ranks - behind + 1:
            row.forward(down)
        row.input(down)
        row.weight(down)
        row.forward(up)
        row.input(up)
        row.weight(up)
    # --- cool-down: the gradients that others wait for first, the weights when nothing else is left ---
    for _ in range(rank):
        row.input(down)
        row.input(up)
    for _ in range(behind):
        row.input(down)
        row.weight(down)
    for stage in (up, down):
        for _ in range(rank):
            row.weight(stage)
    return tuple(action for action in row.actions if action.microbatch < microbatches)


def dualpipev(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Row:
    """A forward and a backward of the rank's two stages side by side, which a runtime may overlap (DeepSeek-V3,
    arXiv 2412.19437, section 3.2.1, cut in half to a V as in deepseek-ai/DualPipe)."""
    down, up, behind = rank, 2 * ranks - 1 - rank, ranks - 1 - rank  # its two stages; the ranks behind it
    row = RowBuilder()
    # --- warm-up: down the V, then both ways ---
    for _ in range(2 * behind):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    # --- the first backwards, split so that the stage before gets its gradient early ---
    for _ in range(behind):
        row.input(up)
        row.weight()
        row.forward(up)
    # --- steady state: pairs of a forward and a whole backward of different micro-batches, side by side: while one
    # computes the other communicates, which is what DeepSeek-V3 has the schedule for (all-to-alls of its experts) ---
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for _ in range(behind):
        row.backward(up)
        row.forward(up)
        row.backward(down)
    # --- cool-down: the second half of the backwards is split, their W come last ---
    for turn in range(2 * (rank + 1)):
        backward = row.input if turn > rank else row.backward
        backward(down if turn % 2 else up)
    for _ in range(behind):
        row.weight()
        row.input(down)
    for _ in range(rank + 1):
        row.weight()
    return tuple(row.actions)
