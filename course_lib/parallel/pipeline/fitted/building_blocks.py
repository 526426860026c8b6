"""V-shaped tables that hold half or a third of what 1F1B holds: one micro-batch's laps, repeated and then squeezed.

A micro-batch makes four laps over the ranks: forward down the V and up again, back down and up as gradients. When each
rank does its part of micro-batch 0 is a *building block*. Copies of it, six units of time apart, never collide: six
units are an F, an I and a W of both stages of a rank. The shorter the time from a block's forwards to its backwards,
the less a rank holds. Here is ``v_min`` on 3 ranks; small letters are the second stage, on the way up::

    rank 0   F . . . . f . . I . . . . i
    rank 1   . F . . f . . . . I . . i .
    rank 2   . . F f . . . . . . I i . .

Repeated, the pattern has waits where it begins and ends, and on many ranks a gap between forwards and backwards that
only keeps copies from colliding. *Squeezing* closes them: what can begin before its turn does, as long as all that it
overtakes still finds room in memory; so a rank never holds more than the pattern does.

Source: Qi, Wan, Amar and Lin, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), sections 3 and 4;
the blocks are those of their repository, sail-sg/zero-bubble-pipeline-parallelism, which squeezes in another way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from course_lib.parallel.pipeline.actions import F, I, Schedule, v_shape
from course_lib.parallel.pipeline.fitted.schedule_builder import ScheduleBuilder
from course_lib.parallel.pipeline.simulation import Costs, simulate

PERIOD = 6
"""Units from one copy of a block to the next: F, I and W of two stages."""


@dataclass(frozen=True)
class BuildingBlock:
    """Times of the ranks' parts of one micro-batch, and what they then hold.

    Attributes:
        starts: of a rank and the number of ranks: when it does F of its first stage, F of its second, I of its second
            and I of its first for micro-batch 0, in units of time.
        activations: of the number of ranks: how many micro-batches' activations, of both stages, a rank holds at most.
    """

    starts: Callable[[int, int], tuple[int, int, int, int]]
    activations: Callable[[int], int]


def _v_half(rank: int, ranks: int) -> tuple[int, int, int, int]:
    gap = 3 if ranks % 2 == 0 else 0
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + gap + 2 * rank - 1, 6 * ranks + gap - rank - 2


def _v_min(rank: int, ranks: int) -> tuple[int, int, int, int]:
    gap = 2 if ranks % 3 == 0 else 0
    return rank, 2 * ranks - rank - 1, 2 * ranks + gap + rank, 4 * ranks + gap - rank - 1


BLOCKS = {
    "v_half": BuildingBlock(_v_half, lambda ranks: (ranks + 2) // 2),
    "v_min": BuildingBlock(_v_min, lambda ranks: (ranks + 4) // 3),
}


@dataclass(frozen=True)
class Turn:
    """An action of a rank in the repeated pattern: when, and what."""

    time: int
    stage: int
    kind: str


WHERE = ("nowhere", "at the ends", "anywhere")
"""Where actions may overtake others. The ends are before rank 0 has its first gradient back, and after it has begun its
last forward: between them a pattern of equally long actions has no waits to close."""


class Squeeze:
    """A table in the making: what remains of each rank's pattern, and which of it may begin before its turn.

    Args:
        builder: empty, of a V.
        block: that is repeated.
        where: actions may overtake others, of :data:`WHERE`.
    """

    def __init__(self, builder: ScheduleBuilder, block: BuildingBlock, where: str):
        self.builder, self.most = builder, 2 * block.activations(builder.ranks)
        self.turns = [_pattern(block, rank, builder.ranks, builder.microbatches) for rank in range(builder.ranks)]
        self.forwards_held = [0] * builder.ranks  # F's whose I has not been put: no W can free them
        first_gradient = min(turn.time for turn in self.turns[0] if (turn.stage, turn.kind) == (0, I))
        last_forward = max(turn.time for turn in self.turns[0] if (turn.stage, turn.kind) == (0, F))
        always = max(row[-1].time for row in self.turns) + 1
        self.in_turn = {
            "nowhere": range(always),
            "at the ends": range(first_gradient, last_forward + 1),
            "anywhere": range(0),
        }[where]

    def run(self) -> bool:
        """Put all actions, each time the one that can begin first; whether it came to the end."""
        builder = self.builder
        firsts = [self._first(rank) for rank in range(builder.ranks)]  # (start, time, rank, index), by rank
        while any(self.turns):
            earliest = min(filter(None, firsts), default=None)
            if earliest is None:
                return False
            *_, rank, index = earliest
            turn = self.turns[rank].pop(index)
            if turn.kind == F:
                builder.make_room(turn.stage)
            builder.fill(turn.stage, turn.kind, max(builder.waits) - builder.waits[rank], beyond=True)
            builder.put(turn.stage, turn.kind)
            self.forwards_held[rank] += 1 if turn.kind == F else -1
            # --- what this changes: the rank itself, and the one that its result is for ---
            then = turn.stage + (1 if turn.kind == F else -1)
            for other in {rank, builder.stage_ranks[then] if 0 <= then < builder.stages else rank}:
                firsts[other] = self._first(other)
        return True

    def _first(self, rank: int) -> tuple[int, int, int, int] | None:
        """Of a rank's next action of each stage and kind the one that can begin first; None: all wait for others."""
        builder, candidates, seen = self.builder, [], set()
        for index, turn in enumerate(self.turns[rank]):
            if (turn.stage, turn.kind) in seen:
                continue
            seen.add((turn.stage, turn.kind))
            if index and (turn.time in self.in_turn or not self._may_overtake(rank, index)):
                continue
            ready = builder.ready(turn.stage, turn.kind)
            if ready is not None:
                candidates.append((max(builder.clock[rank], ready), turn.time, rank, index))
            if len(seen) == 4:
                break
        return min(candidates, default=None)

    def _may_overtake(self, rank: int, index: int) -> bool:
        """Whether all that comes before a turn has room in memory when that one's activation is there already."""
        turns = self.turns[rank]
        if turns[index].kind == I:
            return True
        held = self.forwards_held[rank] + 1
        if held > self.most:
            return False
        for turn in turns[:index]:
            held += 1 if turn.kind == F else -1
            if held > self.most:
                return False
        return True


