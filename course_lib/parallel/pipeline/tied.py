"""Weights that two stages share, such as an embedding that is the output head too."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from course_lib.parallel.absence import ABSENT, are_absent
from course_lib.parallel.sharded_gradient import held, put
from course_lib.parallel.sharding import local


def sum_shared_gradients(
    shared: Sequence[Mapping[int, str]],
    stages: Mapping[int, nn.Module],
    stage_ranks: Sequence[int],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Add up the gradients of each shared weight over the ranks that hold a copy; a collective call.

    To be called once before the optimizer's step. The sum is the same to the last bit everywhere, so that copies that
    began alike stay alike. Stages of one rank share the weight itself, and its gradient is complete among them.

    Args:
        shared: for each weight, its name in each stage that holds it.
        stages: of this rank, by number.
        stage_ranks: the rank of each stage; the table has it.
        group: whose ranks these are. Over NCCL all of them have used it before, as those of
            :class:`~course_lib.parallel.topology.RankGrid` have: here its holders alone send.
    """
    rank = dist.get_rank(group)
    for names in shared:
        holders = sorted({stage_ranks[stage] for stage in names})
        if rank not in holders:
            continue
        # Of several stages here any will do: they share the weight, and its gradient.
        stage = next(stage for stage in names if stage_ranks[stage] == rank)
        weight = stages[stage].get_parameter(names[stage])
        # Whole on this rank, also where ZeRO-1 shows the gradient of all ranks; or, of what `fully_shard` split, the
        # rows that all holders have. One whose loss did not reach it sends what says so: the others wait for its part.
        mine = held(weight)
        own = torch.full_like(local(weight), ABSENT) if mine is None else local(mine).contiguous() + 0.0
        parts = {peer: own if peer == rank else torch.empty_like(own) for peer in holders}
        # --- every holder sends to every other: there are two of them, or few, and no group of theirs is needed ---
        exchange = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for peer in holders
            if peer != rank
            for operation, tensor in ((dist.isend, own), (dist.irecv, parts[peer]))
        ]
        for work in dist.batch_isend_irecv(exchange) if exchange else ():
            work.wait()
        # --- add in the order of the ranks, the same everywhere: in another order the last bits would differ, and the
        # copies drift apart. holders times (…) -> (…). What no loss reached has no gradient. ---
        total = functools.reduce(torch.add, [parts[peer].detach() for peer in holders])
        put(weight, None if mine is None and are_absent([total])[0] else _as_split(total, weight))


def _as_split(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight from this rank's part of it."""
    if not isinstance(weight, DTensor):
        return part
    laid_out: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride(), "run_check": False}
    return DTensor.from_local(part, weight.device_mesh, weight.placements, **laid_out)
