"""Shards of flattened tensors: what ZeRO and FSDP leave on one rank, and how the whole comes back.

A split parameter is flattened, and a rank holds one run of its elements. That is all that a
checkpoint or another number of ranks has to know.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from course_lib import torch_names  # noqa: F401
from course_lib.errors import ConfigError
from course_lib.parallel.groups import device_of

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of an element looks at that element alone, so that a shard is updated as the whole is."""


ROOM = 2**26
"""Bytes that the first rank gathers at once, the chunks of all ranks together, see :func:`gather_whole`."""


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's part of a tensor that is split over a group.

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
    """Place of a parameter in one rank's run of a flat buffer.

    Args:
        start: first element of the parameter in the buffer.
        numel: elements of the parameter.
        first: first element of the rank's run in the buffer.
        length: elements of the run.
    Returns:
        The first element within the parameter, and how many; ``(0, 0)`` where they don't meet.
    """
    low, high = max(start, first), min(start + numel, first + length)  # both are runs: so is what they share
    return (low - start, high - low) if high > low else (0, 0)


def check_elementwise(optimizer: Optimizer, strategy: str) -> None:
    """Refuse an optimizer that has to see whole matrices, or that has made steps already.

    Raises:
        ConfigError: with the optimizer's name and those that can be sharded.
    """
    if any(torch.as_tensor(state.get("step", 0)).item() > 0 for state in optimizer.state.values()):
        raise ConfigError(
            f"{strategy} was given an optimizer that has made steps, and its state is of whole tensors",
            "wrap the model before the first step",
        )
    if not isinstance(optimizer, ELEMENTWISE):
        raise ConfigError(
            f"{strategy} cannot shard {type(optimizer).__name__}: its update of an element needs others",
            f"use one of {', '.join(kind.__name__ for kind in ELEMENTWISE)}, or strategy ddp",
        )


