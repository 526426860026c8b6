"""Run a table: each rank walks its row, and what the row says is what happens.

The executor knows no schedule. It knows six words: F, B, I, W, send, receive, and in what order they come is the
table's affair. What passes through its hands, for micro-batches of rows / m::

    F      take (rows / m, …) from the stage before, or the batch   hand over (rows / m, …) to the next one
    B, I   take the gradient of F's output, or begin at the loss    hand over the gradient of F's input
    W      take nothing                                             hand over nothing

Each stage has a graph of its own: F begins it at leaves, B ends at these. So autograd never sees the whole model, and
what joins the stages are the messages (:mod:`course_lib.parallel.pipeline.p2p`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from course_lib.errors import ConfigError
from course_lib.parallel.clock import Clock, Stamp
from course_lib.parallel.pipeline.actions import COMPUTE, SEND_B, SEND_F, Action, B, F, I, Schedule
from course_lib.parallel.pipeline.backward import SplitBackward
from course_lib.parallel.pipeline.p2p import Forms, P2PChannel, Tensors
from course_lib.parallel.pipeline.passes import lower, without_communication
from course_lib.parallel.pipeline.simulation import Span
from course_lib.parallel.pipeline.validation import check

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""From the last stage's output and the targets of a micro-batch to a scalar."""


@dataclass
class StepResult:
    """Result of one rank's pass over its row.

    Attributes:
        losses: of each micro-batch, detached scalars, on the rank of the last stage; else empty.
        outputs: of the last stage for each micro-batch, detached, in an evaluation; else empty.
        peak: the most micro-batches whose activations the rank held at once, counted for each of its stages.
        clock: what the stamps are of; None where none were taken.
        stamps: begin and end of each of the rank's computations.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list, init=False)
    peak: int = field(default=0, init=False)
    clock: Clock | None = None
    stamps: list[tuple[Action, Stamp, Stamp]] = field(default_factory=list, init=False)

    @cached_property
    def spans(self) -> list[Span]:
        """Of the rank's computations, in seconds on ``time.perf_counter``'s clock, without the wait for input.

        On a GPU they are the device's, which is waited for when they are first asked for.
        """
        if self.clock is None:
            return []
        self.clock.settle()
        return [Span(action, self.clock.seconds(start), self.clock.seconds(end)) for action, start, end in self.stamps]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which has no use for stamps: with the spans."""
        return vars(self) | {"spans": self.spans, "clock": None, "stamps": []}


@dataclass
class _Activations:
    """Tensors that a stage holds of a micro-batch from its forward to the end of its backward.

    The outputs themselves are gone when they have been sent: autograd needs only the edges of its graph.
    """

    inputs: Tensors
    outputs: tuple[GradientEdge, ...]
    gradients: Tensors = ()  # of the loss with respect to itself; else they come from the next stage
    split: SplitBackward | None = None


