"""Records of a communication backend: its own list of calls, and whether one of them has failed."""

import json
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

RECORDERS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""Functions of ``torch._C._distributed_c10d``. The first is in builds with NCCL alone and gives NCCL's records, which
torch makes by default. The second is in every build since torch 2.8 and gives those of gloo, which leave out sends and
receives and are made where TORCH_FR_BUFFER_SIZE is set before the group is made (torch 2.13)."""


def backend_records() -> Any:
    """Records of the backends' own flight recorders, by torch's JSON; None where they record nothing.

    Where both NCCL and gloo have records they are NCCL's, with gloo's under ``gloo``.
    """
    from torch._C import _distributed_c10d

    by_backend = []
    for name in RECORDERS:
        if dump := getattr(_distributed_c10d, name, None):
            records = json.loads(dump(True, False))  # with the calls, and not only those under way
            if records.get("entries") and records not in by_backend:
                by_backend.append(records)
    return {**by_backend[0], **({"gloo": by_backend[1]} if by_backend[1:] else {})} if by_backend else None


def backend_error(groups: Iterable[Any] | None = None) -> str | None:
    """Error that a backend reports of one of this process's groups; None where there is none, or it cannot say.

    NCCL says ``TIMEOUT``, ``COMM_ERROR`` (such as a lost connection) or ``REMOTE_ERROR`` (ProcessGroupNCCL.cpp,
    Watchdog::runLoop), as long before it ends the process as :mod:`~course_lib.hangs.watchdog` tells. Never waits.

    Args:
        groups: all of the process by default.
    """
    for group in list(dist.distributed_c10d._world.pg_map) if groups is None else groups:
        for device in group._device_types:
            get_error = getattr(group._get_backend(device), "get_error", None) if device.type == "cuda" else None
            error = get_error() if get_error else None
            if error is not None and error.name != "SUCCESS":
                return error.name
    return None