def repeat(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    """The shortest table found that holds half (``v_half``) or a third (``v_min``) of the activations of 1F1B.

    Args:
        name: a key of :data:`BLOCKS`.
        ranks: ranks of the pipeline, two stages each.
        microbatches: micro-batches of one step.
        costs: of one micro-batch in one stage, the same for all stages.
    """
    # Costs that are known let a rank look ahead, for one step: now and then the even pattern's order is better for it.
    even = replace(costs, forward=1, backward_input=1, backward_weight=1, latency=0)
    tables = [
        squeeze(name, ranks, microbatches, timed, where)
        for timed in ([costs] if costs == even else [costs, even])
        for where in WHERE
    ]
    return min((table for table in tables if table), key=lambda table: simulate(table, costs).makespan)


def squeeze(name: str, ranks: int, microbatches: int, costs: Costs, where: str) -> Schedule | None:
    """The repeated block with actions that overtake others in one way, of :data:`WHERE`; ``nowhere`` is the pattern.

    Other arguments are those of :func:`repeat`. None where the ranks would come to wait for each other.
    """
    limit = 2 * BLOCKS[name].activations(ranks) * costs.of("activation", 2 * ranks)[0]
    builder = ScheduleBuilder(v_shape(ranks, 2), microbatches, costs, limit)
    return builder.schedule(name) if Squeeze(builder, BLOCKS[name], where).run() else None


def _pattern(block: BuildingBlock, rank: int, ranks: int, microbatches: int) -> list[Turn]:
    """A rank's part of all copies of a block, in order."""
    down, up = rank, 2 * ranks - 1 - rank
    laps = list(zip(block.starts(rank, ranks), (down, up, up, down), (F, F, I, I), strict=True))
    return sorted(
        (Turn(start + PERIOD * copy, stage, kind) for copy in range(microbatches) for start, stage, kind in laps),
        key=lambda turn: turn.time,
    )
