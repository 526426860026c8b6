"""Cost of the watchdog: the time of a training step with it and without it, in one run.

    python benchmarks/watchdog.py [--ranks 2] [--pairs 30]

Stretches of steps with and without take turns, so that both meet the same machine; the ratio is the median over the
pairs. A bare collective, which does nothing else, shows the microseconds that the recorder takes for one.
"""

import statistics
import tempfile
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.harness import join_ranks, milliseconds, options, publish, ratios, seconds, table
from benchmarks.small_gpt2 import BATCH, TOKENS, training
from course_lib.hangs.watchdog import Watchdog
from course_lib.launching.launch import launch
from course_lib.lessons.turns import in_turns

STEPS, COLLECTIVES = 5, 200


def measure(engine: str | None, width: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of a step, or of a bare all-reduce where there is no engine, without and with the watchdog."""
    join_ranks(cpu=True)
    tensor = torch.ones(16)
    step, steps = (training(engine, width)[-1], STEPS) if engine else (lambda: dist.all_reduce(tensor), COLLECTIVES)
    with tempfile.TemporaryDirectory() as folder:

        def watched() -> float:
            with Watchdog(600, folder):
                return seconds(step, steps)

        return in_turns({"without": partial(seconds, step, steps), "with": watched}, pairs, warm_up=1)


def main() -> None:
    """Measure on real ranks, and write benchmarks/watchdog.md."""
    args = options(__doc__, ranks=2, pairs=30)
    rows = []
    for engine, width in ((None, 16), ("DDP", 64), ("DDP", 256), ("FSDP2", 64), ("FSDP2", 256)):
        found = launch(measure, engine, width, args.pairs, num_processes=args.ranks, timeout=600, stream=False)[0]
        what = f"{engine} step" if engine else "bare all-reduce"
        ratio = statistics.median(ratios(found["with"], found["without"]))
        rows.append((what, width, *(milliseconds(values, 3) for values in found.values()), f"{ratio:.3f}"))
    publish(
        "watchdog",
        "What the watchdog costs",
        ("torch",),
        f"{args.ranks} ranks over gloo, GPT-2 of 4 layers, {BATCH} rows of {TOKENS} tokens per rank, {args.pairs} "
        f"pairs of {STEPS} steps (bare all-reduces of 16 floats: {COLLECTIVES}).",
        table("what | width | without (ms) | with (ms) | ratio, median of pairs", rows),
    )


if __name__ == "__main__":
    main()
