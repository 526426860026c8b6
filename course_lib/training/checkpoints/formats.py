"""The two forms of a checkpoint's tensors, and what both of their readers look at.

A run that keeps everything on every rank stores ``model.safetensors`` and ``optimizer.safetensors``. One that shards
stores shards (see :mod:`course_lib.training.checkpoints.sharded`) and ``buffers.safetensors``. Each reads both
(:class:`~course_lib.training.checkpoints.stored_state.StoredState`), so that a run may go on with another strategy,
engine or number of ranks.
"""

from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from course_lib.errors import CheckpointError
from course_lib.training.checkpoints import safetensors_tree, sharded

MODEL, OPTIMIZER, BUFFERS = "model.safetensors", "optimizer.safetensors", "buffers.safetensors"


def is_sharded(folder: Path) -> bool:
    """Whether the checkpoint is in shards."""
    return (folder / sharded.SHARDS).is_dir()


def check_model(weights: dict[str, torch.Tensor], mine: dict[str, tuple[int, ...]], folder: Path) -> None:
    """Refuse weights of other names or shapes.

    Raises:
        CheckpointError: with the first name that differs.
    """
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if mine != theirs:
        name = next(n for n in [*mine, *theirs] if mine.get(n) != theirs.get(n))
        raise CheckpointError(
            f"checkpoint {folder} is from another model: {name} is {theirs.get(name, 'absent')} "
            f"there and {mine.get(name, 'absent')} here",
            "give the --model it was trained from",
        )


def check_optimizer(state: dict[str, Any], optimizer: Optimizer, folder: Path) -> None:
    """Refuse the state of parameters in other groups: it is kept by their numbers."""
    saved, own = ([group["params"] for group in held["param_groups"]] for held in (state, optimizer.state_dict()))
    if saved != own:
        raise CheckpointError(
            f"the optimizer of checkpoint {folder} has {list(map(len, saved))} parameters in its "
            f"groups, and this run's {list(map(len, own))}",
            "resume from another checkpoint",
        )


def put_back(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimizer its state again, and leave it what the config says: rate, decay, betas and all that."""
    optimizer.load_state_dict({"state": saved["state"], "param_groups": optimizer.state_dict()["param_groups"]})


def device_of_step(optimizer: Optimizer, parameter: torch.Tensor) -> torch.device:
    """Device on which an optimizer wants the number of a parameter's steps, a scalar of its state.

    A fused or capturable kernel reads it where the parameter is; a loop on the host wants it there, or would wait for
    the GPU at each parameter (torch.optim.Optimizer._process_value_according_to_param_policy).
    """
    groups = optimizer.param_groups  # DeepSpeed's stage 3 leaves them empty between two steps
    group = next((group for group in groups if any(member is parameter for member in group["params"])), groups[0])
    reads_there = group.get("fused") or group.get("capturable")
    return parameter.device if reads_there else torch.device("cpu")


def whole_optimizer_state(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """State by ``parameter/state`` from ``optimizer.safetensors``.

    Args:
        folder: of the checkpoint.
        names: of the trained parameters, in the order of the optimizer's groups.
    """
    saved = safetensors_tree.load(folder / OPTIMIZER)["state"]
    return {
        f"{names[index]}/{state}": value
        for index, kept in saved.items()
        for state, value in kept.items()
        if value is not None
    }
