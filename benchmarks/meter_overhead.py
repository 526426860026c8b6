"""Cost of metering: the time of a training step with the meter and without it, in one run.

    python benchmarks/meter_overhead.py [--ranks 2] [--pairs 40]

Steps with and without take turns, so that both meet the same machine; the ratio is the median over the pairs.
"""

import statistics
from functools import partial

from benchmarks.harness import join_ranks, milliseconds, options, publish, ratios, seconds, table
from benchmarks.small_gpt2 import BATCH, ENGINES, TOKENS, training
from course_lib.launching.launch import launch
from course_lib.lessons.turns import in_turns
from course_lib.metering.meter import Meter


def measure(engine: str, width: int, pairs: int) -> tuple[dict[str, list[float]], int]:
    """Seconds of each step without and with, and how many collectives a step has."""
    join_ranks(cpu=True)
    model, optimizer, train = training(engine, width)

    def metered() -> float:
        with Meter(model, optimizer):
            return seconds(train)

    found = in_turns({"without": partial(seconds, train), "with": metered}, pairs, warm_up=3)
    with Meter(model, optimizer) as meter:
        train()
    return found, len(meter.collectives)


def main() -> None:
    """Measure on real ranks, and write benchmarks/meter-overhead.md."""
    args = options(__doc__, ranks=2, pairs=40)
    rows = []
    for engine in ENGINES:
        for width in (64, 256):
            found, collectives = launch(
                measure, engine, width, args.pairs, num_processes=args.ranks, timeout=300, stream=False
            )[0]
            ratio = statistics.median(ratios(found["with"], found["without"]))
            rows.append((engine, width, collectives, *map(milliseconds, found.values()), f"{ratio:.2f}"))
    publish(
        "meter-overhead",
        "What the meter costs",
        ("torch",),
        f"{args.ranks} ranks over gloo, GPT-2 of 4 layers, {BATCH} rows of {TOKENS} tokens per rank, {args.pairs} "
        "pairs of steps.",
        table(
            "engine | width | collectives per step | without (ms) | with (ms) | ratio, median of pairs",
            rows,
        ),
    )


if __name__ == "__main__":
    main()
