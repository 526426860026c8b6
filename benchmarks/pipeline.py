"""Our pipeline executor beside torch's schedule runtime: the same tables, the same stages, in one run.

    python benchmarks/pipeline.py                     # 2 ranks; on GPUs, one per rank
    python benchmarks/pipeline.py --num_processes 4 --microbatches 8 --hidden 128

Both engines live in the same ranks on copies of the same stages and take turns, so that a drift of the machine
meets both; a ratio is the median of the rounds' ratios. torch reads our table as CSV. The simulator's speed is
measured on a table of 64 stages and 512 micro-batches. Writes benchmarks/pipeline-DEVICE.md.
"""

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from course_lib.launching.launch import launch
from course_lib.modeling.stages import cut, split_evenly
from course_lib.parallel.pipeline.executor import PipelineExecutor
from course_lib.parallel.pipeline.schedules import KINDS, make
from course_lib.parallel.pipeline.simulation import simulate
from course_lib.parallel.torch_engines.pipeline import TorchPipeline
from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).parent
VOCABULARY = 1024
ENGINES: dict[str, Callable] = {"ours": PipelineExecutor, "torch": TorchPipeline}


def config(args: argparse.Namespace) -> GPT2Config:
    return GPT2Config(
        n_layer=args.layers,
        n_embd=args.hidden,
        n_head=4,
        n_positions=args.length,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
    )


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def measure(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step in every round, by schedule and engine, on this rank."""
    rank, cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config(args)).to(device)
    ids = torch.randint(0, VOCABULARY, (args.microbatches * args.rows, args.length), device=device)

    def step(engine: PipelineExecutor | TorchPipeline) -> None:
        engine.step(targets=ids, input_ids=ids)
        for stage in engine.stages.values():
            stage.zero_grad()

    found = {}
    for name in KINDS:
        schedule = make(name, dist.get_world_size(), args.microbatches)
        own = cut(model, split_evenly(model, schedule.stages, by="parameters"), schedule.stages_of(rank))
        engines = {
            engine: make_engine(schedule, copy.deepcopy(own), loss, device=device)
            for engine, make_engine in ENGINES.items()
        }
        seconds: dict[str, list[float]] = {engine: [] for engine in engines}
        for turn in range(args.rounds + 2):
            for engine in list(engines)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(args.steps):
                    step(engines[engine])
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier()
                if turn >= 2:  # the first rounds warm up
                    seconds[engine].append((time.perf_counter() - begin) / args.steps)
        found[name] = seconds
    dist.destroy_process_group()
    return found


def ratio(seconds: dict[str, list[float]]) -> float:
    """Our step time by torch's: the median of the rounds'."""
    return statistics.median(ours / theirs for ours, theirs in zip(seconds["ours"], seconds["torch"], strict=True))


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown rows: step times and their ratio."""
    lines = ["| schedule | ours, median (ms) | torch, median (ms) | ours / torch |", "|---|---|---|---|"]
    for name, seconds in found.items():
        ours, theirs = (1000 * statistics.median(seconds[engine]) for engine in ENGINES)
        lines.append(f"| {name} | {ours:.1f} | {theirs:.1f} | {ratio(seconds):.2f} |")
    return "\n".join(lines)


def simulator_seconds(tries: int = 5) -> float:
    """The shortest simulation of 1F1B with 64 stages and 512 micro-batches."""
    schedule, seconds = make("1f1b", 64, 512), []
    for _ in range(tries):
        begin = time.perf_counter()
        simulate(schedule)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> None:
    """Measure on real ranks and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_processes", type=int, default=0, help="ranks; default: all GPUs, or 2 on the CPU")
    parser.add_argument("--cpu", action="store_true", help="keep off the GPUs")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2, help="steps of an engine in one round")
    args = parser.parse_args()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    ranks = args.num_processes or gpus or 2
    found = launch(measure, args, num_processes=ranks, timeout=1800, device="cuda" if gpus else "cpu")[0]
    kind = "gpu" if gpus else "cpu"
    size = sum(parameter.numel() for parameter in GPT2LMHeadModel(config(args)).parameters())
    text = (
        f"# Pipelines: {kind}\n\n{machine.measured_on('torch', 'transformers')}\n\n"
        f"{ranks} ranks, GPT-2 of {size / 1e6:.1f} M parameters, fp32, {args.microbatches} micro-batches of "
        f"{args.rows} rows of {args.length} tokens; {args.rounds} rounds of {args.steps} steps, in turn; forward "
        f"and backward.\n\n{table(found)}\n\n"
        f"Simulator: 64 stages × 512 micro-batches in {simulator_seconds():.2f} s.\n"
    )
    write_text(HERE / f"pipeline-{kind}.md", text)
    print(text)


if __name__ == "__main__":
    main()
