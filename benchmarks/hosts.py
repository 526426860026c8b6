"""Every strategy across two and three hosts, started by accelerate launch and by torchrun.

    python benchmarks/hosts.py [PART OF A NAME ...]

The hosts are network namespaces of this machine. Writes benchmarks/hosts.md where it ran all of them.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from course_lib.system import machine
from course_lib.writing import write_text
from testing.virtual_hosts import Host, hosts

HERE = Path(__file__).resolve().parent
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


def accelerate(head: Host, i: int, count: int, each: int) -> list[str]:
    """The line for host i."""
    return [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_machines",
        str(count),
        "--num_processes",
        str(count * each),
        "--machine_rank",
        str(i),
        "--main_process_ip",
        head.address,
        "--main_process_port",
        "29500",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]


def torchrun(head: Host, i: int, count: int, each: int) -> list[str]:
    """The line for any host."""
    return [
        "torch.distributed.run",
        "--nnodes",
        str(count),
        "--nproc_per_node",
        str(each),
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        f"{head.name}:29400",
        "--rdzv_id",
        "run",
    ]


LAUNCHERS = {"accelerate launch": accelerate, "torchrun": torchrun}


def cell(used: tuple[Host, ...], launcher: str, strategy: str) -> str:
    """Train once, and give the row of the table."""
    options, each = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as folder:
        leaves = [f"--{name}={value}" for name, value in (COMMON | options | {"output_dir": f"{folder}/run"}).items()]
        began, started = time.perf_counter(), []
        for i, host in enumerate(used):
            line = LAUNCHERS[launcher](used[0], i, len(used), each)
            started.append(
                host.popen(
                    [sys.executable, "-m", *line, str(CLI), "train", *leaves],
                    env=host.environment | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [process.communicate(timeout=600)[1] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"{launcher}, {strategy} on {len(used)} hosts failed:\n" + "\n".join(said))
        summary = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))
    return (
        f"| {strategy} | {launcher} | {len(used)} × {each} | {summary['world_size']} | "
        f"{summary['train']['final_loss']:.4f} | {time.perf_counter() - began:.0f} |"
    )


def main(wanted: list[str]) -> None:
    """Run the cells whose name holds a word of ``wanted``, or all."""
    rows = []
    with hosts(3) as made:
        for strategy in STRATEGIES:
            for launcher in LAUNCHERS:
                for count in (2, 3):
                    if not wanted or any(word in f"{strategy} {launcher} {count}" for word in wanted):
                        rows.append(cell(made[:count], launcher, strategy))
                        print(rows[-1], flush=True)
    if not wanted:
        write_text(
            HERE / "hosts.md",
            "\n".join(
                [
                    "# Strategies across hosts",
                    "",
                    machine.measured_on("torch", "accelerate", "deepspeed"),
                    "",
                    "Hosts are network namespaces of one machine, so the seconds, imports included, are of all on "
                    "its cores.",
                    "",
                    "| strategy | launcher | hosts × ranks | ranks in the run | last loss | seconds |",
                    "|" + "---|" * 6,
                    *rows,
                ]
            )
            + "\n",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
