"""Files for other tools from a run's configuration: DeepSpeed's JSON and Accelerate's YAML.

They stand in the run's folder and are usable by themselves: ``accelerate launch --config_file
accelerate.yaml`` starts any script that makes an ``Accelerator`` under the same strategy.
"""

import json
from typing import Any

import yaml
from torch import nn

from course_lib.config import Config
from course_lib.parallel.blocks import blocks
from course_lib.writing import write_text

DEEPSPEED, ACCELERATE = "deepspeed.json", "accelerate.yaml"
BY_FSDP = ("zero2", "zero3", "fsdp")
"""Strategies that Accelerate's FSDP plugin stands for, where DeepSpeed does not carry them out."""


def accelerate_config(config: Config, precision: str, num_processes: int, block: str) -> dict[str, Any]:
    """What ``accelerate launch --config_file`` reads.

    Args:
        config: the run.
        precision: ``no``, ``fp16`` or ``bf16``.
        num_processes: ranks on this machine.
        block: class name of the model's blocks, the units of FSDP; several with commas between.
    """
    parallel = config.parallel
    common = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": num_processes,
              "main_process_port": 0, "mixed_precision": precision}
    if parallel.chosen_engine == "deepspeed":
        # Precision and accumulation stand in DeepSpeed's own file, which must not be contradicted.
        del common["mixed_precision"]
        return {"distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_config_file": DEEPSPEED, "zero3_init_flag": False}} | common
    if parallel.strategy in BY_FSDP and parallel.tensor_parallel_size == 1:  # Accelerate would shard over all ranks
        fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": parallel.strategy != "zero2",
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
                "fsdp_offload_params": parallel.offload != "none", "fsdp_transformer_layer_cls_to_wrap": block}
        return {"distributed_type": "FSDP", "fsdp_config": fsdp} | common
    return {"distributed_type": "MULTI_GPU" if num_processes > 1 else "NO"} | common


def write(config: Config, precision: str, num_processes: int, model: nn.Module) -> None:
    """Write the files of a run into its folder."""
    folder = config.output_dir
    # A pipeline's stages have no such blocks, nor does it need them.
    classes = {type(block).__name__ for block in blocks(model).values()} if config.parallel.strategy in BY_FSDP else ()
    launch = accelerate_config(config, precision, num_processes, ",".join(sorted(classes)))
    if config.parallel.chosen_engine == "deepspeed":
        from course_lib.training.engines.with_deepspeed import deepspeed_config

        # Under stage 3 a parameter here is empty, and knows how large the whole is.
        elements = sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters() if each.requires_grad)
        write_text(folder / DEEPSPEED, json.dumps(deepspeed_config(config, precision, elements), indent=1) + "\n")
        launch["deepspeed_config"]["deepspeed_config_file"] = str(folder / DEEPSPEED)
    write_text(folder / ACCELERATE, yaml.safe_dump(launch, sort_keys=False))
