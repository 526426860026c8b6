"""Data, pipeline and tensor parallelism at once, on a rank grid: what each axis does, and what it sends.

The functions run on ranks (:func:`course_lib.launching.launch.launch`) and return plain numbers.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2LMHeadModel

from course_lib.lessons.lab_gpt2 import gpt2
from course_lib.metering.meter import Meter
from course_lib.modeling.stages import cut, shared_weights, split_evenly
from course_lib.parallel.ddp import average_gradients
from course_lib.parallel.pipeline.actions import Schedule
from course_lib.parallel.pipeline.executor import LossFunction, PipelineExecutor
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.tied import sum_shared_gradients
from course_lib.parallel.tensor_plans import TensorParallel
from course_lib.parallel.topology import AXES, RankGrid

VOCABULARY = 64


class Hybrid:
    """One rank's share of a model that is copied over dp, cut over pp and split over tp; made by all ranks together.

    The order matters only here: first every matrix is split, so that a tied embedding stays one weight; then the model
    is cut; and the copies' gradients are averaged after the last micro-batch.

    Args:
        model: a Hugging Face model for a task with a tensor-parallel plan, the same on all ranks; changed in place.
        grid: fills the ranks.
        schedule: the table of each pipeline, for ``grid.pp`` ranks.
        loss_function: of a micro-batch's logits and targets.
        split_vocabulary: split embedding and head over tp too.
    Attributes:
        stages: of this rank, by number.
        parameters: this rank's, by their names in the model; a piece where they are split.
        device: the model's, where it computes.
    """

    def __init__(
        self,
        model: nn.Module,
        grid: RankGrid,
        schedule: Schedule,
        loss_function: LossFunction,
        split_vocabulary: bool = True,
    ):
        self.grid, self.schedule, self.groups = grid, schedule, grid.groups()
        self.place = grid.coordinates(dist.get_rank())
        places = split_evenly(model, schedule.stages, "parameters")
        self.tensor = TensorParallel(model, self.groups.tp, split_vocabulary=split_vocabulary)
        self.shared = shared_weights(model, places)
        self.stages = cut(model, places, schedule.stages_of(self.place.pp))
        self.device = next(model.parameters()).device
        self.executor = PipelineExecutor(schedule, self.stages, loss_function, self.groups.pp, self.device)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = {names[p]: p for stage in self.stages.values() for p in stage.parameters()}

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of a global batch, of which each copy takes its rows; the gradients are in ``.grad``.

        Args:
            tokens: int64, (rows, tokens), the same on all ranks; rows divide by dp and the table's micro-batches.
            targets: likewise.
        Returns:
            The losses of this copy's micro-batches, on the rank of the last stage; else nothing.
        """
        mine, theirs = (rows.chunk(self.grid.dp)[self.place.dp] for rows in (tokens, targets))
        done = self.executor.step(input_ids=mine, targets=theirs)
        sum_shared_gradients(self.shared, self.stages, self.schedule.stage_ranks, self.groups.pp)
        average_gradients(self.parameters.values(), self.groups.dp)
        return done.losses

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole model's tensors, on every rank's CPU, from those of its parameters by name; a collective call."""
        stages: list[dict[str, Tensor]] = [{} for _ in range(self.grid.pp)]
        own = {name: tensor.cpu() for name, tensor in self.tensor.whole(tensors).items()}
        dist.all_gather_object(stages, own, group=self.groups.pp)
        return functools.reduce(lambda some, more: more | some, stages)

    def gradients(self) -> dict[str, Tensor]:
        """The whole model's gradients on every rank; a collective call."""
        return self.whole({name: p.grad for name, p in self.parameters.items() if p.grad is not None})

    def gradient_norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, each element counted once; a collective call.

        Pieces are added up over tp, stages over pp; what tp ranks have alike, and a tied weight's second copy on a
        later stage, is left out of the sum.
        """
        ranks = self.schedule.stage_ranks
        copies = {
            self.stages[stage].get_parameter(name)
            for names in self.shared
            for stage, name in names.items()
            if stage in self.stages and ranks[stage] == self.place.pp != ranks[min(names)]
        }
        square = torch.zeros((), device=self.device)
        for name, parameter in self.parameters.items():
            counts = name in self.tensor.splits or self.place.tp == 0
            if counts and parameter not in copies and parameter.grad is not None:
                square = square + parameter.grad.square().sum()
        for group in (self.groups.tp, self.groups.pp):
            dist.all_reduce(square, group=group)
        return square.sqrt()


def axis_of(grid: RankGrid, ranks: Iterable[int]) -> str:
    """The axis that some ranks, more than one, lie along."""
    places = [grid.coordinates(rank) for rank in ranks]
    (axis,) = [axis for axis in grid.axes if len({getattr(place, axis) for place in places}) > 1]
    return axis


def sent_by_axis(grid: RankGrid, meter: Meter) -> dict[str, int]:
    """Bytes that this rank sent along each axis, under the ring model."""
    sent = dict.fromkeys(AXES, 0)
    for call in meter.collectives:
        if call.sent:
            sent[axis_of(grid, call.ranks)] += call.sent
    return sent


def tiny_gpt2(layers: int = 4, width: int = 32, heads: int = 4, length: int = 16, tied: bool = True) -> GPT2LMHeadModel:
    """A GPT-2 without dropout, the same weights on every call."""
    return gpt2(
        layers, width, length, VOCABULARY, heads=heads, use_cache=False, initializer_range=0.1, tie_word_embeddings=tied
    )


def batch(rows: int, length: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and the next ones as targets; int64, (rows, length) each."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (rows, tokens, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- One step on the grid, watched ---


@dataclass(frozen=True)
class Step:
    """One step on the grid, as one rank saw it, beside one process with the same global batch.

    Attributes:
        loss: of the global batch.
        norm: of the whole gradient.
        apart: the largest distance of a gradient from one process's, as a share of the largest gradient.
        whole_loss: of one process.
        whole_norm: of one process.
    """

    loss: float
    norm: float
    apart: float
    whole_loss: float
    whole_norm: float


@dataclass(frozen=True)
class Work:
    """A small GPT-2 and its global batch.

    Attributes:
        tied: its head is its embedding.
        split_vocabulary: both are split over tp, where they otherwise are whole.
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    tokens: int = 32
    rows: int = 16
    microbatches: int = 4
    tied: bool = False
    split_vocabulary: bool = False


