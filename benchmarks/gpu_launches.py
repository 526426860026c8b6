"""GPU launches of a training step: ATen calls and host syncs per step, for each strategy and engine.

    python benchmarks/gpu_launches.py [--before REVISION] [--strategies ddp:torch zero3:scratch]

Counted on the simulated device of tests/gpu_sim, without a GPU: a call there is one operator that reached the device.
A real GPU takes one kernel or several for it; of the operators on lists of tensors (_foreach_norm and the like) the
simulation may count one call per tensor, where a GPU takes one for many. With --before the same is counted for the
package as it was at that revision.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAIRS = (
    "ddp:torch",
    "ddp:scratch",
    "zero1:torch",
    "zero1:scratch",
    "zero1:deepspeed",
    "zero2:scratch",
    "zero2:deepspeed",
    "zero3:torch",
    "zero3:scratch",
    "zero3:deepspeed",
    "fsdp:scratch",
    "fsdp:accelerate",
)
OPTIONS = {
    "model": "minilm",
    "max_steps": 5,
    "max_train_samples": 80,
    "max_eval_samples": 8,
    "batch_size": 4,
    "max_length": 32,
    "dynamic_padding": False,
    "mixed_precision": "bf16",
    "eval_steps": 0,
    "save_steps": 0,
    "logging_steps": 100,
    "keep_best": False,
    "progress_bar": False,
    "watchdog": 0.0,
    "desync_check": "off",
    "tracker": "none",
}


def counted(strategy: str, engine: str, folder: str) -> tuple[int, int, int]:
    """Calls in the fourth step, those of them that clip and update, and the step's host syncs; on one of the ranks."""
    import gpu_sim  # type: ignore[import-not-found]
    import torch

    from course_lib.config import build
    from course_lib.training.callbacks import Callback
    from course_lib.training.run import build_trainer

    torch.set_num_threads(1)
    config = build(OPTIONS | {"strategy": strategy, "engine": engine, "output_dir": folder})
    config.output_dir.mkdir(parents=True, exist_ok=True)
    seen: list[tuple[int, int]] = []

    class Count(Callback):
        def on_step_end(self, trainer: Any) -> None:
            seen.append((gpu_sim.kernels(), gpu_sim.host_syncs()))

    trainer, _ = build_trainer(config, [Count()])
    clip, zero_grad = trainer.engine.clip, trainer.engine.zero_grad
    begun: list[int] = []
    updates: list[int] = []

    def clipped(max_norm: float) -> Any:
        begun.append(gpu_sim.kernels())
        return clip(max_norm)

    def cleared() -> None:
        zero_grad()
        updates.append(gpu_sim.kernels() - begun[-1])

    trainer.engine.clip, trainer.engine.zero_grad = clipped, cleared  # type: ignore[method-assign]
    trainer.train()
    return seen[3][0] - seen[2][0], updates[3], seen[3][1] - seen[2][1]


def measure(pairs: list[str]) -> None:
    """Count in this process's ranks, and print the numbers as JSON."""
    import course_lib.training.run  # noqa: F401  once here, and not in every rank
    from course_lib.launching.launch import launch

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs:
            found[pair] = launch(
                counted,
                *pair.split(":"),
                folder,
                num_processes=2,
                device="cuda",
                start_method="fork",
                timeout=600,
                stream=False,
            )[0]
            print(pair, found[pair], file=sys.stderr, flush=True)
    print(json.dumps(found))


def measured(pairs: list[str], tree: Path) -> dict[str, list[int]]:
    """The numbers of the package that lies in a folder, by strategy and engine."""
    paths = [ROOT / "tests" / "gpu_sim" / "site", tree, ROOT]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"GPU_SIM": "2", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", "--strategies", *pairs],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def table(now: dict[str, list[int]], before: dict[str, list[int]] | None) -> str:
    """The numbers as Markdown; of two, the earlier first."""

    def cell(pair: str, column: int) -> str:
        return f"{before[pair][column]:,} → {now[pair][column]:,}" if before else f"{now[pair][column]:,}"

    rows = [
        "| strategy | engine | calls per step | of these in clipping and updating | host syncs per step |",
        "|---|---|---|---|---|",
    ]
    for pair in now:
        strategy, engine = pair.split(":")
        update = cell(pair, 1) if engine != "deepspeed" else "within backward"
        rows.append(f"| {strategy} | {engine} | {cell(pair, 0)} | {update} | {cell(pair, 2)} |")
    return "\n".join(rows)


def report(now: dict[str, list[int]], before: dict[str, list[int]] | None) -> str:
    """Write gpu-launches.md; gives its table."""
    from course_lib.system import machine
    from course_lib.writing import write_text

    numbers = table(now, before)
    write_text(
        ROOT / "benchmarks" / "gpu-launches.md",
        f"""# What a step launches on a GPU

{machine.measured_on("torch", "accelerate", "deepspeed")}

Counted on the simulated device of tests/gpu_sim, on 2 of its GPUs; no GPU was there. A call is one operator that
reached the device; of the operators on lists of tensors the simulation may count one per tensor, where a GPU takes one
for many. MiniLM in bf16, 4 rows of 32 tokens per rank, one micro-batch{"; before → now" if before else ""}.

{numbers}
""",
    )
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION")
    parser.add_argument("--strategies", nargs="+", default=list(PAIRS), metavar="STRATEGY:ENGINE")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.strategies)
    before = None
    if options.before:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder) / "package.tar"
            subprocess.run(["git", "archive", "-o", archive, options.before, "course_lib"], cwd=ROOT, check=True)
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            before = measured(options.strategies, Path(folder))
    print(report(measured(options.strategies, ROOT), before))


if __name__ == "__main__":
    main()
