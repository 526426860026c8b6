"""Start-up costs: CPU-seconds of a command and all its processes, medians of three.

    python benchmarks/startup.py [FOLDER]

Writes benchmarks/startup.md. CPU-seconds (user and system) hold on a busy machine too, where wall-clock seconds do not.
With the folder of another checkout, its commands are measured in turn with ours, in the same run.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import HERE, options, publish, table
from course_lib.lessons.turns import in_turns

ROOT = HERE.parent
REPEATS = 3
TWO_STEPS = (
    "train --model tiny-bert --max_train_samples 16 --max_eval_samples 8 --max_length 32 --batch_size 4 "
    "--max_steps 2 --progress_bar false --device cpu --overwrite_output_dir --output_dir {out}/run"
)
PEERS = {
    "a bare Python": "pass",
    "`import torch`": "import torch",
    "`import transformers`": "import transformers",
    "`from transformers import AutoModelForSequenceClassification`": (
        "from transformers import AutoModelForSequenceClassification"
    ),
    "`import accelerate`": "import accelerate",
    "`import datasets`": "import datasets",
    "`import deepspeed`": "import deepspeed",
    "the Hugging Face Trainer's imports": "import datasets; from transformers import Trainer",
}
COMMANDS = {
    "`course --help`": "--help",
    "`course schedule`": "schedule --schedule 1f1b --ranks 4 --microbatches 8",
    "`course plan`": "plan --model facebook/opt-6.7b --gpu A100-80 --gpus 8",
    "`course doctor`": "doctor",
    "`course train` of 2 steps": TWO_STEPS,
    "the same with `--num_processes 2`": f"{TWO_STEPS} --num_processes 2",
    "with `--num_processes 2 --strategy zero2` (DeepSpeed)": f"{TWO_STEPS} --num_processes 2 --strategy zero2",
}


def cpu_seconds(command: list[str], folder: Path) -> float:
    """User and system seconds of a command and of all processes below it that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": "."},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode and command[-1] != "doctor":  # which says so where something is missing
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def in_rounds(columns: Sequence[Callable[[], float]]) -> list[str]:
    """Medians of what takes turns."""
    found = in_turns(dict(enumerate(columns)), REPEATS)
    return [f"{statistics.median(values):.2f}" for values in found.values()]


def revision(checkout: Path) -> str:
    """The commit that a checkout stands at."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Measure and write the tables."""
    folder = options(__doc__, folder={"nargs": "?", "type": Path, "metavar": "FOLDER"}).folder
    checkouts = [folder.resolve(), ROOT] if folder else [ROOT]
    for checkout in checkouts:
        subprocess.run([sys.executable, "-m", "compileall", "-q", "course_lib"], cwd=checkout, check=True)
    with tempfile.TemporaryDirectory() as out:
        ours = {what: ["course_lib/cli.py", *line.format(out=out).split()] for what, line in COMMANDS.items()}
        ours["`import course_lib.training.run`"] = ["-c", "import course_lib.training.run"]
        taken = [
            (what, *in_rounds([partial(cpu_seconds, command, checkout) for checkout in checkouts]))
            for what, command in ours.items()
        ]
    peers = [(what, *in_rounds([partial(cpu_seconds, ["-c", code], ROOT)])) for what, code in PEERS.items()]
    publish(
        "startup",
        "Starting",
        ("torch", "transformers", "accelerate", "datasets"),
        f"User and system seconds of a command with all its processes, medians of {REPEATS}.",
        table(" | ".join(["CPU-seconds of", *map(revision, checkouts[:-1]), "now"]), taken),
        "What cannot be avoided, or is what others pay:",
        table("CPU-seconds of | ", peers),
    )


if __name__ == "__main__":
    main()
