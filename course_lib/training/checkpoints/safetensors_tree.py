"""Nested Python state in one safetensors file: nothing is pickled, so nothing is executed on loading."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from course_lib.errors import CheckpointError


def save(tree: Any, path: Path) -> None:
    """Write dicts, lists, tuples, numbers, strings, None and tensors; shared storage is written out.

    Raises:
        TypeError: the tree holds something else; the message says where.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_encode(tree, "", tensors))
    save_file(tensors or {"empty": torch.zeros(1)}, path, metadata={"structure": structure})


def load(path: Path) -> Any:
    """Read back what :func:`save` wrote; tensors are on the CPU.

    Raises:
        CheckpointError: the file is missing, cut short, or not such a file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads(file.metadata()["structure"])
            return _decode(structure, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})", "resume from another checkpoint") from None


def _encode(node: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for a node; a container is [kind, …] so that tuples and integer keys come back as they were."""
    if isinstance(node, torch.Tensor):
        name = where or "/"
        tensors[name] = node.detach().cpu().contiguous().clone()
        return ["tensor", name]
    if isinstance(node, dict):
        return ["dict", [[key, _encode(value, f"{where}/{key}", tensors)] for key, value in node.items()]]
    if isinstance(node, list | tuple):
        kind = "list" if isinstance(node, list) else "tuple"
        return [kind, [_encode(value, f"{where}/{i}", tensors) for i, value in enumerate(node)]]
    if node is None or isinstance(node, bool | int | float | str):
        return node
    raise TypeError(f"cannot store a {type(node).__name__} at {where or '/'}")


def _decode(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    kind, inner = node
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _decode(value, tensors) for key, value in inner}
    values = [_decode(value, tensors) for value in inner]
    return tuple(values) if kind == "tuple" else values
