"""The tensors of a checkpoint, in either of its forms, for a run of any strategy.

A run that keeps everything on every rank stores ``model.safetensors`` and ``optimizer.safetensors``.
One that shards stores pieces (see :mod:`sharded`) and ``buffers.safetensors``. Each reads both, so
that a run may go on with another strategy, engine or number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import Optimizer

from course_lib.errors import CheckpointError
from course_lib.parallel.sharding import scatter_whole
from course_lib.training.checkpoints import safetensors_tree, sharded

if TYPE_CHECKING:
    from course_lib.training.engines.base import Engine
    from course_lib.training.engines.sharded import ShardedEngine

MODEL, OPTIMIZER, BUFFERS = "model.safetensors", "optimizer.safetensors", "buffers.safetensors"


def is_sharded(folder: Path) -> bool:
    """Whether the checkpoint is in pieces."""
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


def read_into_whole(engine: Engine, folder: Path) -> None:
    """Fill a model and an optimizer that every rank holds whole, from either form."""
    model, optimizer, shapes = engine.model, engine.optimizer, engine.shapes()
    if not is_sharded(folder):
        engine.load_whole_weights(safetensors_tree.load(folder / MODEL))
        put_back(optimizer, safetensors_tree.load(folder / OPTIMIZER))
        return
    weights = safetensors_tree.load(folder / BUFFERS)
    weights |= {name: flat.view(shapes[name]) for name, flat in sharded.whole(folder, "model/").items()}
    model.load_state_dict(weights, strict=False)  # a tied parameter is stored under its first name alone
    parameters = dict(model.named_parameters())
    for key, flat in sharded.whole(folder, "optimizer/").items():
        name, state = key.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][state] = (
            flat.view(()).to(device_of_step(optimizer, parameter))
            if state == "step"
            else flat.view(parameter.shape).to(parameter.device)
        )


def write_whole(engine: Engine, folder: Path) -> None:
    """Store what every rank holds alike; called on the main rank."""
    if engine.shards_state:
        safetensors_tree.save(cast("ShardedEngine", engine).buffers(), folder / BUFFERS)
    else:
        safetensors_tree.save(engine.stored_weights(), folder / MODEL)
        safetensors_tree.save(engine.optimizer.state_dict(), folder / OPTIMIZER)


def check(engine: Engine, folder: Path) -> None:
    """Refuse a checkpoint of another model or optimizer before anything is changed."""
    if is_sharded(folder):
        return  # its pieces are checked as they are read
    check_model(safetensors_tree.load(folder / MODEL), engine.shapes(), folder)
    if not engine.shards_state:
        check_optimizer(safetensors_tree.load(folder / OPTIMIZER), engine.optimizer, folder)


def read(engine: Engine, folder: Path) -> None:
    """Fill model and optimizer from a checkpoint. A collective call."""
    if not engine.shards_state:
        return read_into_whole(engine, folder)
    read_pieces(cast("ShardedEngine", engine), folder)


def read_pieces(engine: ShardedEngine, folder: Path) -> None:
    """Fill the pieces of an engine that shards its state from either form."""
    if is_sharded(folder):
        room = engine.prepare_optimizer_pieces(sharded.sizes(folder, "optimizer/"))
        engine.load_tensors(
            {f"model/{name}": piece for name, piece in engine.stored_pieces().items()}
            | {f"optimizer/{name}": piece for name, piece in room.items()},
            folder,
        )
        engine.load_buffers(safetensors_tree.load(folder / BUFFERS))
    else:
        engine.load_whole_weights(safetensors_tree.load(folder / MODEL))
        whole = engine.own_share(whole_optimizer_state(folder, engine.trained_names))
        scatter_whole(whole, engine.prepare_optimizer_pieces({key: v.numel() for key, v in whole.items()}))
    engine.refresh()


def device_of_step(optimizer: Optimizer, parameter: torch.Tensor) -> torch.device:
    """Where an optimizer wants to find how many steps a parameter has made, a scalar of its state.

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
