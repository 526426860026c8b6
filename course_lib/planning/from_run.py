"""The planner's constants of a machine from a run of ours on it: what was measured, and what moved.

What is taken is the time in which this host starts an operation, where it has such a device, and then the share of the
peak that matmuls reach, at which the cost model gives the measured tokens/s. What is only set beside is memory: the
planner's count of it has no constant of the machine.
"""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from course_lib.config import Config
from course_lib.config.files import load
from course_lib.errors import ConfigError
from course_lib.planning import cost, memory, models
from course_lib.planning.hardware import Cluster
from course_lib.planning.models import Model
from course_lib.planning.plan import Engine, Plan

STEPS = 5
"""Measured steps that are taken, after the first line of the record; more where lines are further apart."""
LAYOUTS: dict[str, tuple[Engine, int]] = {
    "ddp": ("ddp", 0),
    "zero1": ("deepspeed", 1),
    "zero2": ("deepspeed", 2),
    "zero3": ("deepspeed", 3),
    "fsdp": ("fsdp", 3),
}
"""The planner's engine and ZeRO stage by the trainer's strategy."""


@dataclass(frozen=True)
class Calibrated:
    """Constants measured in a run.

    Attributes:
        cluster: the one asked for, with the measured share and launch time.
        run: the folder.
        model: name of what was trained.
        plan: as it was trained.
        steps: measured.
        measured: tokens/s of all ranks, the median over the lines of the record.
        before: tokens/s that the planner said with the catalogue's share.
        share: of peak, the catalogue's and the measured.
        launch: seconds per operation, assumed and of this host; the second is None where it has no such device.
        peak: bytes of the fullest GPU, planned and measured; measured is None on CPUs.
    """

    cluster: Cluster
    run: Path
    model: str
    plan: Plan
    steps: int
    measured: float
    before: float
    share: tuple[float, float]
    launch: tuple[float, float | None]
    peak: tuple[float, float | None]

    def lines(self) -> list[str]:
        """Lines on what was taken from the run, and what moved."""
        planned, held = self.peak
        lines = [
            f"Calibrated by {self.run}: {self.steps} steps of {self.model}, {self.plan.strategy} on "
            f"{self.plan.gpus} x {self.cluster.accelerator.name}, {self.measured:,.0f} tokens/s; planned were "
            f"{self.before:,.0f} ({self.before / self.measured - 1:+.0%}).",
            f"Moved: the share of {self.plan.precision}'s peak that matmuls reach, {self.share[0]:.3g} to "
            f"{self.share[1]:.3g}.",
        ]
        assumed, here = self.launch
        if here:
            lines.append(
                f"Moved: the host's time for one operation, {1e6 * assumed:.3g} to {1e6 * here:.3g} "
                "microseconds, measured on this host."
            )
        else:
            lines.append(
                f"Not moved: the host's time for one operation, {1e6 * assumed:.3g} microseconds: this host "
                f"has no {self.cluster.accelerator.name} to measure it with."
            )
        if held:
            lines.append(
                f"Not moved: memory, {planned / 2**30:.1f} GiB planned and {held / 2**30:.1f} measured "
                f"({planned / held - 1:+.0%})."
            )
        return lines


def calibrate(cluster: Cluster, run: Path) -> Calibrated:
    """The cluster with the share that a run of ours reached on such accelerators.

    Args:
        cluster: to plan for; the run was made on the same kind of accelerator, on any number.
        run: its folder, with config.yaml, metrics.jsonl and summary.json.

    Raises:
        ConfigError: no such run, too few steps, another device, a layout that no plan says, or no share explains it.
    """
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        text = (run / "metrics.jsonl").read_text(encoding="utf-8")
        record = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run} is no finished run of `course train` ({error})",
            "give the folder that has its summary.json and metrics.jsonl",
        ) from None
    config = load([run / "config.yaml"])
    chip = cluster.accelerator
    if (summary["device"] == "cpu") != (chip.name == "CPU"):
        raise ConfigError(
            f"{run} was made on {summary['device']}, and the plan is for {chip.name}", "give a run on that accelerator"
        )
    steps, rate, length = measured(record, run)
    plan = plan_of(config, summary, length)
    name = run / "model"
    classes = config.data.task == "classification"
    model = models.load(name if name.exists() else config.model.model, head=not classes)
    there = replace(cluster, gpus=plan.gpus, gpus_per_node=min(cluster.gpus_per_node, plan.gpus))
    before = cost.estimate(model, plan, there).tokens_per_second
    from course_lib.planning import host_launch  # here: it takes torch and transformers, seconds

    device = host_launch.device_here(chip.name)
    launch = host_launch.launch_seconds(device) if device else None
    there = replace(there, launch=launch or cluster.launch)
    share = matmul_share(model, plan, there, rate)
    moved = replace(chip, matmul={**chip.matmul, plan.precision: share})
    held = max(summary.get("memory", {}).get("peak_bytes") or [0]) if summary["device"] != "cpu" else None
    return Calibrated(
        replace(cluster, accelerator=moved, launch=there.launch),
        run,
        config.model.model,
        plan,
        steps,
        rate,
        before,
        (chip.matmul[plan.precision], share),
        (cluster.launch, launch),
        (memory.estimate(model, plan).total, held),
    )


