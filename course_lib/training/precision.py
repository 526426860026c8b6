"""Device and autocast dtype, by their names in the config."""

import contextlib
import os
from contextlib import AbstractContextManager

import torch

from course_lib.errors import ConfigError
from course_lib.runtime.machine import native_bf16


def pick_device(name: str) -> torch.device:
    """The device that ``auto`` means here, or the one named.

    Raises:
        ConfigError: the machine has no such device.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed, where Accelerate imports it, warns of a guess
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, usable in there.items() if usable))
    if not there[name]:
        raise ConfigError(f"device is {name}, and torch sees none here", "use --device auto")
    return torch.device(name)


def pick_precision(name: str, device: torch.device) -> str:
    """``no``, ``fp16`` or ``bf16``; ``auto`` is bf16 where the hardware multiplies it natively.

    Raises:
        ConfigError: fp16 on a device whose gradients cannot be scaled.
    """
    if name == "auto":
        return "bf16" if native_bf16(device.type) else "no"
    if name == "fp16" and device.type != "cuda":
        raise ConfigError(f"mixed_precision fp16 needs a GPU, and the device is {device.type}", "use bf16 or no")
    return name


def use_tf32(choice: str, precision: str, device: torch.device) -> bool:
    """Set for the process whether float32 matrix products round their operands to TF32; gives whether they do.

    Under autocast the products that matter are of 16 bits, and what is left in float32 does not need more than TF32's
    10 bits beside them. Without it somebody asked for float32.

    Args:
        choice: ``auto``, ``on`` or ``off``.
        precision: ``no``, ``fp16`` or ``bf16``.
    Raises:
        ConfigError: on is asked for, and the device has no such products.
    """
    there = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if choice == "on" and not there:
        raise ConfigError(f"tf32 on needs a GPU of compute capability 8.0 or more, which this {device.type} is not",
                          "leave it out, or use --tf32 off")
    used = there and (choice == "on" or (choice == "auto" and precision != "no"))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if used else "highest")
    return used


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Run matrix products in the low precision; does nothing for ``no``."""
    if precision == "no":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[precision])
