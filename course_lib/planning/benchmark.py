"""A benchmark as a list of runs that the search proposes, and what measured runs teach the planner.

Everything is plain JSON, so that a plan can be written here, run elsewhere, and read back.
"""

import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from course_lib.errors import ConfigError
from course_lib.planning import cost, hardware, models, strategy, to_launchers
from course_lib.planning.hardware import Accelerator, Cluster
from course_lib.planning.models import Model
from course_lib.planning.plan import Plan
from course_lib.writing import write_text

KINDS = {"cuda": "A100-80", "rocm": "MI300X", "cpu": "CPU"}
"""The accelerator that a kind of device stands for."""
STRATEGIES = {"ddp": "ddp", "fsdp": "fsdp", "deepspeed": "zero"}
"""Engines of layouts that run on any number of ranks, and their names in ``course train``."""


def generate(
    model: str,
    accelerators: Collection[str] = ("cuda",),
    *,
    distributed: bool = False,
    max_gpus: int = 8,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """A benchmark plan: for each accelerator and number of GPUs the fastest layout of each family.

    Args:
        model: a name as :func:`course_lib.planning.models.load` takes it.
        accelerators: names of the catalogue, or cuda, rocm and cpu for a usual one.
        distributed: 1, 2, 4 ... and ``max_gpus`` GPUs; False: one.
        max_gpus: the most GPUs.
        sequence_length: tokens; by default what the model takes, at most 2048.

    Returns:
        ``model``, ``parameters``, ``sequence_length``, ``runs`` and ``left_out``. A run has accelerator, gpus,
        strategy, the plan's fields, global_batch, predicted tokens_per_second, mfu and memory_bytes, and command.

    Raises:
        ConfigError: an unknown accelerator, or no GPU.
        ModelError: an unknown model.
    """
    if max_gpus < 1:
        raise ConfigError(f"--max-gpus {max_gpus}", "give at least 1")
    known = models.load(model)
    length = sequence_length or min(2048, known.context or 2048)
    counts = [1]
    while distributed and counts[-1] < max_gpus:
        counts.append(min(2 * counts[-1], max_gpus))
    runs: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for name in accelerators:
        for gpus in counts:
            cluster = hardware.cluster(KINDS.get(name, name), gpus)
            try:
                result = strategy.search(known, cluster, length)
            except strategy.NothingFits as why:
                left_out.append({"accelerator": cluster.accelerator.name, "gpus": gpus, "why": str(why)})
                continue
            runs += [_run(known, cluster, candidate) for candidate in result.best_of_each()]
    return {
        "model": known.name,
        "parameters": known.parameters,
        "sequence_length": length,
        "runs": runs,
        "left_out": left_out,
    }


def _run(model: Model, cluster: Cluster, candidate: strategy.Candidate) -> dict[str, Any]:
    plan = candidate.plan
    return {
        "accelerator": cluster.accelerator.name,
        "gpus": cluster.gpus,
        "strategy": plan.strategy,
        "plan": asdict(plan),
        "global_batch": plan.global_batch,
        "predicted": {
            "tokens_per_second": candidate.cost.tokens_per_second,
            "mfu": candidate.cost.mfu,
            "memory_bytes": candidate.memory.total,
        },
        "command": to_launchers.launch_line(plan, cluster.gpus_per_node, model),
    }


def runnable(document: Mapping[str, Any], ranks: int) -> list[Plan]:
    """The layouts of a benchmark plan that this course's trainer can run with so many ranks; each family once.

    They are scaled down: as many ranks as there are, micro-batch and accumulation 1, fp32, nothing compiled.
    """
    plans: dict[tuple[str, int, int], Plan] = {}
    for run in document["runs"]:
        plan = Plan(**run["plan"])
        if plan.gpus > ranks or not to_launchers.one_way(plan) or plan.offload != "none":
            continue
        plans.setdefault(
            (plan.engine, plan.stage, plan.gpus),
            replace(plan, micro_batch=2, accumulation=1, precision="fp32", compiled=False, checkpointing="none"),
        )
    return list(plans.values())


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
            "leave this run out",
        )
    for _ in range(60):
        share = math.sqrt(low * high)
        low, high = (share, high) if predicted(share) < tokens_per_second else (low, share)
    return low


def calibration(measured: Iterable[tuple[Model, Plan, Cluster, float]]) -> dict[str, dict[str, float]]:
    """The median share by accelerator and data type over measured runs: model, plan, cluster and tokens/s."""
    shares: dict[tuple[str, str], list[float]] = {}
    for model, plan, cluster, rate in measured:
        key = cluster.accelerator.name, plan.precision
        shares.setdefault(key, []).append(matmul_share(model, plan, cluster, rate))
    median_shares: dict[str, dict[str, float]] = {}
    for (name, precision), measured_shares in shares.items():
        median_shares.setdefault(name, {})[precision] = statistics.median(measured_shares)
    return median_shares


def write_results(
    path: Path,
    document: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    shares: Mapping[str, Mapping[str, float]],
) -> None:
    """Write a benchmark plan with its results; what :func:`calibrated` reads."""
    write_text(path, json.dumps({**document, "results": list(results), "matmul": shares}, indent=2) + "\n")


def calibrated(cluster: Cluster, path: str | Path) -> Cluster:
    """The cluster with the shares of peak that were measured, where the file has its accelerator.

    Args:
        cluster: of the catalogue.
        path: written by ``course bench --run``.

    Raises:
        ConfigError: no such file, it holds no measured shares, or none of this accelerator.
    """
    try:
        shares = json.loads(Path(path).read_text(encoding="utf-8"))["matmul"]
    except OSError as error:
        raise ConfigError(
            f"cannot read calibration {path} ({error.strerror})", "write one with `course bench --run`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no measured shares", "write one with `course bench --run`") from error
    chip = cluster.accelerator
    own = shares.get(chip.name, {}) if isinstance(shares, dict) else {}
    if not own or not all(name in chip.peak and isinstance(share, float) and share > 0 for name, share in own.items()):
        raise ConfigError(
            f"{path} has no measured shares of {chip.name}",
            "it has " + (", ".join(shares) or "none") if isinstance(shares, dict) else "",
        )
    return replace(cluster, accelerator=_with(chip, own))


def _with(chip: Accelerator, shares: Mapping[str, float]) -> Accelerator:
    return replace(chip, matmul={**chip.matmul, **shares})
