"""Keeps process groups that have ended until it is safe to free them.

Where ``DistributedDataParallel`` outlives ``destroy_process_group()``, as a function's variable does, it holds the last
reference to its group. It is freed with the GIL held, and the group with it, which joins gloo's threads; one of these
may be waiting for the GIL, to let go of a tensor of the last collective. Neither ends (torch 2.13; pytorch/pytorch,
issue 56297). A reference of Python's own is dropped without the GIL.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_kept: dict[int, list[dist.ProcessGroup]] = {}
"""By process, the groups that were there when some were destroyed last. A fork frees none of its parent's: it has not
their threads."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keep the groups that are destroyed in the block, until the next are or the process ends."""
    groups = list(distributed_c10d._world.pg_map)
    yield
    _kept[os.getpid()] = groups


def keep_destroyed_groups() -> None:
    """Have ``torch.distributed.destroy_process_group`` keep what it destroys, in this process."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        with kept():
            destroy(group)

    dist.destroy_process_group = destroy_process_group
