"""Measurements of lesson 05: bytes that a rank holds and sends at each stage of ZeRO, and missing phases."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import GPT2LMHeadModel

from course_lib.lessons.lab_gpt2 import gpt2
from course_lib.metering.meter import KINDS, Meter
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out, quiet_deepspeed

STAGES = (0, 1, 2, 3)
STATE = KINDS[:3]
"""Parameters, gradients and optimizer states: what the paper calls model states."""

PUBLISHED_7_5B = {0: 120.0, 1: 31.4, 2: 16.6, 3: 1.88}
"""GB (10^9 bytes) per GPU for 7.5 billion parameters on 64 GPUs, as printed (arXiv 1910.02054, Table 1, Figure 1)."""


def model_states(
    stage: int,
    ranks: int,
    parameters: float,
    *,
    parameter_bytes: int = 4,
    gradient_bytes: int = 4,
    optimizer_bytes: int = 8,
) -> dict[str, float]:
    """Bytes of model states per rank, by kind (arXiv 1910.02054, section 5).

    Args:
        stage: 0 for plain data parallel.
        ranks: N.
        parameters: Ψ, how many there are.
        parameter_bytes: a parameter.
        gradient_bytes: a parameter.
        optimizer_bytes: a parameter: 8 for Adam in fp32; K = 12 with its fp32 master under mixed precision.
    """
    return {
        "parameters": parameter_bytes * parameters / (ranks if stage >= 3 else 1),
        "gradients": gradient_bytes * parameters / (ranks if stage >= 2 else 1),
        "optimizer states": optimizer_bytes * parameters / (ranks if stage >= 1 else 1),
    }


def small_gpt2(layers: int = 4, width: int = 96) -> GPT2LMHeadModel:
    """A GPT-2 small enough for a laptop; without dropout, so that runs can be compared."""
    return gpt2(layers, width, tokens=32, vocabulary=512)


def engine_of(
    stage: int, model: nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[Any, torch.optim.Optimizer]:
    """The from-scratch engine of a stage around a model, and its AdamW; small buckets, as the model is small."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if stage == 0:
        return DataParallel(model, group=group, bucket_bytes=400_000), optimizer
    if stage == 3:
        return Zero3(model, optimizer, group=group), optimizer
    return {1: Zero1, 2: Zero2}[stage](model, optimizer, group=group, bucket_bytes=400_000), optimizer


def token_ids(rank: int, step: int = 0, rows: int = 4) -> torch.Tensor:
    """int64 [rows, 32], a rank's own batch of a step."""
    return torch.randint(0, 512, (rows, 32), generator=torch.Generator().manual_seed(1000 * step + rank))


def one_step(engine: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, micro_batches: int = 1) -> torch.Tensor:
    """Forward, backward and update; gives the loss of the last micro-batch."""
    for part in ids.chunk(micro_batches):
        loss = engine(input_ids=part, labels=part).loss / micro_batches
        loss.backward()
    stepper = engine if isinstance(engine, Zero1 | Zero3) else optimizer
    stepper.step()
    stepper.zero_grad()
    return loss.detach()


def bill(world_sizes: Sequence[int], micro_batches: int = 2) -> dict[str, Any]:
    """Bytes that a rank holds and sends at each stage and world size; run on as many ranks as the largest.

    Returns:
        ``elements``: Ψ; ``held``: bytes by kind after backward, by (stage, N); ``sent``: bytes per step under the ring
        model, by (stage, N); ``accumulating``: the same with micro-batches, at the largest N; ``calls``: collectives
        of the step by name, by (stage, N).
    """
    measured: dict[str, Any] = {"held": {}, "sent": {}, "accumulating": {}, "calls": {}}
    device = Accelerator().device  # joins the ranks of the launch
    rank = dist.get_rank()
    for world in world_sizes:
        group = dist.new_group(range(world))
        if rank >= world:
            continue
        for stage in STAGES:
            model = small_gpt2().to(device)
            measured["elements"] = sum(p.numel() for p in model.parameters())
            engine, optimizer = engine_of(stage, model, group)
            one_step(engine, optimizer, token_ids(rank).to(device))
            meter = Meter(model, optimizer, getattr(engine, "resident", None))
            with meter:
                ids = token_ids(rank).to(device)
                engine(input_ids=ids, labels=ids).loss.backward()
            measured["held"][stage, world] = {kind: meter.resident[kind] for kind in STATE}
            (engine if stage else optimizer).zero_grad()
            with Meter(model, optimizer) as meter:
                one_step(engine, optimizer, token_ids(rank).to(device))
            measured["sent"][stage, world] = meter.bytes_sent
            measured["calls"][stage, world] = {row["name"]: row["calls"] for row in meter.table()}
            if world == max(world_sizes):
                with Meter(model, optimizer) as meter:
                    one_step(engine, optimizer, token_ids(rank).to(device), micro_batches)
                measured["accumulating"][stage] = meter.bytes_sent
    return measured


