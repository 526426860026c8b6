"""Measurements of lesson 07: bubbles, with stages that only sleep; gradients, with a real model.

A sleeping stage needs no core: what is measured is the schedule and the messages, not how many ranks share a core.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_lib.errors import ConfigError
from course_lib.launching.launch import launch
from course_lib.modeling.stages import cut, shared_weights, split_evenly
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.executor import PipelineExecutor, StepResult
from course_lib.parallel.pipeline.simulation import Costs, Span, Timeline, simulate
from course_lib.parallel.pipeline.tied import sum_shared_gradients


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


Rows = tuple[tuple[Span, ...], ...]
"""For each rank what ran from when to when, in ms; time 0 is the first start."""


@dataclass(frozen=True)
class Measured:
    """A table as it was foreseen, and every try of it. The prediction has no part in what is shown of them.

    Attributes:
        predicted: by the simulator, in ms.
        tries: what ran when, in the order of the tries.
        peaks: for each rank the most micro-batches that it held at once, counted for each of its stages.
    """

    predicted: Timeline
    tries: tuple[Rows, ...]
    peaks: tuple[int, ...]

    @property
    def bubbles(self) -> list[float]:
        """Of each try, the share of all ranks' time, from first start to last end, in which they did not compute."""
        return [
            1 - sum(float(span.end - span.start) for row in rows for span in row) / (_length(rows) * len(rows))
            for rows in self.tries
        ]

    @property
    def bubble(self) -> float:
        """The median of the tries."""
        return median_low(self.bubbles)

    @property
    def rows(self) -> Rows:
        """The try with the median bubble."""
        return self.tries[self.bubbles.index(self.bubble)]

    @property
    def makespan(self) -> float:
        """ms of a step, the median of the tries."""
        return median_low(map(_length, self.tries))


def _length(rows: Rows) -> float:
    return max(float(row[-1].end) for row in rows)


def measure(
    schedules: Mapping[str, Schedule],
    costs: Costs,
    tries: int = 5,
    timeout: float = 300.0,
) -> dict[str, Measured]:
    """Run tables, all for the same number of ranks, each the same number of times, and keep every try.

    Args:
        schedules: the tables, by name.
        costs: in ms; messages take what they take.
        tries: of each table; an odd number, so that one of them has the median bubble.
        timeout: seconds for all of them.
    Raises:
        ConfigError: an even number of tries, or none.
    """
    if tries < 1 or tries % 2 == 0:
        raise ConfigError(f"tries={tries}: an odd number of tries has one in the middle; take {max(tries, 0) + 1}")
    ranks = {schedule.ranks for schedule in schedules.values()}
    by_rank = launch(_on_rank, schedules, costs, tries, num_processes=ranks.pop(), timeout=timeout, device="cpu")
    measured = {}
    for name, schedule in schedules.items():
        passes = [results[name] for results in by_rank]
        peaks = tuple(tried[0].peak for tried in passes)
        measured[name] = Measured(simulate(schedule, costs), tuple(map(_rows, zip(*passes, strict=True))), peaks)
    return measured


def _on_rank(schedules: Mapping[str, Schedule], costs: Costs, tries: int) -> dict[str, list[StepResult]]:
    """Each table's passes on this rank; their times are on the clock that the ranks of one machine share."""
    dist.init_process_group("gloo")
    executors = {}
    batches = {
        size: torch.zeros(size, 1, requires_grad=True)  # so that the first stage has an I too
        for size in {schedule.microbatches for schedule in schedules.values()}
    }
    for name, schedule in schedules.items():
        seconds = [
            [float(cost) / 1000 for cost in costs.of(kind, schedule.stages)]
            for kind in ("forward", "backward_input", "backward_weight")
        ]
        stages = {stage: SleepingStage(0.0, 0.0, 0.0) for stage in schedule.stages_of(dist.get_rank())}
        executors[name] = PipelineExecutor(schedule, stages, lambda output, target: output.sum())
        batch = batches[schedule.microbatches]
        executors[name].step(batch, targets=batch)  # shapes are told, connections made
        for stage, module in stages.items():
            module.seconds = (seconds[0][stage], seconds[1][stage], seconds[2][stage])
    results: dict[str, list[StepResult]] = {name: [] for name in schedules}
    for _ in range(tries):
        # In turns, so that what disturbs the machine for seconds meets one try of several tables and not all of one.
        for name, schedule in schedules.items():
            batch = batches[schedule.microbatches]
            dist.barrier()
            results[name].append(executors[name].step(batch, targets=batch))
    dist.destroy_process_group()
    return results


