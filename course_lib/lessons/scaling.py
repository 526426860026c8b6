"""Scaling of a training: time, throughput and efficiency against the number of processes, measured here."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from course_lib.tracking.sweeps import TrainingFailed, train_apart

QUIET = {
    "eval_steps": 0,
    "save_steps": 0,
    "baselines": "false",
    "keep_best": "false",
    "tracker": "none",
    "max_eval_samples": 1,
    "overwrite_output_dir": "true",
    "push_to_hub": "none",
    "resume_from_checkpoint": "none",
}
"""Fields of every run of a study: it only steps."""


@dataclass(frozen=True)
class Point:
    """One number of processes.

    Attributes:
        processes: ranks.
        global_batch: rows of an optimizer step, over all ranks.
        step_ms: milliseconds per step, over the steps after the warm-up.
        samples_per_second: over all ranks, over the same steps.
        speed_up: throughput by that of the first point.
        efficiency: speed-up by the growth in processes since the first point; 1 is perfect.
        peak_mib: the most memory that a rank held.
    """

    processes: int
    global_batch: int
    step_ms: float
    samples_per_second: float
    speed_up: float
    efficiency: float
    peak_mib: float


def study(
    base: Sequence[str],
    processes: Sequence[int],
    folder: Path,
    *,
    steps: int = 30,
    strong: bool = False,
    say: Callable[[str], None] = print,
) -> list[Point]:
    """Train with each number of processes, one after another, and compare.

    The first third of the steps warms up and is not counted.

    Args:
        base: options of every run, such as ``["--config", "configs/quickstart.yaml"]``.
        processes: numbers of ranks; the first is what the others are compared with.
        folder: where each run has its own.
        steps: optimizer steps of each run, at least 3.
        strong: keep the global batch (strong scaling) rather than a rank's (weak scaling).
        say: told of each point.

    Raises:
        TrainingFailed: a run ended badly.
    """
    fields = QUIET | {"max_steps": steps, "logging_steps": steps // 3} | ({"split_batches": "true"} if strong else {})
    options = [text for name, value in fields.items() for text in (f"--{name}", str(value))]
    points: list[Point] = []
    for count in processes:
        run = folder / f"processes-{count}"
        try:
            summary = train_apart([*base, *options, "--num_processes", str(count)], run)
        except TrainingFailed as error:
            raise TrainingFailed(f"num_processes {count}: {error}") from None
        seconds, samples, counted = after_warm_up(run / "metrics.jsonl")
        rate = samples / seconds
        first = points[0] if points else None
        speed_up = rate / first.samples_per_second if first else 1.0
        points.append(
            Point(
                count,
                summary["train"]["global_batch_size"],
                seconds / counted * 1e3,
                rate,
                speed_up,
                speed_up / (count / first.processes if first else 1),
                max(summary["memory"]["peak_bytes"]) / 2**20,
            )
        )
        say(
            f"{count} processes: {points[-1].step_ms:.1f} ms per step, {rate:.1f} samples/s, "
            f"efficiency {points[-1].efficiency:.0%}"
        )
    return points


def after_warm_up(metrics: Path) -> tuple[float, float, int]:
    """Seconds, samples and steps between the first and the last logged line of a run's steps."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "loss" in line]
    first, last = lines[0], lines[-1]
    samples = [line["samples_per_second"] * line["seconds"] for line in (first, last)]
    return last["seconds"] - first["seconds"], samples[1] - samples[0], last["step"] - first["step"]


def frame(points: Sequence[Point]) -> pd.DataFrame:
    """One row per number of processes; columns are :class:`Point`'s."""
    return pd.DataFrame([asdict(point) for point in points])
