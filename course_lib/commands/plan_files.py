"""Files of ``course plan --emit``: one plan for this trainer, other trainers and launchers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from course_lib.config import Config, build
from course_lib.errors import ConfigError
from course_lib.planning import hardware, intervals, memory, to_launchers
from course_lib.planning.strategy import Candidate, Search
from course_lib.writing import write_text

if TYPE_CHECKING:
    from course_lib.cloud.job import Job


def write(result: Search, folder: Path, *, dataset: str | None = None, tokens: float | None = None) -> list[str]:
    """Write the fastest plan that ``course train`` runs, with the data and the steps that it was planned for.

    ``course.yaml`` (the run), ``accelerate.yaml``, for DeepSpeed's plans ``deepspeed.json``, without pipelines,
    split layers and split sequences ``training_arguments.json`` (the Hugging Face Trainer's), a script or task for
    torchrun and Slurm, and where SageMaker has such instances ``sagemaker.sh``.

    Returns:
        Names of the files, in the order in which they were written.
    Raises:
        ConfigError: no plan that fits is one of ours, or the folder cannot be written.
    """
    chosen = next(
        (candidate for candidate in result.candidates if to_launchers.runs_here(candidate.plan, result.model)), None
    )
    if chosen is None:
        raise ConfigError(
            f"no layout of {result.model.name} that fits is one for `course train`: of the fastest, "
            f"{result.best.plan.strategy}, it {to_launchers.why_not(result.best.plan, result.model)}",
            "plan with more GPUs or a shorter sequence, or run the plan with "
            + to_launchers.elsewhere(result.best.plan, result.model),
        )
    fields = to_launchers.options(chosen.plan, result.model, dataset=dataset, tokens=tokens)
    fields["num_processes"] = chosen.plan.gpus
    texts = _texts(result, chosen, fields, build(fields), tokens)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", "give another folder to --emit") from None
    return list(texts)


def _texts(
    result: Search,
    chosen: Candidate,
    fields: dict[str, Any],
    config: Config,
    tokens: float | None,
) -> dict[str, str]:
    """The files' contents by name."""
    from course_lib.cloud.launchers import LAUNCHERS
    from course_lib.training.engines.with_deepspeed import deepspeed_config
    from course_lib.training.launchfiles import ACCELERATE, DEEPSPEED, accelerate_settings, accelerate_yaml

    plan, cluster, precision = chosen.plan, result.cluster, fields["mixed_precision"]
    hours = intervals.of_hours(result.model, plan, chosen.cost.hours(tokens)).high if tokens else None
    job = _job(result, config, hours)
    head = f"# {result.model.name} on {cluster.gpus} x {cluster.accelerator.name}: {plan.strategy}\n"
    texts = {"course.yaml": head + yaml.safe_dump(fields, sort_keys=False)}
    settings = accelerate_settings(config, precision, plan.gpus, block_classes(result.model.family))
    if job.instance_count > 1:
        head += "# Add --machine_rank and --main_process_ip on each machine.\n"
    texts[ACCELERATE] = accelerate_yaml(settings, plan.gpus, job.instance_count, head=head)
    if config.parallel.chosen_engine == "deepspeed":
        texts[DEEPSPEED] = json.dumps(deepspeed_config(config, precision), indent=1) + "\n"
    if to_launchers.one_way(plan):
        # whose models take the loss of all logits in fp32; where there is no room for them, with the output layer
        plain = replace(plan, loss="plain")
        room = memory.estimate(result.model, plain).fits(cluster.accelerator.memory, cluster.host_memory)
        theirs = plain if room else replace(plan, loss="linear")
        arguments = to_launchers.training_arguments(theirs, DEEPSPEED, tokens)
        texts["training_arguments.json"] = json.dumps(arguments, indent=1) + "\n"
    for kind in ("torchrun", "slurm"):
        name, text = LAUNCHERS[kind]
        texts[name] = text(job)
    if job.instance_type.startswith("ml."):
        limit = f" --max_hours {job.max_hours:g}" if tokens else ""
        texts["sagemaker.sh"] = (
            f"#!/bin/bash\n{head}exec course submit --config course.yaml --instance_type "
            f'{job.instance_type} --instance_count {job.instance_count}{limit} "$@"\n'
        )
    return texts


def _job(result: Search, config: Config, most_hours: float | None) -> "Job":
    """The run on as many machines as its GPUs fill; on a SageMaker instance where one has just such a node.

    It is stopped at the end of the interval of its hours, or, where no tokens were planned, as any job is.
    """
    from course_lib.cloud.job import Job

    cluster = result.cluster
    if cluster.gpus % cluster.gpus_per_node:
        raise ConfigError(
            f"{cluster.gpus} GPUs fill no whole number of nodes of {cluster.gpus_per_node}",
            f"give --gpus {cluster.gpus // cluster.gpus_per_node * cluster.gpus_per_node}",
        )
    machine = cluster.instance or hardware.instance(cluster.accelerator.name, cluster.gpus_per_node)
    job = Job(config, machine or cluster.accelerator.name, cluster.nodes, cluster.gpus_per_node, name="planned")
    if most_hours is None:
        return job
    limit = math.ceil(most_hours * 10) / 10
    return replace(job, max_hours=limit, max_wait_hours=2 * limit)


def block_classes(family: str) -> str:
    """Class names of an architecture's blocks, the units of FSDP; several with commas between."""
    import torch
    from transformers import AutoConfig, AutoModel

    from course_lib.parallel.blocks import blocks

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(family))
    return ",".join(sorted({type(block).__name__ for block in blocks(model).values()}))
