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
from pathlib import Path

from course_lib.system import machine
from course_lib.writing import write_text

HERE = Path(__file__).resolve().parent
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
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": "."},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode and command[-1] != "doctor":  # which says so where something is missing
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and write the tables."""
    checkouts = [ROOT] if len(sys.argv) < 2 else [Path(sys.argv[1]).resolve(), ROOT]
    for checkout in checkouts:
        subprocess.run([sys.executable, "-m", "compileall", "-q", "course_lib"], cwd=checkout, check=True)
    with tempfile.TemporaryDirectory() as out:
        ours = {
            what: [[sys.executable, "course_lib/cli.py", *line.format(out=out).split()]]
            for what, line in COMMANDS.items()
        }
        ours["`import course_lib.training.run`"] = [[sys.executable, "-c", "import course_lib.training.run"]]
        taken = {
            what: [
                statistics.median(column)
                for column in zip(
                    *([cpu_seconds(command, checkout) for checkout in checkouts] for _ in range(REPEATS)), strict=True
                )
            ]
            for what, (command,) in ours.items()
        }
        peers = {
            what: statistics.median(cpu_seconds([sys.executable, "-c", code], ROOT) for _ in range(REPEATS))
            for what, code in PEERS.items()
        }
    head = "| CPU-seconds of | now |" if len(checkouts) == 1 else f"| CPU-seconds of | {revision(checkouts[0])} | now |"
    rule = "|---" * (len(checkouts) + 1) + "|"
    rows = [f"| {what} | " + " | ".join(f"{each:.2f}" for each in found) + " |" for what, found in taken.items()]
    text = (
        "\n".join(
            [
                f"# Starting\n\n{machine.measured_on('torch', 'transformers', 'accelerate', 'datasets')}\n",
                f"User and system seconds of a command with all its processes, medians of {REPEATS}.\n",
                head,
                rule,
                *rows,
                "\nWhat cannot be avoided, or is what others pay:\n",
                "| CPU-seconds of | |",
                "|---|---|",
                *(f"| {what} | {found:.2f} |" for what, found in peers.items()),
            ]
        )
        + "\n"
    )
    write_text(HERE / "startup.md", text)
    print(text)


def revision(checkout: Path) -> str:
    """The commit that a checkout stands at."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
