"""The exercises: one module per topic, each with its `Task`s.

`TASKS` imports them all; a sandbox takes just the one it needs.
"""

import importlib

from course_lib.grading.task import Task

MODULES = (
    "start",
    "loop",
    "ddp",
    "ddp_module",
    "prepared",
    "accelerator",
    "evaluation",
    "metric",
    "zero",
    "zero_optimizer",
    "fsdp",
    "fsdp_module",
    "pipeline",
    "executor",
    "tensor",
    "block",
    "planning",
    "planner",
    "resuming",
    "faults",
    "surviving",
    "tracking",
    "tracker",
    "cloud",
    "interruption",
    "spot_job",
    "context",
    "experts",
    "museum_means",
    "museum_layers",
    "museum_losses",
    "roofline",
    "flash",
    "chunked_loss",
    "eight_bits",
    "less",
    "less_bytes",
    "less_module",
    "lora_layer",
    "lora_nf4",
    "lora_dpo",
    "lora_load",
    "lora_sync",
)
"""In the order of the lessons."""

TASKS: dict[str, Task]
"""By name, in the order of the lessons; made when it is first asked for."""


def __getattr__(name: str) -> dict[str, Task]:
    if name != "TASKS":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    global TASKS
    modules = [importlib.import_module(f"{__name__}.{topic}") for topic in MODULES]
    TASKS = {task.name: task for module in modules for task in module.ALL}
    return TASKS
