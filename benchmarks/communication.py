"""Less communication: what each way sends, what it does to the loss, and how long it takes at three link speeds.

    python benchmarks/communication.py                    # 2 ranks, 3 seeds
    python benchmarks/communication.py --steps 160 --seeds 1

Every way trains the same model on the same rows for as many steps, several times with other seeds; no run is left out.
Bytes and messages are counted in every step. Seconds over a link are computed: a step's CPU seconds, the same for all
ways, and what its messages take on the link one after the other; a check lets the kernel limit the rate of the ranks'
network and takes the time. Writes benchmarks/communication.md.
"""

import statistics
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.harness import options, publish, spread, table
from course_lib.errors import LaunchError
from course_lib.lessons.communication import lab
from course_lib.lessons.slow_link import Link

CHECKED = ("all-reduce", "int8", "int4", "PowerSGD, rank 4", "top-k, 1 %", "LocalSGD", "DiLoCo")
TARGETS = (0.05, 0.15)
"""Nats per byte above all-reduce's last loss, at which ways are compared."""
Runs = dict[str, list[lab.TrainingRun]]
"""Of each way, one per seed."""


def main_rows(runs: Runs, compute: float) -> Iterator[tuple]:
    """Bytes, loss and seconds of whole runs."""
    plain = runs["all-reduce"][0].bytes_per_step
    for name, of_seeds in runs.items():
        sent = statistics.mean(run.bytes_per_step for run in of_seeds)
        final = spread([run.losses[max(run.losses)] for run in of_seeds], 3, middle=statistics.mean)
        cpu = statistics.median(second for run in of_seeds for second in run.cpu_seconds)
        seconds = [f"{of_seeds[0].seconds(link, compute)[-1]:.1f}" for link in lab.LINKS.values()]
        yield name, f"{sent / 2**10:.1f}", f"{sent / plain:.4f}", final, f"{1000 * cpu:.1f}", *seconds


def target_rows(runs: Runs, compute: float, target: float) -> Iterator[tuple]:
    """Steps, bytes and seconds until a loss, of the median seed; a run that does not come there counts as never."""
    for name, of_seeds in runs.items():
        never = max(map(len, (run.messages for run in of_seeds))) + 1
        reached = sorted(((run.first_below(target) or never), number) for number, run in enumerate(of_seeds))
        steps, number = reached[len(reached) // 2]
        count = f"{sum(step != never for step, _ in reached)} of {len(of_seeds)}"
        if steps == never:
            yield name, count, f"not in {never - 1}", *[""] * (1 + len(lab.LINKS))
            continue
        run = of_seeds[number]
        seconds = [f"{run.seconds(link, compute)[steps - 1]:.1f}" for link in lab.LINKS.values()]
        yield name, count, steps, f"{sum(map(sum, run.messages[:steps])) / 2**20:.2f}", *seconds


def targets(args: Namespace, runs: Runs, compute: float) -> Iterator[str]:
    """A paragraph and a table for each of the losses at which ways are compared."""
    plain = statistics.mean(run.losses[max(run.losses)] for run in runs["all-reduce"])
    for above in TARGETS:
        yield (
            f"Until a validation loss of {plain + above:.3f}, {above} above all-reduce's mean at the end, looked at "
            f"every {args.sync_every} steps; the median seed:"
        )
        yield table(
            " | ".join(
                ["way | seeds that reach it | steps | sent per rank (MiB)", *(f"{link} (s)" for link in lab.LINKS)]
            ),
            target_rows(runs, compute, plain + above),
        )


def check(args: Namespace, runs: Runs, compute: float) -> Iterator[str]:
    """Seconds of short runs on a network whose rate the kernel limits, beside the computed ones."""
    link, steps = Link(0.0, 1.25e6), 2 * args.sync_every
    methods = [name for name in CHECKED if name in runs]
    try:
        measured = lab.over_a_slow_network(link.rate, methods, args.num_processes, 1200, **shape(args, steps, steps, 0))
    except LaunchError as error:
        yield f"Not checked on a network that the kernel limits: {error}."
        return
    yield f"{steps} steps on a loopback interface that lets each rank send 10 Mbit/s (tc tbf), without latency:"
    rows = []
    for name in methods:
        ends = lab.step_ends(runs[name][0].messages[:steps], link, compute)
        rows.append((name, f"{ends[-1]:.1f}", f"{measured[name].wall_seconds:.1f}"))
    yield table("way | computed (s) | measured (s)", rows)


def shape(args: Namespace, steps: int, evaluate_every: int, seed: int) -> dict[str, int]:
    """Arguments of a training: its length, its seed, and the sizes that all share."""
    own = {"steps": steps, "evaluate_every": evaluate_every, "seed": seed}
    return own | {"sync_every": args.sync_every, "width": args.width}


def main() -> None:
    """Train on real ranks and write the tables."""
    sync_every = {"default": 16, "help": "H of LocalSGD and DiLoCo"}
    args = options(__doc__, num_processes=2, steps=320, sync_every=sync_every, seeds=3, width=64)
    methods = [name for name in lab.METHODS if not name.startswith("hierarchical") or args.num_processes % 4 == 0]
    runs: Runs = {name: [] for name in methods}
    for seed in range(args.seeds):
        of_seed = lab.trainings(methods, args.num_processes, 3600, **shape(args, args.steps, args.sync_every, seed))
        for name, run in of_seed.items():
            runs[name].append(run)
            print(seed, name, {step: round(loss, 3) for step, loss in run.losses.items()}, flush=True)
    compute = statistics.median(second for run in runs["all-reduce"] for second in run.cpu_seconds)
    publish(
        "communication",
        "Less communication: cpu",
        ("torch", "transformers"),
        f"{args.num_processes} ranks, one thread each; GPT-2 of 2 layers, width {args.width}, "
        f"{runs['all-reduce'][0].parameters:,} parameters, bytes of the bundled tweets, {lab.ROWS} rows of "
        f"{lab.TOKENS} bytes per rank and step, AdamW at 3e-3 with beta 2 of 0.95, clipped "
        f"at 1, {args.steps} steps, H = {args.sync_every}; "
        f"seeds 0 to {args.seeds - 1}, "
        f"mean (range); all {sum(map(len, runs.values()))} runs are counted. Nothing was tuned for one way: the "
        "same learning rate for all, the papers' outer one.",
        f"Seconds over a link are computed from the counted messages: {1000 * compute:.1f} ms per step, the CPU "
        "time of all-reduce's on this machine, and then the step's messages one after the other, each latency + "
        "bytes / rate. Nothing hides behind backward.",
        table(
            "way | sent per rank and step, counted (KiB) | of all-reduce | validation loss at the end, nats per byte | "
            + " | ".join(["CPU time per step (ms)", *(f"{link}: run (s)" for link in lab.LINKS)]),
            main_rows(runs, compute),
        ),
        *targets(args, runs, compute),
        *check(args, runs, compute),
    )


if __name__ == "__main__":
    main()
