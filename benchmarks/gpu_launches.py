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

import torch

from benchmarks.harness import HERE, STEPS_ALONE, options, publish, table
from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.training.callbacks import Callback
from course_lib.training.run import build_trainer

ROOT = HERE.parent
ENGINES = {
    "ddp": ("torch", "scratch"),
    "zero1": ("torch", "scratch", "deepspeed"),
    "zero2": ("scratch", "deepspeed"),
    "zero3": ("torch", "scratch", "deepspeed"),
    "fsdp": ("scratch", "accelerate"),
}
PAIRS = [f"{strategy}:{engine}" for strategy, engines in ENGINES.items() for engine in engines]
OPTIONS = STEPS_ALONE | {
    "model": "minilm",
    "max_steps": 5,
    "max_train_samples": 80,
    "max_eval_samples": 8,
    "batch_size": 4,
    "max_length": 32,
    "dynamic_padding": False,
    "mixed_precision": "bf16",
    "logging_steps": 100,
    "watchdog": 0.0,
    "desync_check": "off",
}


def counted(strategy: str, engine: str, folder: str) -> tuple[int, int, int]:
    """Calls in the fourth step, those of them that clip and update, and the step's host syncs; on one of the ranks."""
    import gpu_sim  # type: ignore[import-not-found]

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
    found, how = {}, {"num_processes": 2, "device": "cuda", "start_method": "fork", "timeout": 600, "stream": False}
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs:
            found[pair] = launch(counted, *pair.split(":"), folder, **how)[0]
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


def counted_before(pairs: list[str], revision: str) -> dict[str, list[int]]:
    """The numbers of the package as it was."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "package.tar"
        subprocess.run(["git", "archive", "-o", archive, revision, "course_lib"], cwd=ROOT, check=True)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        return measured(pairs, Path(folder))


def main() -> None:
    """Count, and write the table; of two numbers in a cell the earlier is first."""
    args = options(
        __doc__,
        before={"default": None, "metavar": "REVISION"},
        strategies={"nargs": "+", "default": PAIRS, "metavar": "STRATEGY:ENGINE"},
        measure={"default": False, "help": argparse.SUPPRESS},
    )
    if args.measure:
        return measure(args.strategies)
    found = [counted_before(args.strategies, args.before)] if args.before else []
    found.append(measured(args.strategies, ROOT))
    rows = []
    for pair in args.strategies:
        strategy, engine = pair.split(":")
        calls, update, syncs = (" → ".join(f"{each[pair][i]:,}" for each in found) for i in range(3))
        rows.append((strategy, engine, calls, update if engine != "deepspeed" else "within backward", syncs))
    publish(
        "gpu-launches",
        "What a step launches on a GPU",
        ("torch", "accelerate", "deepspeed"),
        "Counted on the simulated device of tests/gpu_sim, on 2 of its GPUs; no GPU was there. A call is one operator "
        "that reached the device; of the operators on lists of tensors the simulation may count one per tensor, where "
        "a GPU takes one for many. MiniLM in bf16, 4 rows of 32 tokens per rank, one micro-batch"
        f"{'; before → now' if args.before else ''}.",
        table(
            "strategy | engine | calls per step | of these in clipping and updating | host syncs per step",
            rows,
        ),
    )


if __name__ == "__main__":
    main()
