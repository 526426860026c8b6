"""Every strategy across two and three hosts, started by accelerate launch and by torchrun.

    python benchmarks/hosts.py [PART OF A NAME ...]

The hosts are network namespaces of this machine. Writes benchmarks/hosts.md where it ran all of them.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.harness import HERE, options, publish, seconds, table
from testing.virtual_hosts import Host, hosts

CLI = HERE.parent / "course_lib" / "cli.py"
ROWS, STEPS = 12, 6
COMMON: dict[str, object] = {
    "model": "tiny-gpt2",
    "max_train_samples": 72,
    "max_eval_samples": 8,
    "max_length": 32,
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_steps": 0,
    "eval_steps": 0,
    "progress_bar": "false",
    "baselines": "false",
    "device": "cpu",
    "mixed_precision": "no",
    "tracker": "none",
    "watchdog": 60,
}
PIPELINE: dict[str, object] = {"training_type": "pipeline", "pipeline_chunks": 2}
STRATEGIES: dict[str, tuple[dict[str, object], int]] = {  # options, ranks of a host
    "ddp": ({"global_batch_size": ROWS}, 1),
    "zero2": ({"global_batch_size": ROWS, "strategy": "zero2"}, 1),
    "fsdp": ({"global_batch_size": ROWS, "strategy": "fsdp"}, 1),
    "pipeline": (PIPELINE | {"batch_size": ROWS}, 1),
    "hybrid": (PIPELINE | {"batch_size": ROWS // 2, "data_parallel_size": 2}, 2),
}


LAUNCHERS = {
    "accelerate launch": "accelerate.commands.launch --multi_gpu --num_machines {hosts} --num_processes {ranks} "
    "--machine_rank {host} --main_process_ip {address} --main_process_port 29500 --mixed_precision no "
    "--dynamo_backend no",
    "torchrun": "torch.distributed.run --nnodes {hosts} --nproc_per_node {each} --rdzv_backend c10d "
    "--rdzv_endpoint {name}:29400 --rdzv_id run",
}
"""The line for each host; the address and the name are the first one's."""


def train(used: tuple[Host, ...], launcher: str, each: int, run: dict[str, object]) -> None:
    """Start a launcher on every host, and wait for their ends."""
    arguments = [str(CLI), "train", *(f"--{name}={value}" for name, value in run.items())]
    head, started = used[0], []
    for i, host in enumerate(used):
        line = LAUNCHERS[launcher].format(
            hosts=len(used), ranks=len(used) * each, each=each, host=i, address=head.address, name=head.name
        )
        started.append(
            host.popen(
                [sys.executable, "-m", *line.split(), *arguments],
                env=host.environment | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=600)[1] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{launcher} on {len(used)} hosts failed:\n" + "\n".join(said))


def row(used: tuple[Host, ...], launcher: str, strategy: str) -> tuple:
    """Train once, and give the row of the table."""
    more, each = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as folder:
        run = COMMON | more | {"output_dir": f"{folder}/run"}
        taken = seconds(partial(train, used, launcher, each, run))
        summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    loss = f"{summary['train']['final_loss']:.4f}"
    return strategy, launcher, f"{len(used)} × {each}", summary["world_size"], loss, f"{taken:.0f}"


def main() -> None:
    """Run the cells whose name holds a word that was given, or all."""
    wanted = options(__doc__, wanted={"nargs": "*", "metavar": "PART OF A NAME"}).wanted
    rows = []
    with hosts(3) as made:
        for strategy, launcher, count in itertools.product(STRATEGIES, LAUNCHERS, (2, 3)):
            if not wanted or any(word in f"{strategy} {launcher} {count}" for word in wanted):
                rows.append(row(made[:count], launcher, strategy))
                print(*rows[-1], sep=" | ", flush=True)
    if not wanted:
        publish(
            "hosts",
            "Strategies across hosts",
            ("torch", "accelerate", "deepspeed"),
            "Hosts are network namespaces of one machine, so the seconds, imports included, are of all on its cores.",
            table("strategy | launcher | hosts × ranks | ranks in the run | last loss | seconds", rows),
        )


if __name__ == "__main__":
    main()