def held_by(model: nn.Module, engine: Any) -> dict[str, int]:
    """Bytes of model states on this rank, by kind, each block of memory once.

    Args:
        model: its parameters and their gradients count.
        engine: an optimizer; or what has one as ``optimizer``, whose parameters and their gradients count too.
    """
    optimizer = getattr(engine, "optimizer", engine)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = [*model.parameters(), *own]
    states = (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    tensors = (parameters, [parameter.grad for parameter in parameters if parameter.grad is not None], states)
    return {
        kind: sum(
            {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, those)}.values()
        )
        for kind, those in zip(STATE, tensors, strict=True)
    }


def prepare_deepspeed() -> None:
    """On each rank, before DeepSpeed's engine is made: fewer messages, and no operator compiled that no step uses."""
    quiet_deepspeed()
    leave_shared_memory_operator_out()


class ForgetsToGather(Zero1):
    """Stage 1 with its last phase left out: each rank keeps the slice that it updated to itself."""

    def refresh(self) -> None:
        for bucket in self.buckets:
            bucket.local_shard.copy_(bucket.master)


class ClipsAlone(Zero1):
    """Stage 1 that clips by the norm of its own slice, and not by the global norm."""

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        self.reduce()
        mine = [bucket.gradient for bucket in self.buckets if bucket.gradient is not None]
        norm = torch.stack([gradient.square().sum() for gradient in mine]).sum().sqrt()
        for gradient in mine:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def broken(kind: type[Zero1], steps: int, max_norm: float | None = None) -> tuple[float, float]:
    """Spread of the ranks' weights after some steps, and the distance of rank 0's from plain data parallel."""
    device = Accelerator().device
    right = small_gpt2().to(device)
    wrong = copy.deepcopy(right)
    plain, theirs = engine_of(0, right)
    ours = torch.optim.AdamW(wrong.parameters(), lr=1e-3)
    engine = kind(wrong, ours, bucket_bytes=400_000)
    for step in range(steps):
        ids = token_ids(dist.get_rank(), step).to(device)
        for module in (plain, engine):
            module(input_ids=ids, labels=ids).loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(right.parameters(), max_norm)
            engine.clip_grad_norm_(max_norm)
        theirs.step()
        theirs.zero_grad()
        engine.step()
        engine.zero_grad()
    mine = nn.utils.parameters_to_vector(wrong.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, src=0)
    apart = (mine - first).abs().max()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return apart.item(), (first - nn.utils.parameters_to_vector(right.parameters()).detach()).abs().max().item()


def on_the_wire() -> dict[int, tuple[int, list[int | None]]]:
    """Bytes that all ranks together send in a step, by stage: by the ring model, and as the kernel counts three steps.

    On a busy machine TCP sends some packets twice; nothing makes a step send less than was asked for.
    """
    device = Accelerator().device
    by_stage: dict[int, tuple[int, list[int | None]]] = {}
    for stage in STAGES:
        model = small_gpt2(width=256).to(device)
        engine, optimizer = engine_of(stage, model)
        one_step(engine, optimizer, token_ids(dist.get_rank()).to(device))
        dist.barrier()
        counted = []
        for _ in range(3):
            with Meter(model, optimizer) as meter:  # a barrier at both ends, or a neighbour's bytes fall outside
                dist.barrier()
                one_step(engine, optimizer, token_ids(dist.get_rank()).to(device))
                dist.barrier()
            counted.append(meter.wire_bytes)
        ring = torch.tensor(meter.bytes_sent, device=device)
        dist.all_reduce(ring)
        by_stage[stage] = int(ring), counted
    return by_stage
