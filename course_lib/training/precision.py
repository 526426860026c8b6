"""Device and autocast dtype, by their names in the config."""

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env

from course_lib.config import Config
from course_lib.errors import ConfigError
from course_lib.launching.forks import unused_accelerator
from course_lib.system.machine import native_bf16

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """The device that ``auto`` means here, or the one named.

    A launcher that starts more ranks than there are GPUs tells them by ACCELERATE_USE_CPU to stay on the CPU.

    Raises:
        ConfigError: the machine has no such device, or the launcher keeps the ranks off it.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where Accelerate imports it, warns of a guess
    if parse_flag_from_env("ACCELERATE_USE_CPU"):
        if name not in ("auto", "cpu"):
            raise ConfigError(
                f"device is {name}, and ACCELERATE_USE_CPU keeps this process on the CPU",
                "use --device auto, or fewer processes where the launcher has set it",
            )
        return torch.device("cpu")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, usable in there.items() if usable))
    if not there[name]:
        raise ConfigError(f"device is {name}, and torch sees none here", "use --device auto")
    return torch.device(name)


def pick_precision(name: str, device: torch.device) -> str:
    """``no``, ``fp16`` or ``bf16``; ``auto`` is bf16 where the hardware multiplies it natively.

    It is never fp16, also not on GPUs whose tensor cores know no other (V100, T4): fp16 overflows at 65504, so it skips
    steps and needs a scaled loss, which not every engine has. That is for the user to choose; :func:`hint` says so.

    Raises:
        ConfigError: fp16 on a device whose gradients cannot be scaled.
    """
    if name == "auto":
        return "bf16" if native_bf16(device.type) else "no"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"mixed_precision fp16 needs a GPU, and the device is {device.type}", "use bf16 or no")
    return name


def make_accelerator(precision: str, **options: Any) -> Accelerator:
    """Accelerate, which holds one precision for a process: that of the training before it is let go.

    Args:
        precision: ``no``, ``fp16`` or ``bf16``.
        options: of :class:`accelerate.Accelerator`.
    Raises:
        ConfigError: the process has an ``Accelerator`` of another precision that this course did not make.
    """
    held = AcceleratorState._shared_state
    if held.get("_mixed_precision", precision) != precision:
        if not held.get("made_by_course"):
            raise ConfigError(
                f"this process has an Accelerator with mixed_precision {held['_mixed_precision']}, and "
                f"this training has {precision}",
                "give both the same one, or train in another process",
            )
        AcceleratorState._reset_state()  # the process group stays
    accelerator = Accelerator(mixed_precision=precision, **options)
    AcceleratorState._shared_state["made_by_course"] = True
    return accelerator


def hint(config: Config, device: torch.device) -> str | None:
    """One line for a run that ``auto`` leaves slower than the machine could be; None for every other.

    It computes in float32 beside idle tensor cores, or on the CPU beside an accelerator that the course does not know.
    """
    if config.run.device == "auto" and device.type == "cpu" and (kind := unused_accelerator()):
        return f"the course does not know devices of type {kind}: training on the CPU"
    if config.run.mixed_precision != "auto" or device.type != "cuda" or native_bf16("cuda"):
        return None
    if torch.cuda.get_device_capability(device) < (7, 0):
        return None  # older than tensor cores
    kind, way = config.run.training_type, (config.parallel.strategy, config.parallel.chosen_engine)
    scales = kind == "basic" or (kind == "accelerated" and (way == ("ddp", "torch") or way[1] == "deepspeed"))
    return (
        f"{torch.cuda.get_device_name(device)} has no bfloat16 of its own: training in float32; its tensor cores "
        "take --mixed_precision fp16" + ("" if scales else ", which --strategy ddp and --engine deepspeed have")
    )


def use_tf32(choice: str, precision: str, device: torch.device) -> bool:
    """Set for the process whether float32 matrix products round their operands to TF32; gives whether they do.

    Under autocast the products that matter are of 16 bits, and what is left in float32 does not need more than TF32's
    10 bits beside them. Without it somebody asked for float32.

    Args:
        choice: ``auto``, ``on`` or ``off``.
        precision: ``no``, ``fp16`` or ``bf16``.
        device: that the products are computed on.
    Raises:
        ConfigError: on is asked for, and the device has no such products.
    """
    there = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if choice == "on" and not there:
        raise ConfigError(
            f"tf32 on needs a GPU of compute capability 8.0 or more, which this {device.type} is not",
            "leave it out, or use --tf32 off",
        )
    used = there and (choice == "on" or (choice == "auto" and precision != "no"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if used else "highest")
    return used


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Run matrix products in the low precision; does nothing for ``no``."""
    return contextlib.nullcontext() if precision == "no" else torch.autocast(device.type, DTYPES[precision])
