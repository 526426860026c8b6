"""Audited step on one rank, and its record."""

import pickle
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from course_lib.audit.layouts import Layout
from course_lib.errors import CourseError
from course_lib.parallel.sharding import Shard
from course_lib.parallel.trees import tensors_of

PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What wrappers put before the names of a module's parameters."""


@dataclass
class Subject:
    """A model and one step of it, on this rank.

    Attributes:
        model: as the step runs it; wrapped or not.
        optimizer: whose ``step()`` is called with all gradients reduced, or reduces them itself.
        loss: ``loss(model, batch)`` gives this rank's loss of the whole step, a scalar whose ``backward()`` is the
            step's: a mean or sum over what the rank has, its share of the whole mean, or the whole mean itself. A rank
            that has none, as in a pipeline, gives None and has done its backward itself.
        batch: this rank's.
        gradients: whole gradients by parameter, read while ``optimizer.step()`` begins, for engines that keep them
            elsewhere than in ``.grad``; every rank calls it. None: ``.grad``, whole where it is a DTensor.
        weights: whole parameters by name, for engines that keep them in shards; every rank calls it.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor | None]
    batch: Any
    gradients: Callable[[], Mapping[str, Tensor | None]] | None = None
    weights: Callable[[], Mapping[str, Tensor]] | None = None


class Make(Protocol):
    """Makes the subject on one rank; the process group is there, of ``layout.ranks`` ranks over gloo."""

    def __call__(self, layout: Layout) -> Subject | tuple: ...


@dataclass
class Record:
    """Record of one rank's steps.

    Attributes:
        start: weights before the first step, by name.
        losses: of each step; empty where this rank computes none.
        gradients: of the first step, whole, by name; None where a parameter has none.
        weights: after all steps.
        buffers: after all steps.
        terms: elements of the largest tensor in the batch: over so many numbers a gradient is summed.
        batch: of this rank; None where it cannot be sent.
        dropouts: modules of dropout that draw.
        drew: random numbers were drawn from torch's generators.
    """

    start: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    terms: int = 1
    batch: Any = None
    dropouts: int = 0
    drew: bool = False

    @property
    def norm(self) -> float:
        """Of the whole gradient."""
        return sum(float(g.double().square().sum()) for g in self.gradients.values() if g is not None) ** 0.5


def observe(make: Make, layout: Layout, steps: int, seed: int = 0, dropout: bool = True) -> Record:
    """Make the subject on this rank, take some steps, and write down what happened.

    Args:
        make: of the subject; what it draws is the same in every run.
        layout: of the ranks.
        steps: to take.
        seed: of what the steps draw.
        dropout: leave the modules of dropout as they are; else they keep everything.
    """
    subject = _made(make, layout)
    drawing = [
        module for module in subject.model.modules() if isinstance(module, _DropoutNd) and module.p and module.training
    ]
    if not dropout:
        for module in drawing:
            module.p = 0.0
    record = Record(
        weights_of(subject),
        terms=max((t.numel() for t in tensors_of(subject.batch)), default=1),
        batch=_if_sendable(subject.batch),
        dropouts=len(drawing),
    )

    def read(*_: Any) -> None:
        if not record.gradients:
            record.gradients = gradients_of(subject)

    subject.optimizer.register_step_pre_hook(read)  # after the engine's own: what it hands out is there
    seed_all(seed)
    for _ in range(steps):
        loss = subject.loss(subject.model, subject.batch)
        if loss is not None:
            loss.backward()
            record.losses.append(float(loss.detach().double()))
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    record.weights = weights_of(subject)
    record.buffers = {plain_name(name): buffer.detach().clone() for name, buffer in subject.model.named_buffers()}
    return record


def observe_parts(make: Make, batches: list[Any], dropout: bool) -> list[dict[str, Tensor | None]]:
    """The first gradient of each batch alone, on one process that begins anew for each."""
    records = []
    for batch in batches:

        def of_batch(layout: Layout, batch: Any = batch) -> Subject:
            subject = make(layout)
            subject = subject if isinstance(subject, Subject) else _of_tuple(subject)
            subject.batch = batch
            return subject

        records.append(observe(of_batch, Layout(), 1, dropout=dropout).gradients)
    return records


def _made(make: Make, layout: Layout) -> Subject:
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    seed_all(0)
    made = make(layout)
    return made if isinstance(made, Subject) else _of_tuple(made)


def seed_all(seed: int) -> None:
    """The generators of torch, of Python, and of NumPy where it is in use."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _if_sendable(batch: Any) -> Any:
    try:
        pickle.dumps(batch)
    except Exception:  # a foreign object's own reduction may raise anything; then nothing is explained by the batches
        return None
    return batch


def _of_tuple(made: Any) -> Subject:
    if not isinstance(made, tuple) or len(made) != 4:
        raise CourseError(f"`make` gave {type(made).__name__}", "return (model, optimizer, loss, batch), or a Subject")
    return Subject(*made)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers add."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def gradients_of(subject: Subject) -> dict[str, Tensor | None]:
    """Whole, by the plain names of the parameters; every rank calls it."""
    if subject.gradients is not None:
        return {plain_name(name): None if g is None else _whole(g) for name, g in subject.gradients().items()}
    return {
        plain_name(name): None if parameter.grad is None else _whole(parameter.grad)
        for name, parameter in subject.model.named_parameters()
    }


def weights_of(subject: Subject) -> dict[str, Tensor]:
    """Whole, by the plain names of the parameters; every rank calls it."""
    named = dict(subject.model.named_parameters()) if subject.weights is None else subject.weights()
    return {plain_name(name): _whole(tensor) for name, tensor in named.items()}


def gathered_shards(
    shards: Mapping[str, Shard], gradients: bool, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor | None]:
    """Whole tensors from this course's sharded engines, ``engine.shards()``; every rank calls it.

    Args:
        shards: this rank's.
        gradients: of the shards, as the optimizer has them; else the shards themselves.
        group: whose ranks hold the rest.
    """
    mine = {
        name: (shard.start, shard.data.grad if gradients else shard.data.detach()) for name, shard in shards.items()
    }
    everybody: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everybody, mine, group=group)
    whole: dict[str, Tensor | None] = {}
    for name, shard in shards.items():
        parts = [(start, data) for start, data in (theirs[name] for theirs in everybody) if data is not None]
        if not parts:
            whole[name] = None
            continue
        flat = torch.zeros(shard.shape.numel(), dtype=parts[0][1].dtype)
        for start, data in parts:
            flat[start : start + data.numel()] = data
        whole[name] = flat.view(shard.shape)
    return whole
