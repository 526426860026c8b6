"""Cost of the watchdog: the time of a training step with it and without it, in one run.

    python benchmarks/watchdog.py [--ranks 2] [--pairs 30]

Stretches of steps with and without take turns, so that both meet the same machine; the ratio is the median over the
pairs. A bare collective, which does nothing else, shows the microseconds that the recorder takes for one.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from small_gpt2 import BATCH, TOKENS, training

from course_lib.hangs.watchdog import Watchdog
from course_lib.launching.launch import launch
from course_lib.system import machine
from course_lib.writing import write_text

STEPS, COLLECTIVES = 5, 200


def measure(engine: str | None, width: int, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of a step, or of a bare all-reduce where there is no engine, without and with the watchdog."""
    dist.init_process_group("gloo")
    tensor = torch.ones(16)
    step, steps = (training(engine, width)[-1], STEPS) if engine else (lambda: dist.all_reduce(tensor), COLLECTIVES)

    def stretch(context: contextlib.AbstractContextManager) -> float:
        with context:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            dist.barrier()
            return (time.perf_counter() - start) / steps

    stretch(contextlib.nullcontext())
    without, with_watchdog = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(pairs):
            without.append(stretch(contextlib.nullcontext()))
            with_watchdog.append(stretch(Watchdog(600, folder)))
    return without, with_watchdog


def main() -> None:
    """Measure on real ranks, and write benchmarks/watchdog.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=30)
    options = parser.parse_args()
    lines = ["| what | width | without (ms) | with (ms) | ratio, median of pairs |", "|---|---|---|---|---|"]
    for engine, width in ((None, 16), ("DDP", 64), ("DDP", 256), ("FSDP2", 64), ("FSDP2", 256)):
        without, with_watchdog = launch(
            measure, engine, width, options.pairs, num_processes=options.ranks, timeout=600, stream=False
        )[0]
        ratio = statistics.median(b / a for a, b in zip(without, with_watchdog, strict=True))
        lines.append(
            f"| {f'{engine} step' if engine else 'bare all-reduce'} | {width} | "
            f"{statistics.median(without) * 1e3:.3f} | {statistics.median(with_watchdog) * 1e3:.3f} | "
            f"{ratio:.3f} |"
        )
    table = "\n".join(lines)
    text = (
        f"# What the watchdog costs\n\n{machine.measured_on('torch')}\n\n{options.ranks} ranks over gloo, GPT-2 "
        f"of 4 layers, {BATCH} rows of {TOKENS} tokens per rank, {options.pairs} pairs of {STEPS} steps (bare "
        f"all-reduces of 16 floats: {COLLECTIVES}).\n\n{table}\n"
    )
    write_text(Path(__file__).parent / "watchdog.md", text)
    print(text)


if __name__ == "__main__":
    main()