class PipelineExecutor:
    """Runs a table on this rank's stages.

    A stage is a module that takes what the stage before it returned, a tensor or a tuple of tensors; the first one
    takes the inputs of the batch. Each stage gets all extras besides, by name; one that is named as an argument of
    :meth:`step` is (``scale``, ``targets``) is handed over in ``named``. Gradients add up in ``.grad`` over
    micro-batches and steps, as in one process.

    ```python
    executor = PipelineExecutor(make("1f1b", ranks=2, microbatches=4), {rank: stage}, cross_entropy)
    done = executor.step(x, targets=y)
    optimizer.step()
    ```

    Args:
        schedule: the table, with or without its sends and receives; it is proved first.
        stages: the stages that live on this rank, by number.
        loss_function: of the last stage's output (its first tensor) and targets.
        group: whose rank r runs row r; the default group by default.
        device: of the stages.
    Raises:
        ConfigError: a table that cannot run, or other stages than the table has for this rank.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss_function: LossFunction,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ):
        # --- refuse here what would hang there ---
        check(schedule)
        self.rank = dist.get_rank(group)
        if dist.get_world_size(group) != schedule.ranks:
            raise ConfigError(
                f"{schedule.name} is a table for {schedule.ranks} ranks, and there are {dist.get_world_size(group)}",
                "make it for as many as there are",
            )
        if tuple(sorted(stages)) != schedule.stages_of(self.rank):
            raise ConfigError(
                f"rank {self.rank} was given stages {sorted(stages)}, and {schedule.name} has "
                f"{list(schedule.stages_of(self.rank))} there",
                "give each rank the stages of its row",
            )
        self.table = schedule if schedule.lowered else lower(schedule)
        self.stages, self.loss_function, self.group = dict(stages), loss_function, group
        self.device = torch.device(device)
        self.clock = Clock(self.device)
        self.forms: Forms = {}  # kept from step to step: shapes are sent once
        self._forward_tables: dict[int, Schedule] = {}

    def step(
        self,
        *inputs: Tensor,
        targets: Tensor,
        scale: float | Tensor | None = None,
        named: Mapping[str, Tensor] | None = None,
        **extras: Tensor,
    ) -> StepResult:
        """Forward and backward of one batch; a collective call.

        Every rank is given the same batch, cut into micro-batches along the first dimension; it uses what its stages
        need of it.

        Args:
            *inputs: of the first stage.
            targets: of the loss function.
            scale: what the loss of a micro-batch counts in the gradients; by default 1 / micro-batches, so that they
                are those of the mean. With a loss that is a sum over targets: 1 / the batch's number of targets.
            named: extras whose names this method has for itself.
            **extras: by name, for every stage.
        Raises:
            ConfigError: fewer rows than micro-batches; a stage that returns anything but tensors.
        """
        if scale is None:
            scale = 1 / self.table.microbatches
        with torch.enable_grad():
            return _RowRun(self, self.table, inputs, targets, {**extras, **(named or {})}, scale).walk()

    def evaluate(
        self,
        *inputs: Tensor,
        targets: Tensor | None = None,
        named: Mapping[str, Tensor] | None = None,
        **extras: Tensor,
    ) -> StepResult:
        """The table's forwards alone, without gradients; a collective call.

        Like :meth:`step`, but a batch may have fewer rows than the table has micro-batches. Outputs are kept; losses
        come where there are targets.
        """
        extras = {**extras, **(named or {})}
        rows = _rows(inputs, extras)
        microbatches = min(rows, self.table.microbatches)
        if microbatches not in self._forward_tables:  # a batch of 3 rows has at most 3 micro-batches
            self._forward_tables[microbatches] = _forwards(self.table, microbatches)
        table = self._forward_tables[microbatches]
        with torch.no_grad():
            return _RowRun(self, table, inputs, targets, extras, 1.0).walk()


class _RowRun:
    """One pass of an executor over its row."""

    def __init__(
        self,
        executor: PipelineExecutor,
        table: Schedule,
        inputs: Sequence[Tensor],
        targets: Tensor | None,
        extras: Mapping[str, Tensor],
        scale: float | Tensor,
    ):
        self.executor, self.table, self.scale = executor, table, scale
        rows, count = _rows(inputs, extras), table.microbatches
        if rows < count:
            raise ConfigError(
                f"a batch of {rows} rows for {count} micro-batches", "take fewer micro-batches, or a larger batch"
            )

        # --- cut the batch: by micro-batch inputs, extras and targets. (rows, …) -> m times (rows / m, …) ---
        self.inputs = list(zip(*(tensor.tensor_split(count) for tensor in inputs), strict=True)) or [()] * count
        self.extras = [
            dict(zip(extras, values, strict=True))
            for values in zip(*(tensor.tensor_split(count) for tensor in extras.values()), strict=True)
        ] or [{}] * count
        self.targets = [None] * count if targets is None else targets.tensor_split(count)

        # Micro-batches that look alike here have activations that look alike everywhere, which all ranks can tell.
        kinds = [
            (torch.is_grad_enabled(), *((tensor.shape, tensor.dtype) for tensor in (*some, *others.values())))
            for some, others in zip(self.inputs, self.extras, strict=True)
        ]
        self.channel = P2PChannel(table, executor.group, executor.device, executor.forms, kinds)
        self.held: dict[tuple[int, int], _Activations] = {}  # by stage and micro-batch, from F to the end of B or W
        self.done = StepResult(clock=executor.clock)

    def walk(self) -> StepResult:
        """Do what the row says, from its first action to its last."""
        for action in self.table.rows[self.executor.rank]:
            if action.kind in COMPUTE:
                self.compute(action)
            elif action.kind in (SEND_F, SEND_B):  # begun, not waited for: the rank goes on in its row
                self.channel.send(action)
            else:
                self.channel.receive(action)
        self.channel.close()
        return self.done

    def compute(self, action: Action) -> None:
        """One of the four words: take what it needs, compute, hand over what comes of it."""
        stage, kind, microbatch = action
        # --- take: activations of the stage before, or gradients of the next. Here alone a rank waits for another ---
        received = self.channel.take(action) if self.table.source(action) else ()
        # --- compute ---
        start = self.executor.clock.stamp()
        if kind == F:
            result = self.forward(stage, microbatch, received)
        elif kind == B:
            result = self.backward(stage, microbatch, received)
        elif kind == I:
            result = self.backward_input(stage, microbatch, received)
        else:
            result = self.backward_weight(stage, microbatch)
        self.done.stamps.append((action, start, self.executor.clock.stamp()))
        # --- hand over, to a stage of this rank or to a send further down the row ---
        if kind == F and stage + 1 < self.table.stages:
            self.channel.hand_over(Action(stage + 1, F, microbatch), result)
        elif kind in (B, I) and stage > 0:
            self.channel.hand_over(Action(stage - 1, B, microbatch), result)

    def forward(self, stage: int, microbatch: int, received: Tensors) -> Tensors:
        """Phase F: the outputs; held are the inputs, as leaves of a graph of the stage's own."""
        # Leaves: what came from another rank has no graph, and that of a stage on this rank is walked by its own B.
        inputs = tuple(
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received or self.inputs[microbatch]
        )
        result = self.executor.stages[stage](*inputs, **self.extras[microbatch])
        outputs = result if isinstance(result, tuple) else (result,)
        for output in outputs:
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"stage {stage} returned {'a tuple with ' * isinstance(result, tuple)}a {type(output).__name__}",
                    "let a stage return a tensor, or a tuple of tensors",
                )
        gradients: Tensors = ()
        roots = outputs
        # The last stage's graph begins at the loss, and at its factor in the gradient: nobody sends it one.
        if stage + 1 == self.table.stages:
            roots, gradients = self.loss(outputs, microbatch)
        if torch.is_grad_enabled():
            # Edges instead of the outputs: a tensor that has been sent can be freed, and its graph stays.
            edges = tuple(get_gradient_edge(root) for root in roots if root.requires_grad)
            differentiable = tuple(tensor for tensor in inputs if tensor.requires_grad)
            self.held[stage, microbatch] = _Activations(differentiable, edges, gradients)
            self.done.peak = max(self.done.peak, len(self.held))
        return outputs

    def loss(self, outputs: Tensors, microbatch: int) -> tuple[Tensors, Tensors]:
        """The loss of a micro-batch, and what it counts in the gradients; neither where nothing is to be scored."""
        if not torch.is_grad_enabled():  # an evaluation
            self.done.outputs.append(outputs[0].detach())
        target = self.targets[microbatch]
        if target is None:
            return (), ()
        loss = self.executor.loss_function(outputs[0], target)
        self.done.losses.append(loss.detach())
        if isinstance(self.scale, Tensor):
            return (loss,), (self.scale.to(loss),)
        return (loss,), (torch.full_like(loss, self.scale),)  # filled in there: a copy would wait for a GPU

    def backward(self, stage: int, microbatch: int, received: Tensors) -> Tensors:
        """Phase B: the gradients of the inputs; those of the weights are added up in their ``.grad``."""
        held = self.held.pop((stage, microbatch))
        if held.outputs:  # none where neither the stage nor one before it is trained
            torch.autograd.backward(held.outputs, held.gradients or received)
        return _gradients(held.inputs, [tensor.grad for tensor in held.inputs])

    def backward_input(self, stage: int, microbatch: int, received: Tensors) -> Tensors:
        """Phase I: the gradients of the inputs alone."""
        held = self.held[stage, microbatch]
        held.split = SplitBackward(held.outputs, held.inputs)
        return _gradients(held.inputs, held.split.input(held.gradients or received))

    def backward_weight(self, stage: int, microbatch: int) -> Tensors:
        """Phase W: the gradients of the weights, from what phase I left; nothing to hand over."""
        held = self.held.pop((stage, microbatch))
        assert held.split is not None  # the validator: I comes before W
        held.split.weight()
        return ()


def _gradients(inputs: Tensors, gradients: Sequence[Tensor | None]) -> Tensors:
    """Gradients for the stage before, which waits for one of each tensor that it gave: zeros where it was not used."""
    return tuple(
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(inputs, gradients, strict=True)
    )


def _rows(inputs: Sequence[Tensor], extras: Mapping[str, Tensor]) -> int:
    """Rows of a batch."""
    sizes = {len(tensor) for tensor in (*inputs, *extras.values())}
    if len(sizes) != 1:
        raise ConfigError(
            f"a batch of tensors of {sorted(sizes)} rows" if sizes else "a batch without tensors",
            "give every rank the whole batch, all tensors with the same number of rows",
        )
    return sizes.pop()


def _forwards(table: Schedule, microbatches: int) -> Schedule:
    """The forwards of the first micro-batches, in the order of the table."""
    bare = without_communication(table)
    rows = tuple(
        tuple(action for action in row if action.kind == F and action.microbatch < microbatches) for row in bare.rows
    )
    return lower(replace(bare, rows=rows, microbatches=microbatches))
