"""Shards of tensor-parallel layers as runs of the whole tensors that a checkpoint stores, and back.

A matrix that is divided by columns leaves a rank many short runs of the whole. A checkpoint knows nothing of that: the
ranks that share a matrix put it together, one tensor at a time, and each stores an equal run of it. To read, a rank
takes from the files the one run that all of its own lie in. So any layout reads what any other has written.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from course_lib.parallel.sharding import Shard
from course_lib.parallel.tensor_parallel import ParameterSplit


def places(split: ParameterSplit, shape: torch.Size, ranks: int, rank: int, start: int, length: int) -> torch.Tensor:
    """Places of a run of a rank's flattened shard in the flattened whole; int64 [length], rising.

    Args:
        split: how the whole is divided.
        shape: of the whole.
        ranks: that share it.
        rank: whose shard.
        start: first element of the run, in the shard.
        length: of the run.
    """
    # The whole is blocks of the same size, dealt out to the ranks by turns.
    block = shape[split.dim] // split.fused // ranks * shape[split.dim + 1 :].numel()
    index = torch.arange(start, start + length)
    return (index // block * ranks + rank) * block + index % block


def as_runs(
    own: Mapping[str, Shard],
    split_of: Callable[[str], tuple[ParameterSplit, torch.Size] | None],
    tensor_group: dist.ProcessGroup,
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Shard]:
    """A rank's shards, with an equal run of the whole in place of each shard of a shared layer; a collective call.

    Args:
        own: shards by name, of which no two ranks of ``group`` hold the same element.
        split_of: how a tensor of that name is divided, and the shape of the whole; None where it is not.
        tensor_group: the ranks that share layers.
        group: the ranks that hold a whole tensor among them; ``tensor_group``, or more where those divide their shards.
        device: to put together on.
    """
    kept = {name: shard for name, shard in own.items() if split_of(name) is None}
    described: list[dict[str, torch.dtype]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(
        described, {name: shard.data.dtype for name, shard in own.items() if name not in kept}, group=group
    )
    dtypes = {name: dtype for of_rank in described for name, dtype in of_rank.items()}  # a rank may hold nothing of one
    for name in sorted(dtypes):
        split_and_shape = split_of(name)
        assert split_and_shape is not None
        split, shape = split_and_shape
        whole = torch.zeros(shape.numel(), dtype=dtypes[name], device=device)
        if name in own:
            shard = own[name]
            index = places(
                split,
                shape,
                dist.get_world_size(tensor_group),
                dist.get_rank(tensor_group),
                shard.start,
                shard.data.numel(),
            )
            whole[index.to(device)] = shard.data.detach().to(device)
        dist.all_reduce(whole.view(torch.uint8), group=group)  # of bytes: each has one rank that is not zero
        length = -(-whole.numel() // dist.get_world_size(group))
        start = min(dist.get_rank(group) * length, whole.numel())
        kept[name] = Shard(shape, start, whole[start : start + length].clone())
    return kept


def enclosing(
    split: ParameterSplit, shape: torch.Size, ranks: int, rank: int, shard: Shard
) -> tuple[Shard, torch.Tensor]:
    """Room on the CPU for the shortest run of the whole that a shard lies in, and each element's place in that run."""
    index = places(split, shape, ranks, rank, shard.start, shard.data.numel())
    first, end = (int(index[0]), int(index[-1]) + 1) if len(index) else (0, 0)
    return Shard(shape, first, torch.empty(end - first, dtype=shard.data.dtype)), index - first
