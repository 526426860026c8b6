"""Today's names in torch, where an older torch has the same under a former name or in another form.

The code and the lessons use today's. Importing this module adds the functions that torch.distributed lacks, and refuses
a torch that is too old; what cannot be added by name is asked for here.
"""

import os
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from course_lib.missing_extra import require_torch

require_torch()

FORMER = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Functions of torch.distributed: since torch 2.13, where the former names are deprecated."""

for name, former in FORMER.items():
    if not hasattr(dist, name):
        setattr(dist, name, getattr(dist, former))


def current_accelerator() -> torch.device | None:
    """The kind of accelerator that is here; None for none, where torch raises until 2.7."""
    return torch.accelerator.current_accelerator() if torch.accelerator.device_count() else None


def connected_again(store: dist.Store, prefix: str) -> dist.Store:
    """A connection of one's own to a store, and a prefix, so that no call has to wait for one in another thread.

    Since torch 2.8 stores can be cloned. Before, their prefixes cannot be read; torchrun's is its count of restarts.

    Args:
        store: that all ranks have.
        prefix: of the keys.
    """
    if hasattr(store, "clone"):
        return dist.PrefixStore(prefix, store.clone())
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        seconds = store.timeout  # type: ignore[attr-defined]
        store = dist.TCPStore(store.host, store.port, is_master=False, timeout=seconds)
    return dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{prefix}", store)


def clear_caches(propagator: Any, redistributing: ModuleType) -> None:
    """Empty DTensor's caches, of which torch 2.6 has two; those in C++ and of plans came with 2.10.

    Args:
        propagator: of shardings, as DTensor's operator dispatcher has it.
        redistributing: ``torch.distributed.tensor._redistribute``.
    """
    shardings = propagator.propagate_op_sharding
    getattr(shardings, "cache", shardings).cache_clear()
    redistributing._gen_transform_infos.cache_clear()
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (redistributing, "clear_redistribute_planner_cache"),
    ):
        getattr(owner, name, int)()


def parameter_groups(state: Any) -> list[Any]:
    """FSDP2's groups of parameters of a module: since torch 2.12 several for each call of ``fully_shard``.

    Args:
        state: of the module, as ``fully_shard.state(module)`` gives it.
    """
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