def matmul_share(model: Model, plan: Plan, cluster: Cluster, tokens_per_second: float) -> float:
    """The share of peak at which the cost model gives a measured throughput of all ranks together.

    Raises:
        ConfigError: no share does: what the cost model counts beside the matmuls takes longer than was measured.
    """

    def predicted(share: float) -> float:
        chip = replace(cluster.accelerator, matmul={**cluster.accelerator.matmul, plan.precision: share})
        return cost.estimate(model, plan, replace(cluster, accelerator=chip)).tokens_per_second

    low, high = 1e-6, 100.0  # of a peak that for CPUs is a guess
    if not predicted(low) < tokens_per_second < predicted(high):
        raise ConfigError(
            f"{plan.strategy} on {plan.gpus} ranks: no share of {cluster.accelerator.name}'s peak gives "
            f"{tokens_per_second:,.0f} tokens/s",
            "give another run",
        )
    for _ in range(60):
        share = math.sqrt(low * high)
        low, high = (share, high) if predicted(share) < tokens_per_second else (low, share)
    return low


def measured(record: list[dict[str, Any]], run: Path) -> tuple[int, float, int]:
    """Steps, tokens/s and tokens per row between the record's first line and its fifth step after that.

    Raises:
        ConfigError: too few steps.
    """
    lines = [line for line in record if "loss" in line and "tokens_per_second" in line and line.get("seconds")]
    taken = lines[:1]
    for line in lines[1:]:
        taken.append(line)
        if line["step"] - lines[0]["step"] >= STEPS:
            break
    if not taken or taken[-1]["step"] - taken[0]["step"] < STEPS:
        raise ConfigError(
            f"{run} has no {STEPS} measured steps after the first line of its metrics.jsonl",
            "train with --logging-steps 1 for some steps more",
        )

    def total(line: dict[str, Any], what: str) -> float:  # the record has means since the start
        return line[f"{what}_per_second"] * line["seconds"]

    rates = [
        (total(late, "tokens") - total(early, "tokens")) / (late["seconds"] - early["seconds"])
        for early, late in zip(taken, taken[1:], strict=False)
    ]
    rows, tokens = (total(taken[-1], what) - total(taken[0], what) for what in ("samples", "tokens"))
    return taken[-1]["step"] - taken[0]["step"], statistics.median(rates), max(1, round(tokens / rows))


def plan_of(config: Config, summary: dict[str, Any], length: int) -> Plan:
    """A run as a plan.

    Args:
        config: of the run.
        summary: of the run, for the precision and the ranks that it had.
        length: tokens per row.
    Raises:
        ConfigError: a layout that no plan says.
    """
    parallel, run = config.parallel, config.run
    if parallel.strategy not in LAYOUTS or run.training_type == "pipeline":
        raise ConfigError(
            f"a run of {run.training_type}, {parallel.strategy} is not read as a plan",
            "give a run with " + ", ".join(LAYOUTS) + ", without a pipeline",
        )
    (engine, stage), tensor = LAYOUTS[parallel.strategy], parallel.tensor_parallel_size
    low = summary["mixed_precision"]
    copies = summary["world_size"] // parallel.shard_group_size if parallel.shard_group_size else 1
    return Plan(
        length,
        engine,
        stage,
        data=summary["world_size"] // tensor,
        tensor=tensor,
        replicas=copies,
        micro_batch=run.batch_size,
        accumulation=run.gradient_accumulation_steps,
        checkpointing="full" if config.model.activation_checkpointing else "none",
        precision=low if low in ("bf16", "fp16") else "tf32" if summary.get("tf32") else "fp32",
        sequence_parallel=parallel.sequence_parallel,
        compiled=config.model.torch_compile,
        loss="chunked",
        head="gathered",
    )
