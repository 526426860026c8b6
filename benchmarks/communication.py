"""Less communication: what each way sends, what it does to the loss, and how long it takes at three link speeds.

    python benchmarks/communication.py                    # 2 ranks, 3 seeds
    python benchmarks/communication.py --steps 160 --seeds 1

Every way trains the same model on the same rows for as many steps, several times with other seeds; no run is left out.
Bytes and messages are counted in every step. Seconds over a link are computed: a step's CPU seconds, the same for all
ways, and what its messages take on the link one after the other; a check lets the kernel limit the rate of the ranks'
network and takes the time. Writes benchmarks/communication.md.
"""

import argparse
import statistics
from pathlib import Path

from course_lib.errors import LaunchError
from course_lib.lessons.communication import lab
from course_lib.lessons.slow_link import Link
from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).parent
CHECKED = ("all-reduce", "int8", "int4", "PowerSGD, rank 4", "top-k, 1 %", "LocalSGD", "DiLoCo")
TARGETS = (0.05, 0.15)
"""Nats per byte above all-reduce's last loss, at which ways are compared."""
Runs = dict[str, list[lab.TrainingRun]]
"""Of each way, one per seed."""


def spread(values: list[float], digits: int) -> str:
    """Mean and range."""
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def main_table(runs: Runs, compute: float) -> str:
    """Bytes, loss and seconds of whole runs."""
    lines = [
        "| way | sent per rank and step, counted (KiB) | of all-reduce | validation loss at the end, nats per "
        "byte | CPU time per step (ms) | " + " | ".join(f"{link}: run (s)" for link in lab.LINKS) + " |",
        "|---|---|---|---|---|" + "---|" * len(lab.LINKS),
    ]
    plain = runs["all-reduce"][0].bytes_per_step
    for name, of_seeds in runs.items():
        sent = statistics.mean(run.bytes_per_step for run in of_seeds)
        final = [run.losses[max(run.losses)] for run in of_seeds]
        cpu = statistics.median(second for run in of_seeds for second in run.cpu_seconds)
        seconds = [of_seeds[0].seconds(link, compute)[-1] for link in lab.LINKS.values()]
        lines.append(
            f"| {name} | {sent / 2**10:.1f} | {sent / plain:.4f} | {spread(final, 3)} | {1000 * cpu:.1f} | "
            + " | ".join(f"{second:.1f}" for second in seconds)
            + " |"
        )
    return "\n".join(lines)


def target_table(runs: Runs, compute: float, target: float) -> str:
    """Steps, bytes and seconds until a loss, of the median seed; a run that does not come there counts as never."""
    lines = [
        "| way | seeds that reach it | steps | sent per rank (MiB) | "
        + " | ".join(f"{link} (s)" for link in lab.LINKS)
        + " |",
        "|---|---|---|---|" + "---|" * len(lab.LINKS),
    ]
    for name, of_seeds in runs.items():
        never = max(map(len, (run.messages for run in of_seeds))) + 1
        reached = sorted(((run.first_below(target) or never), number) for number, run in enumerate(of_seeds))
        steps, number = reached[len(reached) // 2]
        count = sum(step != never for step, _ in reached)
        if steps == never:
            lines.append(f"| {name} | {count} of {len(of_seeds)} | not in {never - 1} |" + " |" * (1 + len(lab.LINKS)))
            continue
        run = of_seeds[number]
        sent = sum(map(sum, run.messages[:steps])) / 2**20
        seconds = [run.seconds(link, compute)[steps - 1] for link in lab.LINKS.values()]
        lines.append(
            f"| {name} | {count} of {len(of_seeds)} | {steps} | {sent:.2f} | "
            + " | ".join(f"{second:.1f}" for second in seconds)
            + " |"
        )
    return "\n".join(lines)


def check_table(args: argparse.Namespace, runs: Runs, compute: float) -> str:
    """Seconds of short runs on a network whose rate the kernel limits, beside the computed ones."""
    link = Link(0.0, 1.25e6)
    methods = [name for name in CHECKED if name in runs]
    steps = 2 * args.sync_every
    try:
        measured = lab.over_a_slow_network(
            link.rate,
            methods,
            args.num_processes,
            1200,
            steps=steps,
            sync_every=args.sync_every,
            seed=0,
            width=args.width,
            evaluate_every=steps,
        )
    except LaunchError as error:
        return f"Not checked on a network that the kernel limits: {error}."
    lines = [
        f"{steps} steps on a loopback interface that lets each rank send 10 Mbit/s (tc tbf), without latency:",
        "",
        "| way | computed (s) | measured (s) |",
        "|---|---|---|",
    ]
    for name in methods:
        ends = lab.step_ends(runs[name][0].messages[:steps], link, compute)
        lines.append(f"| {name} | {ends[-1]:.1f} | {measured[name].wall_seconds:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Train on real ranks and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--sync_every", type=int, default=16, help="H of LocalSGD and DiLoCo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    methods = [name for name in lab.METHODS if not name.startswith("hierarchical") or args.num_processes % 4 == 0]
    runs: Runs = {name: [] for name in methods}
    for seed in range(args.seeds):
        of_seed = lab.trainings(
            methods,
            args.num_processes,
            3600,
            steps=args.steps,
            sync_every=args.sync_every,
            seed=seed,
            width=args.width,
            evaluate_every=args.sync_every,
        )
        for name, run in of_seed.items():
            runs[name].append(run)
            print(seed, name, {step: round(loss, 3) for step, loss in run.losses.items()}, flush=True)
    compute = statistics.median(second for run in runs["all-reduce"] for second in run.cpu_seconds)
    plain = [run.losses[max(run.losses)] for run in runs["all-reduce"]]
    targets = "\n\n".join(
        f"Until a validation loss of {statistics.mean(plain) + above:.3f}, {above} above all-reduce's mean at the end, "
        f"looked at every {args.sync_every} steps; the median seed:\n\n"
        f"{target_table(runs, compute, statistics.mean(plain) + above)}"
        for above in TARGETS
    )
    text = (
        f"# Less communication: cpu\n\n{machine.measured_on('torch', 'transformers')}\n\n"
        f"{args.num_processes} ranks, one thread each; GPT-2 of 2 layers, width {args.width}, "
        f"{runs['all-reduce'][0].parameters:,} parameters, bytes of the bundled tweets, {lab.ROWS} rows of "
        f"{lab.TOKENS} bytes per rank and step, AdamW at 3e-3 with beta 2 of 0.95, clipped "
        f"at 1, {args.steps} steps, H = {args.sync_every}; "
        f"seeds 0 to {args.seeds - 1}, "
        f"mean (range); all {sum(map(len, runs.values()))} runs are counted. Nothing was tuned for one way: the "
        "same learning rate for all, the papers' outer one.\n\n"
        f"Seconds over a link are computed from the counted messages: {1000 * compute:.1f} ms per step, the CPU "
        "time of all-reduce's on this machine, and then the step's messages one after the other, each latency + "
        "bytes / rate. Nothing hides behind backward."
        f"\n\n{main_table(runs, compute)}\n\n"
        f"{targets}\n\n{check_table(args, runs, compute)}\n"
    )
    write_text(HERE / "communication.md", text)
    print(text)


if __name__ == "__main__":
    main()
