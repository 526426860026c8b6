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
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _is_dataclass(leaf):
            tensors += tensors_of([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return tensors


def _of_leaf(function: Callable[[Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if not _is_dataclass(leaf):
        return leaf
    same = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        # Frozen ones, too: this is a new object that nobody has seen.
        object.__setattr__(same, field.name, map_tensors(function, getattr(leaf, field.name)))
    return same


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
