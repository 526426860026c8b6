"""Measurements of lesson 06: memory that is resident, bytes that move, and rounding, in small trainings under FSDP.

The functions run on ranks (:func:`course_lib.launching.launch.launch`) and return plain numbers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import GPT2LMHeadModel

from course_lib.lessons.lab_gpt2 import affine_chains, gpt2
from course_lib.metering.meter import Meter
from course_lib.metering.storages import resizes
from course_lib.modeling.recomputing import recompute_activations
from course_lib.parallel import blocks
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.torch_engines.fsdp import hybrid_mesh, shard_with_torch
from course_lib.training.checkpoints import sharded

VOCABULARY, LENGTH, HEADS = 256, 32, 4
GLOBAL_BATCH = 12  # rows; divides by 1, 2, 3, 4 and 6 ranks

Build = Callable[[], nn.Module]


def small_gpt2(layers: int, width: int, checkpointing: bool = False) -> GPT2LMHeadModel:
    """A GPT-2 without dropout, the same weights on every call; its token embedding is its output head too."""
    model = gpt2(layers, width, LENGTH, VOCABULARY, heads=HEADS, use_cache=False)
    if checkpointing:
        recompute_activations(model)
    return model.train()


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters by FSDP unit.

    Attributes:
        root: what lies outside the blocks, or is tied across them.
        block: one block; all are alike.
        blocks: how many.
    """

    root: int
    block: int
    blocks: int

    @property
    def total(self) -> int:
        return self.root + self.blocks * self.block


def sizes(model: nn.Module) -> Sizes:
    """Sizes of a model that the formulas need."""
    listed = list(blocks.blocks(model).values())
    owner = blocks.owners(model, listed)
    root = sum(parameter.nbytes for parameter, unit in owner.items() if unit is model)
    return Sizes(root, sum(parameter.nbytes for parameter in listed[0].parameters()), len(listed))


@dataclass(frozen=True)
class WatchedSharding:
    """One training, as the first rank saw it.

    Attributes:
        losses: of each step, averaged over the ranks.
        steady: bytes of parameters before a step.
        trace: in the last step, bytes of parameters after each gather or free, with ``forward`` or ``backward``.
        peak: of the last step, bytes by kind.
        traffic: of the last step's forward and backward, rows of `Meter.table`.
        sent: bytes that this rank sent in them, under the ring model.
    """

    losses: list[float]
    steady: int
    trace: list[tuple[str, int]]
    peak: dict[str, int]
    traffic: list[dict[str, Any]]
    sent: int

    def moved(self, name: str) -> int:
        """Payload bytes of one kind of collective."""
        return sum(row["bytes"] for row in self.traffic if row["name"] == name)

    def calls(self, name: str) -> int:
        """Number of calls of one kind of collective."""
        return sum(row["calls"] for row in self.traffic if row["name"] == name)


