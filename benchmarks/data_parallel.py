"""Data parallel, ZeRO and FSDP: ours beside torch's and DeepSpeed's, on the same model, in one run.

    python benchmarks/data_parallel.py                     # 2 ranks; on GPUs, one per rank
    python benchmarks/data_parallel.py --num_processes 4 --hidden 512 --layers 8

Every engine lives in the same ranks and takes its turn, so that a drift of the machine meets them
all; a ratio is the median of the rounds' ratios. Peak memory is the meter's: model state,
communication buffers and activations of one step, a rank. Writes benchmarks/data-parallel-DEVICE.md.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.launching.launch import launch
from course_lib.metering.meter import Meter
from course_lib.parallel.ddp import DataParallel
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero import Zero1, Zero2
from course_lib.parallel.zero3 import Zero3
from course_lib.system import machine
from course_lib.training.engines.with_deepspeed import leave_shared_memory_operator_out
from course_lib.writing import write_text

HERE = Path(__file__).parent
PEERS = {
    "ddp": [("ddp", "torch")],
    "zero1": [("zero1", "deepspeed")],
    "zero2": [("zero2", "deepspeed")],
    "zero3": [("zero3", "deepspeed")],
    "fsdp": [("fsdp", "torch"), ("zero3", "deepspeed")],
}
"""What each strategy's ratios are taken against."""


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
    ("ddp", "torch"),
    ("ddp", "scratch"),
    ("zero1", "torch"),
    ("zero1", "deepspeed"),
    ("zero1", "scratch"),
    ("zero2", "torch"),
    ("zero2", "deepspeed"),
    ("zero2", "scratch"),
    ("zero3", "torch"),
    ("zero3", "deepspeed"),
    ("zero3", "scratch"),
    ("fsdp", "torch"),
    ("fsdp", "scratch"),
]


def measure(args: argparse.Namespace) -> dict[tuple[str, str], tuple[list[float], int]]:
    """Seconds of every round and peak bytes, by system, on this rank."""
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ["DS_ACCELERATOR"] = device.type
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    config = GPT2Config(n_layer=args.layers, n_embd=args.hidden, n_head=4, n_positions=args.length, vocab_size=4096)
    systems = {}
    for strategy, engine in SYSTEMS:
        torch.manual_seed(0)
        systems[strategy, engine] = build_system(strategy, engine, GPT2LMHeadModel(config).to(device), device)
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(0, 4096, (args.batch_size, args.length), device=device)

    peaks = {}
    for name, system in systems.items():
        system.step(ids)
        system.step(ids)
        with Meter(system.module, system.optimizer, system.resident) as meter:
            system.step(ids)
        peaks[name] = meter.peak_total
    gc.collect()
    seconds: dict[tuple[str, str], list[float]] = {name: [] for name in systems}
    for turn in range(args.rounds):
        for name, system in list(systems.items())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(args.steps):
                system.step(ids)
            if cuda:
                torch.cuda.synchronize()
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / args.steps)
    dist.destroy_process_group()
    return {name: (seconds[name], peaks[name]) for name in systems}


def table(found: dict[tuple[str, str], tuple[list[float], int]]) -> str:
    """Markdown rows: step time, ratio to the peer, peak memory."""
    lines = [
        "| strategy | engine | step, median (ms) | speed against the peer | peak memory per rank (MiB) |",
        "|---|---|---|---|---|",
    ]
    for (strategy, engine), (seconds, peak) in found.items():
        against = {
            peer: statistics.median(p / s for p, s in zip(found[peer][0], seconds, strict=True))
            for peer in PEERS[strategy]
            if peer != (strategy, engine)
        }
        shown = ", ".join(f"{ratio:.2f} × {' '.join(peer)}" for peer, ratio in against.items()) or "1 (the peer)"
        lines.append(
            f"| {strategy} | {engine} | {1000 * statistics.median(seconds):.1f} | {shown} | {peak / 2**20:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure on real ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_processes", type=int, default=0, help="ranks; default: all GPUs, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true", help="keep off the GPUs")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of a system in one round")
    args = parser.parse_args()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    ranks = args.num_processes or gpus or 2
    found = launch(measure, args, num_processes=ranks, timeout=1800, device="cuda" if gpus else "cpu")[0]
    config = GPT2Config(n_layer=args.layers, n_embd=args.hidden, n_head=4, n_positions=args.length, vocab_size=4096)
    size = sum(p.numel() for p in GPT2LMHeadModel(config).parameters())
    kind = "gpu" if gpus else "cpu"
    text = (
        f"# Data parallel, ZeRO and FSDP: {kind}\n\n"
        f"{machine.measured_on('torch', 'transformers', 'deepspeed')}\n\n"
        f"{ranks} ranks, GPT-2 of {size / 1e6:.1f} M parameters, fp32, AdamW, {args.batch_size} rows of "
        f"{args.length} tokens per rank; {args.rounds} rounds of {args.steps} steps, in turn.\n\n{table(found)}\n"
    )
    write_text(HERE / f"data-parallel-{kind}.md", text)
    print(text)


if __name__ == "__main__":
    main()
