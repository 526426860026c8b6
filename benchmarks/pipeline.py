"""Our pipeline executor beside torch's schedule runtime: the same tables, the same stages, in one run.

    python benchmarks/pipeline.py                     # 2 ranks; on GPUs, one per rank
    python benchmarks/pipeline.py --num_processes 4 --microbatches 8 --hidden 128

Both engines live in the same ranks on copies of the same stages and take turns, so that a drift of the machine
meets both; a ratio is the median of the rounds' ratios. torch reads our table as CSV. The simulator's speed is
measured on a table of 64 stages and 512 micro-batches. Writes benchmarks/pipeline-DEVICE.md.
"""

import copy
import statistics
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
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
from course_lib.modeling.stages import cut, split_evenly
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import simulate
from course_lib.parallel.torch_engines.pipeline import TorchPipeline

VOCABULARY = 1024
ENGINES: dict[str, Callable] = {"ours": PipelineExecutor, "torch": TorchPipeline}


def model_of(args: Namespace) -> GPT2LMHeadModel:
    """GPT-2 with the same weights on every call, and with dropout."""
    return gpt2(args.layers, args.hidden, args.length, VOCABULARY, dropout=0.1)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def measure(args: Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step in every round, by schedule and engine, on this rank."""
    device = join_ranks(args.cpu)
    model = model_of(args).to(device)
    ids = torch.randint(0, VOCABULARY, (args.microbatches * args.rows, args.length), device=device)

    def step(engine: PipelineExecutor | TorchPipeline) -> None:
        engine.step(targets=ids, input_ids=ids)
        for stage in engine.stages.values():
            stage.zero_grad()

    found = {}
    for name in KINDS:
        schedule = make(name, dist.get_world_size(), args.microbatches)
        own = cut(model, split_evenly(model, schedule.stages, by="parameters"), schedule.stages_of(dist.get_rank()))
        engines = {
            engine: make_engine(schedule, copy.deepcopy(own), loss, device=device)
            for engine, make_engine in ENGINES.items()
        }
        steps = {name: partial(seconds, partial(step, engine), args.steps) for name, engine in engines.items()}
        found[name] = in_turns(steps, args.rounds, warm_up=2)
    dist.destroy_process_group()
    return found


def main() -> None:
    """Measure on real ranks and write the table."""
    args = options(__doc__, **ON_GPUS, hidden=128, layers=8, length=64, rows=2, microbatches=8, rounds=12, steps=2)
    kind, place = place_of_ranks(args)
    found = launch(measure, args, timeout=1800, **place)[0]
    size = sum(parameter.numel() for parameter in model_of(args).parameters())
    large = make("1f1b", 64, 512)
    simulated = min(seconds(partial(simulate, large)) for _ in range(5))
    publish(
        f"pipeline-{kind}",
        f"Pipelines: {kind}",
        ("torch", "transformers"),
        f"{place['num_processes']} ranks, GPT-2 of {size / 1e6:.1f} M parameters, fp32, {args.microbatches} "
        f"micro-batches of {args.rows} rows of {args.length} tokens; {args.rounds} rounds of {args.steps} steps, in "
        "turn; forward and backward.",
        table(
            "schedule | ours, median (ms) | torch, median (ms) | ours / torch",
            [
                (name, milliseconds(ours), milliseconds(theirs), f"{statistics.median(ratios(ours, theirs)):.2f}")
                for name, (ours, theirs) in ((name, taken.values()) for name, taken in found.items())
            ],
        ),
        f"Simulator: 64 stages × 512 micro-batches in {simulated:.2f} s.",
    )


if __name__ == "__main__":
    main()