def watch(build: Build, engine: str = "scratch", steps: int = 2, replicas: int = 1, **options: Any) -> WatchedSharding:
    """Train for some steps, and watch the last.

    Args:
        build: makes the whole model.
        engine: ``scratch`` or ``torch`` for FSDP, ``ddp`` for the course's data parallelism.
        steps: at least 2: in the first one FSDP2 still makes its buffers.
        replicas: with ``torch``, how many copies of the model there are (HSDP); the rest of the ranks share a copy.
        **options: of the engine.
    """
    if replicas > 1:
        device = Accelerator().device.type
        options["mesh"] = hybrid_mesh(device, replicas, dist.get_world_size() // replicas)
    model = engine_of(engine, build, **options)
    resident = getattr(model, "resident", None)
    account = resident if engine == "scratch" else None  # FSDP2's buffers are in no list: the meter looks for itself
    losses = train_steps(model, model, steps - 1)
    steady = held(resident) if resident else 0
    with changes(resident) as trace, Meter(model.module, model.optimizer, account) as meter:
        loss = batch_loss(model, steps - 1)
        forward = len(trace)
        loss.backward()
    losses.append(averaged(loss))
    phases = [("forward" if i < forward else "backward", size) for i, size in enumerate(trace)]
    return WatchedSharding(losses, steady, phases, meter.peak, meter.table(), meter.bytes_sent)


def held(resident: Callable[[], Mapping[str, list[Tensor]]]) -> int:
    """Bytes of the parameters that an engine holds, each storage once."""
    storages = (tensor.untyped_storage() for tensor in resident()["parameters"])
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextlib.contextmanager
def changes(resident: Callable[[], Mapping[str, list[Tensor]]] | None) -> Iterator[list[Any]]:
    """Collects the bytes of parameters each time that the memory of gathered ones is taken or given back.

    Both engines do that by resizing a storage, so one pair of eyes serves for both.
    """
    seen: list[Any] = []

    def note(storage: torch.UntypedStorage) -> None:
        if resident and (now := held(resident)) != (seen[-1] if seen else None):
            seen.append(now)

    with resizes(note):
        yield seen


def apart(some: WatchedSharding, others: WatchedSharding) -> float:
    """The largest difference of two runs' losses."""
    return max(abs(a - b) for a, b in zip(some.losses, others.losses, strict=True))


def gradient_after(build: Build, micro_batches: int, reduce_dtype: torch.dtype) -> Tensor:
    """This rank's part of the gradient under bf16 parameters, summed in ``reduce_dtype``; 1-D, float32."""
    engine = engine_of("scratch", build, param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for i in range(micro_batches):
        with contextlib.nullcontext() if i == micro_batches - 1 else engine.no_sync():
            batch_loss(engine, i).backward()
    return torch.cat([shard.data.grad.float() for shard in engine.shards().values() if shard.data.grad is not None])


def rounding_error(build: Build, micro_batches: int) -> float:
    """Distance of a gradient summed in bf16 from the one summed in float32, as a share of its length."""
    low, high = (gradient_after(build, micro_batches, dtype) for dtype in (torch.bfloat16, torch.float32))
    squares = torch.stack([(low - high).square().sum(), high.square().sum()])
    dist.all_reduce(squares)
    return (squares[0] / squares[1]).sqrt().item()


def flat_and_rows(build: Build) -> dict[str, tuple[int, list[int]]]:
    """This rank's part of each parameter: elements of a flat shard, and the shape of FSDP2's ``DTensor`` shard."""
    flat = engine_of("scratch", build).shards()
    module = engine_of("torch", build).module
    return {
        name: (flat[name].data.numel(), list(parameter.to_local().shape))
        for name, parameter in module.named_parameters()
    }


def train_and_save(build: Build, folder: Path, steps: int) -> float:
    """Train, write the shards of all ranks below ``folder``, and return the loss of a batch that was not trained on."""
    engine = engine_of("scratch", build)
    train_steps(engine, engine, steps)
    sharded.save(engine.shards(), folder)
    with torch.no_grad():
        return averaged(batch_loss(engine, steps))


def batch_loss(engine: nn.Module, step: int, rows: int = GLOBAL_BATCH) -> Tensor:
    """Mean cross-entropy of this rank's rows of a step's batch: chains that an affine map continues."""
    whole = affine_chains(rows, LENGTH, VOCABULARY, seed=step)
    mine = whole[dist.get_rank() :: dist.get_world_size()].to(Accelerator().device)
    logits = engine(input_ids=mine).logits.float()
    return cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())


def train_steps(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> list[float]:
    """Train a model on the batches from ``first`` on; the losses of all steps, averaged over the ranks."""
    losses = []
    for step in range(first, first + steps):
        loss = batch_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(averaged(loss))
    return losses


def averaged(loss: Tensor) -> float:
    """Mean over the ranks, which have equal numbers of rows."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def engine_of(name: str, build: Build, **options: Any) -> Any:
    """The model behind an engine with ``module``, ``optimizer``, ``step`` and ``zero_grad``; joins the ranks first."""
    module = build().to(Accelerator().device)
    optimizer = AdamW(module.parameters(), lr=3e-3, eps=1e-5)  # eps: Adam would blow up the noise of tiny gradients
    if name == "scratch":
        return FullyShardedDataParallel(module, optimizer, **options)
    if name == "torch":
        return shard_with_torch(module, optimizer, **options)
    engine: Any = DataParallel(module, **options)
    engine.optimizer, engine.step = optimizer, optimizer.step
    return engine
