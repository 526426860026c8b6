"""Measured bubbles: real ranks run a table on stages that only sleep, so that few cores can time many ranks.

A sleeping stage needs no core: what is measured is the schedule and the messages, not how ranks share the machine.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.simulate import Costs, Span, Timeline, simulate
from course_lib.runtime.launch import launch


class _Sleep(torch.autograd.Function):
    """Hands its input on; takes its time in the forward, and in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A stage of given cost: the gradient of its input and that of its one weight take their time apart.

    Args:
        forward: seconds of F.
        input: seconds of I.
        weight: seconds of W; B takes both.
    """

    def __init__(self, forward: float, input: float, weight: float):
        super().__init__()
        self.seconds = forward, input, weight
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; the same comes out."""
        forward, of_input, of_weight = self.seconds
        return _Sleep.apply(x, forward, of_input) + _Sleep.apply(self.bias, 0.0, of_weight)


@dataclass(frozen=True)
class Measured:
    """A table as it was foreseen and as it ran.

    Attributes:
        predicted: by the simulator, in ms.
        rows: for each rank what ran from when to when, in ms; time 0 is the first start.
    """

    predicted: Timeline
    rows: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        return max(float(row[-1].end) for row in self.rows)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from first start to last end, in which they did not compute."""
        busy = sum(float(span.end - span.start) for row in self.rows for span in row)
        return 1 - busy / (self.makespan * len(self.rows))


def measure(schedules: Mapping[str, Schedule], costs: Costs, tries: int = 2, timeout: float = 300.0,
            ) -> dict[str, Measured]:
    """Run tables, all for the same number of ranks, and keep the shortest of some tries of each.

    Args:
        costs: in ms; messages take what they take.
        timeout: seconds for all of them.
    """
    ranks = {schedule.ranks for schedule in schedules.values()}
    by_rank = launch(_on_rank, schedules, costs, tries, num_processes=ranks.pop(), timeout=timeout, device="cpu")
    return {name: Measured(simulate(schedule, costs), _best([found[name] for found in by_rank]))
            for name, schedule in schedules.items()}


def _on_rank(schedules: Mapping[str, Schedule], costs: Costs, tries: int) -> dict[str, list[list[Span]]]:
    """Each table's spans of this rank by try, in seconds on the clock that the ranks of one machine share."""
    dist.init_process_group("gloo")
    found: dict[str, list[list[Span]]] = {}
    for name, schedule in schedules.items():
        seconds = [[float(cost) / 1000 for cost in costs.of(kind, schedule.stages)]
                   for kind in ("forward", "input", "weight")]
        stages = {stage: SleepingStage(0.0, 0.0, 0.0) for stage in schedule.stages_of(dist.get_rank())}
        executor = PipelineExecutor(schedule, stages, lambda output, target: output.sum())
        batch = torch.zeros(schedule.microbatches, 1, requires_grad=True)  # so that the first stage has an I too
        executor.step(batch, targets=batch)  # shapes are told, connections made
        for stage, module in stages.items():
            module.seconds = (seconds[0][stage], seconds[1][stage], seconds[2][stage])
        found[name] = []
        for _ in range(tries):
            dist.barrier()
            found[name].append(executor.step(batch, targets=batch).spans)
    dist.destroy_process_group()
    return found


def _best(by_rank: list[list[list[Span]]]) -> tuple[tuple[Span, ...], ...]:
    """The try that ended soonest, in ms from its first start."""
    runs = []
    for rows in zip(*by_rank, strict=True):
        start = min(row[0].start for row in rows)
        runs.append(tuple(tuple(Span(action, 1000 * (begin - start), 1000 * (end - start))
                                for action, begin, end in row) for row in rows))
    return min(runs, key=lambda rows: max(row[-1].end for row in rows))
