"""Cost of metering: the time of a training step with the meter and without it, in one run.

    python benchmarks/meter_overhead.py [--ranks 2] [--pairs 40]

Steps with and without take turns, so that both meet the same machine; the ratio is the median over the pairs.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path

import torch.distributed as dist
from small_gpt2 import BATCH, ENGINES, TOKENS, training

from course_lib.launching.launch import launch
from course_lib.metering.meter import Meter
from course_lib.system import machine
from course_lib.writing import write_text


def measure(engine: str, width: int, pairs: int) -> tuple[list[float], list[float], int]:
    """Seconds of each step without and with, and how many collectives a step has."""
    dist.init_process_group("gloo")
    model, optimizer, train = training(engine, width)

    def step(context: contextlib.AbstractContextManager) -> float:
        dist.barrier()
        with context:
            start = time.perf_counter()
            train()
            dist.barrier()
            return time.perf_counter() - start

    for _ in range(3):
        step(contextlib.nullcontext())
    step(Meter(model, optimizer))
    without, with_meter = [], []
    for _ in range(pairs):
        without.append(step(contextlib.nullcontext()))
        meter = Meter(model, optimizer)
        with_meter.append(step(meter))
    return without, with_meter, len(meter.collectives)


def main() -> None:
    """Measure on real ranks, and write benchmarks/meter-overhead.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    lines = [
        "| engine | width | collectives per step | without (ms) | with (ms) | ratio, median of pairs |",
        "|---|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        for width in (64, 256):
            without, with_meter, collectives = launch(
                measure, engine, width, options.pairs, num_processes=options.ranks, timeout=300, stream=False
            )[0]
            ratio = statistics.median(b / a for a, b in zip(without, with_meter, strict=True))
            lines.append(
                f"| {engine} | {width} | {collectives} | {statistics.median(without) * 1e3:.1f} | "
                f"{statistics.median(with_meter) * 1e3:.1f} | {ratio:.2f} |"
            )
    table = "\n".join(lines)
    text = (
        f"# What the meter costs\n\n{machine.measured_on('torch')}\n\n{options.ranks} ranks over gloo, GPT-2 of 4 "
        f"layers, {BATCH} rows of {TOKENS} tokens per rank, {options.pairs} pairs of steps.\n\n{table}\n"
    )
    write_text(Path(__file__).parent / "meter-overhead.md", text)
    print(text)


if __name__ == "__main__":
    main()