def step_on(grid: RankGrid, work: Work, schedule: str = "1f1b", device: torch.device | str = "cpu") -> Step:
    """One forward and backward of a global batch; embedding and head on the first and the last stage.

    Args:
        grid: the size of each axis.
        work: the model and its batch.
        schedule: of each pipeline, by its name.
        device: of this rank's share; one process's gradients, to compare with, are always computed on the CPU.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")

    def build() -> GPT2LMHeadModel:
        return tiny_gpt2(work.layers, work.width, work.heads, work.tokens, work.tied)

    tokens, targets = batch(work.rows, work.tokens)
    whole = build()
    whole_loss = next_token_loss(whole(input_ids=tokens).logits, targets)
    whole_loss.backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    table = make(schedule, grid.pp, work.microbatches)
    hybrid = Hybrid(build().to(device), grid, table, next_token_loss, work.split_vocabulary)
    losses = hybrid.step(tokens.to(device), targets.to(device))
    loss = torch.stack(losses).mean() / grid.dp if losses else torch.zeros((), device=device)
    for group in (hybrid.groups.dp, hybrid.groups.pp):
        dist.all_reduce(loss, group=group)
    gradients = hybrid.gradients()
    apart = max((gradients[name] - gradient).abs().max().item() for name, gradient in wanted.items())
    return Step(
        loss.item(),
        hybrid.gradient_norm().item(),
        apart / max(g.abs().max().item() for g in wanted.values()),
        whole_loss.item(),
        nn.utils.get_total_norm(wanted.values()).item(),
    )
