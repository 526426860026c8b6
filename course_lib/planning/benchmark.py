"""A benchmark as a list of runs that the search proposes, in plain JSON."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from course_lib.errors import ConfigError
from course_lib.planning import hardware, models, strategy, to_launchers
from course_lib.planning.hardware import Cluster
from course_lib.planning.models import Model

KINDS = {"cuda": "A100-80", "rocm": "MI300X", "cpu": "CPU"}
"""The accelerator that a kind of device stands for."""


def generate(
    model: str,
    accelerators: Collection[str] = ("cuda",),
    *,
    distributed: bool = False,
    max_gpus: int = 8,
) -> dict[str, Any]:
    """A benchmark plan: for each accelerator and number of GPUs the fastest layout of each family.

    Args:
        model: a name as :func:`course_lib.planning.models.load` takes it.
        accelerators: names of the catalogue, or cuda, rocm and cpu for a usual one.
        distributed: 1, 2, 4 ... and ``max_gpus`` GPUs; False: one.
        max_gpus: the most GPUs.

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
    length = min(2048, known.context or 2048)
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
