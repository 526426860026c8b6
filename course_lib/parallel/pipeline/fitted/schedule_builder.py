"""Rows under construction, with the clock, the waits and the memory of each rank: what a greedy rule looks at."""

from collections import Counter, deque
from fractions import Fraction
from math import lcm

from course_lib.errors import ConfigError
from course_lib.parallel.pipeline.actions import Action, F, Schedule, W
from course_lib.parallel.pipeline.simulation import Costs, ticks


class ScheduleBuilder:
    """Each action is put as early as its rank and its input allow; times and bytes are whole numbers of small units.

    Args:
        stage_ranks: the rank of each stage.
        microbatches: micro-batches of one step.
        costs: of one micro-batch in each stage.
        limit: bytes that a rank may hold.
    """

    def __init__(self, stage_ranks: tuple[int, ...], microbatches: int, costs: Costs, limit: Fraction):
        self.stage_ranks, self.microbatches, self.stages = stage_ranks, microbatches, len(stage_ranks)
        _, self.length, self.latency = ticks(costs, self.stages)
        activation, kept = costs.of("activation", self.stages), costs.of("kept", self.stages)
        unit = lcm(limit.denominator, *(size.denominator for size in (*activation, *kept)))
        self.activation, self.kept = ([int(size * unit) for size in by_stage] for by_stage in (activation, kept))
        self.limit = int(limit * unit)
        self.ranks = ranks = max(stage_ranks) + 1
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        # --- by rank, in ticks: when it is free, how long it has waited since it began, when it began ---
        self.clock, self.waits, self.began = [0] * ranks, [0] * ranks, [0] * ranks
        # --- by rank: bytes held, and each W whose I has been put ---
        self.held = [0] * ranks
        self.owed: list[deque[Action]] = [deque() for _ in range(ranks)]
        # --- how many a stage has done, of F and of I; when each ended ---
        self.done: Counter[tuple[int, str]] = Counter()
        self.end: dict[tuple[int, str, int], int] = {}

    def left(self, stage: int, kind: str) -> bool:
        """Whether a stage has micro-batches of a kind still to take."""
        return self.done[stage, kind] < self.microbatches

    def ready(self, stage: int, kind: str) -> int | None:
        """Time at which the input of a stage's next action of a kind is there; None: it is not made yet."""
        microbatch = self.done[stage, kind]
        source = stage - 1 if kind == F else stage + 1
        if source < 0:
            return 0
        if source == self.stages:  # the loss
            return self.end.get((stage, F, microbatch))
        made = self.end.get((source, kind, microbatch))
        apart = self.stage_ranks[source] != self.stage_ranks[stage]
        return None if made is None else made + self.latency * apart

    def arrival(self, stage: int, kind: str) -> int | None:
        """As :meth:`ready`, of an input from another rank; None where there is none, or it is not made yet."""
        source = stage - 1 if kind == F else stage + 1
        if not 0 <= source < self.stages or self.stage_ranks[source] == self.stage_ranks[stage]:
            return None
        return self.ready(stage, kind)

    def put(self, stage: int, kind: str) -> None:
        """A stage's next F or I, as soon as the rank is free and the input is there.

        Raises:
            ConfigError: the rank would hold more than the limit.
        """
        rank = self.stage_ranks[stage]
        start = max(self.clock[rank], self.arrival(stage, kind) or 0)
        # --- when: before its first action a rank does not wait, it begins late, and ends as much later ---
        if self.rows[rank]:
            self.waits[rank] += start - self.clock[rank]
        else:
            self.began[rank] = start
        action = Action(stage, kind, self.done[stage, kind])
        self.done[stage, kind] += 1
        self._append(rank, action, start)
        self.end[stage, kind, action.microbatch] = self.clock[rank]
        # --- memory: F takes an activation; I gives back what W does not need, and owes that W ---
        if kind == F:
            self.held[rank] += self.activation[stage]
            if self.held[rank] > self.limit:
                raise ConfigError(*self._short(rank))
        else:
            self.held[rank] -= self.activation[stage] - self.kept[stage]
            self.owed[rank].append(action._replace(kind=W))

    def put_weight(self, rank: int) -> None:
        """The gradient of weights that has been owed for longest."""
        action = self.owed[rank].popleft()
        self._append(rank, action, self.clock[rank])
        self.held[rank] -= self.kept[action.stage]

    def put_weights(self, rank: int) -> None:
        """All gradients of weights that are owed."""
        while self.owed[rank]:
            self.put_weight(rank)

    def _append(self, rank: int, action: Action, start: int) -> None:
        self.rows[rank].append(action)
        self.clock[rank] = start + self.length[action.stage, action.kind]

    def _short(self, rank: int) -> tuple[str, str]:
        return f"rank {rank} cannot hold another activation and has nothing to let go", "raise the memory limit"

    def fits(self, stage: int, more: int = 1) -> bool:
        """Whether the rank of a stage can hold so many more activations."""
        return self.held[self.stage_ranks[stage]] + more * self.activation[stage] <= self.limit

    def make_room(self, stage: int) -> None:
        """Run gradients of weights until one more activation fits.

        Raises:
            ConfigError: it never does.
        """
        rank = self.stage_ranks[stage]
        while not self.fits(stage):
            if not self.owed[rank]:
                raise ConfigError(*self._short(rank))
            self.put_weight(rank)

    def fill(self, stage: int, kind: str, slack: int, beyond: bool, within: bool = False) -> None:
        """Fill the wait for a stage's next action with gradients of weights, as long as they fit into it.

        Args:
            stage: of the action.
            kind: of the action.
            slack: how much longer this rank may wait at no loss.
            beyond: where one more does not fit and the wait exceeds the slack, run it all the same.
            within: run it even where the wait does not.
        """
        rank, arrival = self.stage_ranks[stage], self.arrival(stage, kind)
        if arrival is None:
            return
        # --- those that fit wholly: free of charge ---
        while self.owed[rank] and self.clock[rank] + self.length[self.owed[rank][0].stage, W] <= arrival:
            self.put_weight(rank)
        # --- one more that does not fit delays the action; what else would be a wait is spent on it ---
        wait = arrival - self.clock[rank]
        if self.owed[rank] and wait > 0 and (beyond if wait > slack else within):
            self.put_weight(rank)

    def longest(self) -> int:
        """The longest time of a rank from its first action to its last, what it owes included."""
        return max(
            clock - began + sum(self.length[action.stage, W] for action in owed)
            for clock, began, owed in zip(self.clock, self.began, self.owed, strict=True)
        )

    def schedule(self, name: str) -> Schedule:
        """The table, with what is still owed at its end."""
        for rank in range(self.ranks):
            self.put_weights(rank)
        return Schedule(name, self.stage_ranks, self.microbatches, tuple(map(tuple, self.rows)))