def _rows(passes: Sequence[StepResult]) -> Rows:
    """What each rank ran in one try, in ms from the first start."""
    start = min(result.spans[0].start for result in passes)
    return tuple(
        tuple(Span(action, 1000 * (begin - start), 1000 * (end - start)) for action, begin, end in result.spans)
        for result in passes
    )


@dataclass(frozen=True)
class Gradients:
    """Gradients of one step.

    Attributes:
        loss: of the batch, nats per token.
        by_name: of the model's parameters.
        elements: parameters that each rank holds.
    """

    loss: float
    by_name: dict[str, Tensor]
    elements: list[int]

    def apart(self, other: "Gradients") -> float:
        """The largest difference of two gradients, which are of the same parameters."""
        assert self.by_name.keys() == other.by_name.keys()
        return max((gradient - other.by_name[name]).abs().max().item() for name, gradient in self.by_name.items())


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean over the tokens [B, L] that have one before them, in nats; logits [B, L, V]."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def unsplit(build: Callable[[], nn.Module], ids: Tensor) -> Gradients:
    """One process, one batch."""
    model = build()
    loss = next_token_loss(model(input_ids=ids).logits, ids)
    loss.backward()
    return Gradients(loss.item(), _gradients(model), [sum(parameter.numel() for parameter in model.parameters())])


def split(
    schedules: Mapping[str, Schedule],
    build: Callable[[], nn.Module],
    ids: Tensor,
    engine: type = PipelineExecutor,
    tied: bool = True,
) -> dict[str, Gradients]:
    """The same, cut into stages that real ranks run as each of some tables says, all for the same number of ranks.

    Args:
        schedules: the tables.
        build: makes the whole model, alike on every rank.
        ids: [B, L], of which each micro-batch gets as many rows.
        engine: ``PipelineExecutor`` or ``TorchPipeline``.
        tied: add up the gradients of weights that several stages share.
    """
    ranks = {schedule.ranks for schedule in schedules.values()}
    by_rank = launch(
        _split_on_rank, schedules, build, ids, engine, tied, num_processes=ranks.pop(), timeout=120.0, device="cpu"
    )
    return {name: _joined([parts[name] for parts in by_rank]) for name in schedules}


Part = tuple[list[float], dict[str, Tensor], int]
"""Losses on the rank of the last stage, gradients by name, parameters held."""


def _joined(parts: list[Part]) -> Gradients:
    (losses,) = [losses for losses, _, _ in parts if losses]
    gradients = {name: gradient for _, of_rank, _ in parts for name, gradient in of_rank.items()}
    return Gradients(sum(losses) / len(losses), gradients, [elements for _, _, elements in parts])


def _split_on_rank(
    schedules: Mapping[str, Schedule], build: Callable[[], nn.Module], ids: Tensor, engine: type, tied: bool
) -> dict[str, Part]:
    dist.init_process_group("gloo")
    parts: dict[str, Part] = {}
    for name, schedule in schedules.items():
        model = build()
        where = split_evenly(model, schedule.stages, length=ids.shape[1])
        stages = cut(model, where, schedule.stages_of(dist.get_rank()))
        done = engine(schedule, stages, next_token_loss).step(targets=ids, input_ids=ids)
        if tied:
            sum_shared_gradients(shared_weights(model, where), stages, schedule.stage_ranks)
        held = {parameter for stage in stages.values() for parameter in stage.parameters()}
        parts[name] = ([loss.item() for loss in done.losses], _gradients(model), sum(p.numel() for p in held))
    dist.barrier()
    dist.destroy_process_group()
    return parts


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