def repoint(optimizer: Optimizer, replacement: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Let an optimizer update other tensors, with the same groups, options and order; in place.

    Schedulers that hold the optimizer keep working.

    Args:
        optimizer: has made no step yet.
        replacement: for each of its parameters the tensor to update in its place; None to drop it.
    Raises:
        ConfigError: it has a parameter that is none of the module's.
    """
    # In place, group by group: a scheduler holds this optimizer and the order of its groups. States are made in the
    # first step, for the tensors that are there then; Adagrad's, made with it, are of one number each before that.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in replacement:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the module has not",
                    "make it a parameter of the module, or give it an optimizer of its own",
                )
    for parameter, state in list(optimizer.state.items()):
        own = replacement[parameter]
        del optimizer.state[parameter]
        if own is not None:
            optimizer.state[own] = {
                name: _of_one_number(value, own) if name != "step" else value for name, value in state.items()
            }
    for group in optimizer.param_groups:
        chosen = [replacement[parameter] for parameter in group["params"]]
        group["params"] = [tensor for tensor in chosen if tensor is not None]


def _of_one_number(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A state that nothing was added to yet, for another tensor: all its elements are alike."""
    return torch.full_like(like.detach(), value.flatten()[0].item() if value.numel() else 0.0)


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """First name of each parameter; a tied one has the name under which it comes first."""
    return {parameter: name for name, parameter in module.named_parameters()}


# --- a whole tensor from all ranks' shards, in a bounded amount of memory ---


class _Place(NamedTuple):
    """Place of a rank's part in a tensor, without the data."""

    start: int
    numel: int
    dtype: torch.dtype


class _StreamPart(NamedTuple):
    """Place of a shard in the stream of bytes that a rank sends."""

    name: str
    at: int
    """First byte in the stream."""
    first: int
    """First byte in the whole tensor."""
    length: int


def gather_whole(shards: Mapping[str, Shard], group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors from the shards of all ranks; a collective call.

    The shards of a rank are one stream of bytes, and the first rank gathers the streams chunk by chunk. So it needs
    at most ``ROOM`` beside the result, however large the model is and whether its shards are on GPUs or on the host,
    and only the group's own communicator: for messages from rank to rank NCCL would open one more for each pair, and
    keep it.

    Args:
        shards: this rank's, the same names in the same order on every rank.
        group: the ranks that hold shards; None: all ranks.
    Returns:
        On the group's first rank, tensors on the CPU by name; elsewhere nothing.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)

    # --- phase 1: everybody learns what everybody holds. Numbers only: from these each rank knows all streams ---
    places: list[list[_Place]] = [[] for _ in range(world)]
    dist.all_gather_object(
        places, [_Place(shard.start, shard.data.numel(), shard.data.dtype) for shard in shards.values()], group=group
    )

    # --- phase 2: the first rank makes room, and copies what it has itself ---
    whole: dict[str, torch.Tensor] = {}
    if rank == 0:
        for (name, shard), held in zip(shards.items(), zip(*places, strict=True), strict=True):
            # Of a rank that holds some of it: the dtype of an empty shard need not be right.
            dtype = next((place.dtype for place in held if place.numel), shard.data.dtype)
            whole[name] = torch.empty(shard.shape, dtype=dtype)
            shard.of(whole[name]).copy_(shard.data.detach())

    # --- phase 3: the streams of all other ranks, a chunk of each at a time. All ranks take part in all gathers, until
    # the longest stream is through. ---
    streams = _streams(list(shards), places)
    longest = max(sum(part.length for part in stream) for stream in streams)
    chunk = max(1, min(ROOM // world, longest))  # bytes
    sent = torch.empty(chunk, dtype=torch.uint8, device=device_of(group))
    received = [torch.empty_like(sent) for _ in range(world)] if rank == 0 else None
    for start in range(0, longest, chunk):
        for part, skipped, at, length in _parts_within(streams[rank], start, chunk):
            # As bytes, whatever the dtypes: (numel,) -> (numel * itemsize,) uint8. So one message takes all dtypes.
            shard_bytes = shards[part.name].data.detach().contiguous().view(torch.uint8)
            sent[at : at + length].copy_(shard_bytes[skipped : skipped + length])
        dist.gather(sent, received, group=group, group_dst=0)  # (chunk,) on each -> N of (chunk,) on the first
        for source, gathered in enumerate(received or ()):
            arrived = gathered.cpu() if streams[source] else gathered
            for part, skipped, at, length in _parts_within(streams[source], start, chunk):
                target = whole[part.name].view(-1).view(torch.uint8)[part.first + skipped :]
                target[:length].copy_(arrived[at : at + length])
    return whole


def _streams(names: Sequence[str], places: Sequence[Sequence[_Place]]) -> list[list[_StreamPart]]:
    """What each rank has to send: of its shards those that no rank before it has, the first rank's included."""
    streams: list[list[_StreamPart]] = [[] for _ in places]
    ends = [0] * len(places)
    for name, held in zip(names, zip(*places, strict=True), strict=True):
        for rank, place in enumerate(held):
            # What is whole on every rank (a frozen parameter) is sent by none: the first rank has it.
            if rank and place.numel and place not in held[:rank]:
                size = place.dtype.itemsize
                streams[rank].append(_StreamPart(name, ends[rank], place.start * size, place.numel * size))
                ends[rank] += place.numel * size
    return streams


def _parts_within(
    stream: Sequence[_StreamPart],
    start: int,
    length: int,
) -> Iterator[tuple[_StreamPart, int, int, int]]:
    """What of a stream lies in the ``length`` bytes from ``start``.

    Yields:
        A part; how many of its bytes come before; where in the window the others begin; how many of them are in it.
    """
    first = bisect.bisect_right(stream, start, key=lambda part: part.at) - 1  # the part that ``start`` is in
    for part in stream[max(0, first) :]:
        skipped = max(0, start - part.at)
        at = part.at + skipped - start
        if at >= length:
            return
        if skipped < part.length:
            yield part, skipped, at, min(part.length - skipped, length - at)


def scatter_whole(whole: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
    """Copy each rank's run of whole tensors into its shards; no communication."""
    with torch.no_grad():
        for name, shard in shards.items():
            shard.data.copy_(shard.of(whole[name]))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a ``DTensor``; of another tensor, all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
