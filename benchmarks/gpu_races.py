"""The race detector of the simulated GPUs, mistake by mistake and engine by engine.

    python benchmarks/gpu_races.py [late early-1 early-2]

Runs all that tests/gpu/planted.py plants, wrong and right, and the parity task by every strategy and engine, each with
results that arrive as late as can be (late) and at moments drawn from two seeds; or in the orders named alone.
Writes benchmarks/gpu-races.md. Needs a C++ compiler.
"""

import tempfile
from pathlib import Path

from benchmarks.harness import options, publish, table
from course_lib.lessons import parity
from tests.gpu import test_planted as planted_test
from tests.gpu import training
from tests.gpu.machine import machine
from tests.gpu.planted import PLANTS
from tests.narrow_presets import narrowed

STRICT = {"GPU_SIM_TIMEOUT": "2", "GPU_SIM_ON_MISMATCH": "raise"}


def planted(gpus, seeds: list[str]) -> list[tuple]:
    """A row per planted mistake."""
    calm = [plant for plant in PLANTS if not plant.hangs]
    together = {}
    for seed in seeds:
        order = training.ORDERS[seed]
        together[seed] = (
            gpus.run(planted_test._launch, calm, True, 2, environment=STRICT | order),
            gpus.run(planted_test._launch, calm, False, 2, environment=order),
        )
    rows = []
    for plant in PLANTS:
        named, alarms = [], []
        for seed in seeds:
            order = training.ORDERS[seed]
            if plant.hangs:
                bad = gpus.run(planted_test._launch, [plant], True, plant.ranks, gpus=3, environment=STRICT | order)
                good = gpus.run(planted_test._launch, [plant], False, plant.ranks, gpus=3, environment=order)
            else:
                bad, good = together[seed]
            is_named = planted_test._names(plant, [rank[plant.name] for rank in bad])
            named.append("yes" if is_named else "**no**")
            alarms.append(sum(len(rank[plant.name][0]) + bool(rank[plant.name][1]) for rank in good))
        kind = f"`{plant.says}`" if plant.kind == "error" else plant.kind
        rows.append((len(rows) + 1, plant.name, kind, " / ".join(named), " / ".join(map(str, alarms))))
    return rows


def sound(gpus, seeds: list[str]) -> list[tuple]:
    """A row per strategy and engine, which are right."""
    rows = []
    with tempfile.TemporaryDirectory() as name, narrowed():
        folder = Path(name)
        plain = parity.trace(parity.task(folder, 1, training_type="basic", max_steps=training.STEPS))
        for pair in training.PAIRS:
            alarms, apart = [], 0.0
            for seed in seeds:
                order = training.ORDERS[seed]
                ran = training.trained(gpus, folder / seed, 2, [training.of(pair)], environment=order)
                alarms.append(sum(len(findings) for ((_, _, findings),) in ran))
                for ((losses, _, _),) in ran:
                    apart = max(apart, *(abs(a - b) / b for a, b in zip(losses, plain.losses, strict=True)))
            rows.append((*pair, " / ".join(map(str, alarms)), f"{apart:.0e}"))
    return rows


def main() -> None:
    """Run all, and write the tables."""
    seeds = options(__doc__, orders={"nargs": "*"}).orders or list(training.ORDERS)
    with machine() as gpus:
        mistakes, engines = planted(gpus, seeds), sound(gpus, seeds)
    caught = sum("**no**" not in named for *_, named, _ in mistakes)
    publish(
        "gpu-races",
        "The race detector of the simulated GPUs",
        ("torch", "accelerate", "deepspeed"),
        "Simulated GPUs: no GPU was there. Results that nobody has waited for arrive in the orders "
        f"{' / '.join(seeds)}: late is as late as can be; early lets them come at moments drawn from a seed, at odds "
        "of 0.3 (early-1) and 0.05 (early-2) at each kernel. Columns with several entries have one for each order.",
        f"## Planted mistakes: {caught} of {len(mistakes)} named by the line that makes them, in every order",
        "Each is tests/gpu/planted.py's function of the same words. Alarms: findings of all ranks where the same "
        "work is done right.",
        table("# | mistake | found as | line named | alarms when right", mistakes),
        "## Engines that are right",
        "The parity task on two GPUs, five steps. Apart: the largest relative difference of a loss from one process "
        "on the CPU.",
        table("strategy | engine | alarms | losses apart", engines),
    )


if __name__ == "__main__":
    main()
