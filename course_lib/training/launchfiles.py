"""Files for other tools from a run's configuration: DeepSpeed's JSON and Accelerate's YAML.

They stand in the run's folder and are usable by themselves: ``accelerate launch --config_file
accelerate.yaml`` starts any script that makes an ``Accelerator`` under the same strategy.
"""

import json
from collections.abc import Mapping
from typing import Any

import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule

from course_lib.config import Config
from course_lib.parallel.blocks import blocks
from course_lib.writing import write_text

DEEPSPEED, ACCELERATE = "deepspeed.json", "accelerate.yaml"
BY_FSDP = ("zero2", "zero3", "fsdp")
"""Strategies that Accelerate's FSDP plugin stands for, where DeepSpeed does not carry them out."""


def accelerate_yaml(settings: Mapping[str, Any], num_processes: int, machines: int = 1, *, head: str = "") -> str:
    """The text of a file that ``accelerate launch --config_file`` reads.

    Args:
        settings: what differs by strategy: ``distributed_type``, ``mixed_precision`` and a plugin's own.
        num_processes: ranks on all machines.
        machines: several meet at port 29500 of machine 0; on one the system chooses a port.
        head: comment lines, each with its ``#`` and its end.
    """
    meeting = {"main_process_port": 29500, "rdzv_backend": "static"} if machines > 1 else {"main_process_port": 0}
    return head + yaml.safe_dump(
        {
            "compute_environment": "LOCAL_MACHINE",
            "num_machines": machines,
            "num_processes": num_processes,
            **meeting,
            **settings,
        },
        sort_keys=False,
    )


def several_processes(num_processes: int, precision: str = "no") -> dict[str, Any]:
    """Settings for one process a device and DDP, which is also how any strategy of the course's own is started."""
    return {"distributed_type": "MULTI_GPU" if num_processes > 1 else "NO", "mixed_precision": precision}


def accelerate_settings(
    config: Config, precision: str, num_processes: int, block: str, deepspeed: str = DEEPSPEED
) -> dict[str, Any]:
    """Settings for :func:`accelerate_yaml` under which any script has this run's strategy.

    Args:
        config: the run.
        precision: ``no``, ``fp16`` or ``bf16``.
        num_processes: ranks on all machines.
        block: class name of the model's blocks, the units of FSDP; several with commas between.
        deepspeed: path of DeepSpeed's own file.
    """
    parallel = config.parallel
    if parallel.chosen_engine == "deepspeed":
        # Precision and accumulation stand in DeepSpeed's own file, which must not be contradicted.
        return {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"deepspeed_config_file": deepspeed, "zero3_init_flag": False},
        }
    if _by_fsdp_alone(config):
        fsdp = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": parallel.strategy != "zero2",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_offload_params": parallel.offload != "none",
            "fsdp_transformer_layer_cls_to_wrap": block,
        }
        return {"distributed_type": "FSDP", "mixed_precision": precision, "fsdp_config": fsdp}
    return several_processes(num_processes, precision)


def _by_fsdp_alone(config: Config) -> bool:
    """Whether Accelerate's FSDP, which shards over all ranks, is the run's strategy."""
    parallel, alone = config.parallel, config.run.training_type == "accelerated"
    return alone and parallel.strategy in BY_FSDP and parallel.tensor_parallel_size * parallel.expert_parallel_size == 1


def _own_class(block: nn.Module) -> type:
    """A block's class as the model's file has it: ``fully_shard`` derives one of its own from it."""
    return next(kind for kind in type(block).__mro__ if not issubclass(kind, FSDPModule))


def write(config: Config, precision: str, num_processes: int, model: nn.Module) -> None:
    """Write the files of a run into its folder."""
    folder = config.output_dir
    classes = {_own_class(block).__name__ for block in blocks(model).values()} if _by_fsdp_alone(config) else ()
    settings = accelerate_settings(
        config, precision, num_processes, ",".join(sorted(classes)), deepspeed=str(folder / DEEPSPEED)
    )
    if config.parallel.chosen_engine == "deepspeed":
        from course_lib.training.engines.with_deepspeed import deepspeed_config

        # Under stage 3 a parameter here is empty, and knows how large the whole is.
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
        write_text(folder / DEEPSPEED, json.dumps(deepspeed_config(config, precision, elements), indent=1) + "\n")
    write_text(folder / ACCELERATE, accelerate_yaml(settings, num_processes))
