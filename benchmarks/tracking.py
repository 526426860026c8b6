"""Cost of tracking: time that a run's steps, start and end spend in it on rank 0.

    python benchmarks/tracking.py [--ranks 2] [--steps 100]

The time is taken around the callback itself, so that it holds whatever the model; only histograms grow with it.
"""

import os
import tempfile
import time
from typing import Any

from benchmarks.harness import STEPS_ALONE, options, publish, table
from course_lib.config import build
from course_lib.launching.launch import launch
from course_lib.training.callbacks.tracking import TrackingCallback
from course_lib.training.run import build_trainer

CASES: dict[str, dict[str, Any]] = {
    "none": {"tracker": "none"},
    "trackio": {"tracker": "trackio"},
    "trackio, every step": {"tracker": "trackio", "logging_steps": 1},
    "jsonl, every step": {"tracker": "jsonl", "logging_steps": 1},
    "tensorboard, every step": {"tracker": "tensorboard", "logging_steps": 1},
    "wandb, offline": {"tracker": "wandb"},
    "wandb, offline, every step": {"tracker": "wandb", "logging_steps": 1},
    "trackio and wandb, every step": {"tracker": "trackio,wandb", "logging_steps": 1},
    "trackio, watch all": {"tracker": "trackio", "watch": "all"},
    "wandb, watch all": {"tracker": "wandb", "watch": "all"},
}


class Timed(TrackingCallback):
    """Adds up the seconds in each hook."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.seconds: dict[str, float] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("on_train_begin", "on_step_end", "on_log", "on_train_end", "finish"):
            return found

        def timed(*arguments: Any) -> None:
            start = time.perf_counter()
            found(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return timed


def measure(case: dict[str, Any], steps: int, folder: str) -> tuple[float, float, float, float]:
    """Milliseconds per step in tracking, milliseconds per step in all, seconds at the start and at the end."""
    os.environ["WANDB_MODE"] = "offline"
    sizes = {"model": "tiny-bert", "max_train_samples": 512, "max_eval_samples": 32, "max_length": 32}
    run = {"max_steps": steps, "device": "cpu", "output_dir": folder}
    config = build(STEPS_ALONE | sizes | run | case)
    tracking = Timed(config)
    trainer, _ = build_trainer(config, [tracking])
    config.output_dir.mkdir(exist_ok=True)
    trainer.ranks.barrier()
    trainer.train()
    tracking.finish(trainer)
    spent = tracking.seconds
    in_steps = spent.get("on_step_end", 0.0) + spent["on_log"]
    trainer.engine.close()
    return (
        in_steps / steps * 1e3,
        trainer.state.seconds / steps * 1e3,
        spent["on_train_begin"],
        spent["on_train_end"] + spent["finish"],
    )


def main() -> None:
    """Measure on real ranks, and write benchmarks/tracking.md."""
    args = options(__doc__, ranks=2, steps=100)
    load, rows = os.getloadavg()[0], []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = launch(
                measure, case, args.steps, f"{folder}/run", num_processes=args.ranks, timeout=300, stream=False
            )[0]
        rows.append((name, *(f"{value:.3f}" for value in found)))
    publish(
        "tracking",
        "What tracking costs on rank 0",
        ("torch", "wandb"),
        f"Load average before: {load:.1f}. {args.ranks} ranks over gloo, tiny-bert, {args.steps} steps; a line is "
        "logged every 10 steps but where it says every step, system metrics of all ranks every 10 steps, watched "
        "tensors every 100. The first column is the time that the training waits for: rows are handed to a thread, "
        "whose work is in the second column as far as it takes cores from the training.",
        table("tracker | in tracking (ms per step) | training step (ms) | start (s) | end (s)", rows),
    )


if __name__ == "__main__":
    main()
