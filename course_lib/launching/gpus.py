"""Takes a GPU, or says in a line why it cannot be had."""

import torch

from course_lib.errors import LaunchError

ROOM = 256 * 2**20
"""Bytes that have to be free: less holds no model, and cuBLAS takes tens of megabytes by itself."""


def take(index: int) -> None:
    """Make a GPU this process's current one, and see that there is room and that something can be computed.

    Raises:
        LaunchError: it is full, another process has it for itself, or this user may not use it.
    """
    where = f"GPU {index}"
    try:
        torch.cuda.set_device(index)
        free, total = torch.cuda.mem_get_info(index)
        if free >= ROOM:
            torch.ones(1, device=f"cuda:{index}").sum().item()
            return
        full = f"{where} is full: {free / 2**30:.1f} of its {total / 2**30:.1f} GiB are free"
    except RuntimeError as error:  # torch.AcceleratorError and torch.OutOfMemoryError are
        said = str(error).partition("\n")[0]
        if "busy or unavailable" in said:
            raise LaunchError(
                f"{where} belongs to another process alone, or cannot be reached",
                "`nvidia-smi` lists processes and compute modes; end that one, or choose another GPU by "
                "CUDA_VISIBLE_DEVICES",
            ) from error
        if "out of memory" not in said:
            raise LaunchError(
                f"{where} cannot be used ({said})",
                "see whether `nvidia-smi` shows it to this user, and its device file may be opened: ls -l /dev/nvidia*",
            ) from error
        full = f"{where} is full"
    raise LaunchError(full, "`nvidia-smi` lists what runs there; end it, or choose another GPU by CUDA_VISIBLE_DEVICES")
