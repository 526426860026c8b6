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


def autocast(precision: str, device: torch.device) -> AbstractContextManager:
    """Run matrix products in the low precision; does nothing for ``no``."""
    if precision == "no":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[precision])
