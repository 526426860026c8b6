"""Tensors within what modules give each other: tuples, lists, dicts, transformers' outputs, and plain dataclasses.

torch's pytree looks into all of them but the last, unless a dataclass was registered there.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The tree with each tensor replaced by what ``function`` makes of it; dataclasses are copied, not built anew."""
    return tree_map(lambda leaf: _of_leaf(function, leaf), tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in the order of :func:`map_tensors`."""
    return [tensor for leaf in tree_leaves(tree) for tensor in _within(leaf)]


def _within(leaf: Any) -> list[Tensor]:
    return [leaf] if isinstance(leaf, Tensor) else tensors_of(_values(leaf)) if _is_dataclass(leaf) else []


def _of_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    return function(leaf) if isinstance(leaf, Tensor) else _copied(function, leaf) if _is_dataclass(leaf) else leaf


def _copied(function: Callable[[Tensor], Any], instance: Any) -> Any:
    same = copy.copy(instance)
    for field in dataclasses.fields(instance):
        # Frozen ones, too: this is a new object that nobody has seen.
        object.__setattr__(same, field.name, map_tensors(function, getattr(instance, field.name)))
    return same


def _values(instance: Any) -> list[Any]:
    return [getattr(instance, field.name) for field in dataclasses.fields(instance)]


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
