"""Data parallel, ZeRO and FSDP: ours beside torch's and DeepSpeed's, on the same model, in one run.

    python benchmarks/data_parallel.py                     # 2 ranks; on GPUs, one per rank
    python benchmarks/data_parallel.py --num_processes 4 --hidden 512 --layers 8

Every engine lives in the same ranks and takes its turn, so that a drift of the machine meets them
all; a ratio is the median of the rounds' ratios. Peak memory is the meter's: model state,
communication buffers and activations of one step, a rank. Writes benchmarks/data-parallel-DEVICE.md.
"""

import gc
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

from benchmarks.harness import (
    ON_GPUS,
    join_ranks,
    milliseconds,
    options,
    place_of_ranks,
    publish,
    ratios,
    seconds,
    table,
)
from course_lib.launching.launch import launch
from course_lib.lessons.lab_gpt2 import gpt2
from course_lib.lessons.turns import in_turns
from course_lib.metering.meter import Meter
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out

PEERS = {
    "ddp": [("ddp", "torch")],
    "zero1": [("zero1", "deepspeed")],
    "zero2": [("zero2", "deepspeed")],
    "zero3": [("zero3", "deepspeed")],
    "fsdp": [("fsdp", "torch"), ("zero3", "deepspeed")],
}
"""What each strategy's ratios are taken against."""
VOCABULARY = 4096


@dataclass
class System:
    """One engine around one copy of the model: a step, and what the meter has to know."""

    step: Callable[[torch.Tensor], None]
    module: nn.Module
    optimizer: Any
    resident: Callable | None = None


def adamw(model: nn.Module, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain(wrapped: Any, optimizer: torch.optim.Optimizer, **more: Any) -> System:
    """Forward, backward, step and clear, as every engine but DeepSpeed has it."""
    stepper = wrapped if hasattr(wrapped, "step") else optimizer

    def step(ids: torch.Tensor) -> None:
        wrapped(input_ids=ids, labels=ids).loss.backward()
        stepper.step()
        stepper.zero_grad()

    return System(step, wrapped, optimizer, **more)


def deepspeed_system(model: nn.Module, device: torch.device, stage: int) -> System:
    import deepspeed

    leave_shared_memory_operator_out()
    zero = {
        "stage": stage,
        "reduce_bucket_size": 6_553_600,
        "allgather_bucket_size": 6_553_600,
        "stage3_param_persistence_threshold": 0,
    }
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model, device),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return System(step, engine, optimizer)


def build_system(strategy: str, engine: str, model: nn.Module, device: torch.device) -> System:
    """The engine around a model of its own."""
    if engine == "deepspeed":
        return deepspeed_system(model, device, int(strategy[-1]))
    if strategy == "ddp":
        wrap = DataParallel if engine == "scratch" else DistributedDataParallel
        return plain(wrap(model), adamw(model, device))
    if (strategy, engine) == ("zero1", "torch"):
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        return plain(DistributedDataParallel(model), optimizer)
    optimizer = adamw(model, device)
    if engine == "torch":
        wrapped: Any = shard_with_torch(model, optimizer, reshard_after_forward=strategy != "zero2")
    else:
        wrapped = {"zero1": Zero1, "zero2": Zero2, "zero3": Zero3, "fsdp": FullyShardedDataParallel}[strategy](
            model, optimizer
        )
    return plain(wrapped, optimizer, resident=wrapped.resident)


SYSTEMS = [
    (strategy, engine)
    for strategy in PEERS
    for engine in ("torch", "deepspeed", "scratch")
    if engine != "deepspeed" or "zero" in strategy
]


def model_of(args: Namespace) -> GPT2LMHeadModel:
    """GPT-2 with the same weights on every call, and with dropout."""
    return gpt2(args.layers, args.hidden, args.length, VOCABULARY, dropout=0.1)


def measure(args: Namespace) -> dict[tuple[str, str], tuple[list[float], int]]:
    """Seconds of every round and peak bytes, by system, on this rank."""
    device = join_ranks(args.cpu)
    os.environ["DS_ACCELERATOR"] = device.type
    systems = {name: build_system(*name, model_of(args).to(device), device) for name in SYSTEMS}
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (args.batch_size, args.length), device=device)

    peaks = {}
    for name, system in systems.items():
        system.step(ids)
        system.step(ids)
        with Meter(system.module, system.optimizer, system.resident) as meter:
            system.step(ids)
        peaks[name] = meter.peak_total
    gc.collect()
    steps = {name: partial(seconds, partial(system.step, ids), args.steps) for name, system in systems.items()}
    found = in_turns(steps, args.rounds)
    dist.destroy_process_group()
    return {name: (found[name], peaks[name]) for name in systems}


def rows(found: dict[tuple[str, str], tuple[list[float], int]]) -> Iterator[tuple]:
    """Rows by system: step time, ratio to the peers, peak memory."""
    for (strategy, engine), (taken, peak) in found.items():
        against = [
            f"{statistics.median(ratios(found[peer][0], taken)):.2f} × {' '.join(peer)}"
            for peer in PEERS[strategy]
            if peer != (strategy, engine)
        ]
        yield strategy, engine, milliseconds(taken), ", ".join(against) or "1 (the peer)", f"{peak / 2**20:.1f}"


def main() -> None:
    """Measure on real ranks and write the table."""
    args = options(__doc__, **ON_GPUS, hidden=256, layers=6, length=64, batch_size=4, rounds=12, steps=3)
    kind, place = place_of_ranks(args)
    found = launch(measure, args, timeout=1800, **place)[0]
    size = sum(parameter.numel() for parameter in model_of(args).parameters())
    publish(
        f"data-parallel-{kind}",
        f"Data parallel, ZeRO and FSDP: {kind}",
        ("torch", "transformers", "deepspeed"),
        f"{place['num_processes']} ranks, GPT-2 of {size / 1e6:.1f} M parameters, fp32, AdamW, "
        f"{args.batch_size} rows of {args.length} tokens per rank; {args.rounds} rounds of {args.steps} "
        "steps, in turn.",
        table(
            "strategy | engine | step, median (ms) | speed against the peer | peak memory per rank (MiB)", rows(found)
        ),
    )


if __name__ == "__main__":
    main()
