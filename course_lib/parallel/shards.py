"""Pieces of flattened tensors: what ZeRO and FSDP leave on one rank, and how the whole comes back.

A split parameter is flattened, and a rank holds one run of its elements. That is all that a
checkpoint or another number of ranks has to know.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from course_lib.errors import ConfigError

ELEMENTWISE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta,
               torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
               torch.optim.ASGD)
"""Optimizers whose update of an element looks at that element alone, so that a piece is updated as the whole is."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank holds of a tensor that is split over a group.

    Attributes:
        shape: shape of the whole tensor.
        start: first of its flattened elements held here.
        data: 1-D, the elements held here, in order; may be empty.
    """

    shape: torch.Size
    start: int
    data: torch.Tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same run of elements of a whole tensor, 1-D."""
        return whole.reshape(-1)[self.start : self.start + self.data.numel()]


def padded(numel: int, parts: int) -> int:
    """The least multiple of ``parts`` that holds ``numel`` elements."""
    return -(-numel // parts) * parts


def overlap(start: int, numel: int, first: int, length: int) -> tuple[int, int]:
    """Where a parameter lies in one rank's run of a flat buffer.

    Args:
        start: first element of the parameter in the buffer.
        numel: elements of the parameter.
        first: first element of the rank's run in the buffer.
        length: elements of the run.
    Returns:
        The first element within the parameter, and how many; ``(0, 0)`` where they don't meet.
    """
    low, high = max(start, first), min(start + numel, first + length)
    return (low - start, high - low) if high > low else (0, 0)


def check_elementwise(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that has to see whole matrices.

    Raises:
        ConfigError: with the optimizer's name and those that can be sharded.
    """
    if not isinstance(optimizer, ELEMENTWISE):
        raise ConfigError(f"{strategy} cannot shard {type(optimizer).__name__}: its update of an element needs others",
                          f"use one of {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or strategy ddp")


def repoint(optimizer: Optimizer, replacement: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Let an optimizer update other tensors, with the same groups, options and order; in place.

    Schedulers that hold the optimizer keep working.

    Args:
        optimizer: has made no step yet.
        replacement: for each of its parameters the tensor to update in its place; None to drop it.
    """
    assert not optimizer.state, "repoint an optimizer before its first step"
    for group in optimizer.param_groups:
        chosen = [replacement[parameter] for parameter in group["params"]]
        group["params"] = [tensor for tensor in chosen if tensor is not None]


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """First name of each parameter; a tied one has the name under which it comes first."""
    return {parameter: name for name, parameter in module.named_parameters()}


def gather_whole(pieces: Mapping[str, Piece], group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks; a collective call.

    Args:
        pieces: this rank's, the same names in the same order on every rank.
    Returns:
        On the group's first rank, tensors on the CPU by name; elsewhere nothing.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    places: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    dist.all_gather_object(places, [(piece.start, piece.data.numel()) for piece in pieces.values()], group=group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    whole: dict[str, torch.Tensor] = {}
    for i, (name, piece) in enumerate(pieces.items()):
        mine = piece.data.detach().contiguous()
        if rank != 0:
            if mine.numel() and not _same_on_all([ranks[i] for ranks in places], piece):
                dist.send(mine, dst=first, group=group)
            continue
        full = torch.empty(piece.shape.numel(), dtype=mine.dtype, device=mine.device)
        piece.of(full).copy_(mine)
        if not _same_on_all([ranks[i] for ranks in places], piece):
            for source in range(1, world):
                start, length = places[source][i]
                if length:
                    sender = dist.get_global_rank(group, source) if group is not None else source
                    dist.recv(full[start : start + length], src=sender, group=group)
        whole[name] = full.view(piece.shape).cpu()
    return whole


def _same_on_all(places: list[tuple[int, int]], piece: Piece) -> bool:
    """Whether every rank holds the whole, so that nothing has to be sent."""
    return all(place == (0, piece.shape.numel()) for place in places)


def scatter_whole(whole: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> None:
    """Copy each rank's run of whole tensors into its pieces; no communication."""
    with torch.no_grad():
        for name, piece in pieces.items():
            piece.data.copy_(piece.of(whole[name]))
