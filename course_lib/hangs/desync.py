"""Do ranks that should agree agree? One all-gather of 16 bytes a topic where they do; the difference where they don't.

What ranks say of a topic travels only once their digests differ, and a parameter only once it is known which one.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from course_lib.errors import DesyncError

CHUNK = 2**18
"""Elements that are hashed at once, which bounds the memory that a full comparison takes."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of an element's size, in bytes; an element of 8 or more is looked at as int64."""

Facts = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Topic:
    """Topic that ranks have to agree on, as one rank sees it.

    Attributes:
        digest: a signed 64-bit number; equal where ranks agree.
        facts: what stands behind the digest, in words, by name; asked for only where digests differ.
        cure: what to do about a difference, for the message.
        part: only ranks of the same part have to agree.
    """

    digest: int
    facts: Callable[[], Facts]
    cure: str
    part: int = 0

    def told(self, ranks: "GatheringRanks", odd: Sequence[int]) -> str:
        """The difference between the ranks ``odd`` of one part, which disagree, in words; a collective call."""
        facts = ranks.gather(self.facts())
        if name := _first_difference([facts[rank] for rank in odd]):
            return f"{name} is {ranks.by_value({rank: facts[rank].get(name, 'absent') for rank in odd})}"
        return f"the order is {ranks.by_value({rank: ', '.join(facts[rank]) for rank in odd})}"


def topic(facts: Facts, cure: str, part: int = 0) -> Topic:
    """A topic whose facts are at hand."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return Topic(digest=int.from_bytes(digest[:8], "little", signed=True), facts=lambda: facts, cure=cure, part=part)


@dataclass(frozen=True, kw_only=True)
class Replicas(Topic):
    """Tensors that every rank of a part holds alike; the facts are a digest of each. See :func:`replicas`."""

    tensors: Mapping[str, Tensor]

    def told(self, ranks: "GatheringRanks", odd: Sequence[int]) -> str:
        """The first tensor that differs, on which ranks, and how far from what most ranks hold."""
        facts = ranks.gather(self.facts())
        name = _first_difference([facts[rank] for rank in odd])
        digests = {rank: facts[rank][name] for rank in odd}
        usual = Counter(digests.values()).most_common(1)[0][0]  # of two, that of the lower rank
        right = [rank for rank in odd if digests[rank] == usual]
        wrong = [rank for rank in odd if digests[rank] != usual]
        differing = sum(len({facts[rank][other] for rank in odd}) > 1 for other in facts[right[0]])
        apart = self._distances(ranks, name, right[0])
        return (
            f"`{name}` of {ranks.named(wrong)} is not that of {ranks.named(right)}, "
            f"by up to {max(apart[rank] for rank in wrong):.3g} "
            f"({differing} of {len(facts[right[0]])} tensors differ)"
        )

    def _distances(self, ranks: "GatheringRanks", name: str, reference: int) -> list[float]:
        """Each rank's largest distance of an element from the reference's; 0 on a rank that has no such tensor."""
        mine = local(self.tensors[name]) if name in self.tensors else None
        shape, dtype = ranks.gather(None if mine is None else (mine.shape, mine.dtype))[reference]
        theirs = torch.empty(shape, dtype=dtype, device=ranks.device)
        if ranks.own == reference and mine is not None:
            theirs.copy_(mine)
        dist.broadcast(theirs, group=ranks.group, group_src=reference)
        apart = 0.0
        if mine is not None and mine.shape == theirs.shape:
            apart = (mine.double() - theirs.double()).abs().max().item()
        return ranks.gather(apart)


def replicas(
    tensors: Mapping[str, Tensor], cure: str, part: int = 0, elements: int | None = None, offset: int = 0
) -> Replicas:
    """Parameters, or other tensors, that every rank of a part should hold alike, as a topic.

    Args:
        tensors: by name, in the same order on all these ranks; of a DTensor the local one counts.
        cure: what to do about a difference.
        part: only ranks of the same part have to agree.
        elements: of each tensor that are looked at, at least, where it has as many; None for all.
        offset: shifts the elements looked at, so that the next comparison sees others; the same on every rank.
    """

    def looked_at(tensor: Tensor) -> list[Tensor]:
        flat = local(tensor).reshape(-1)
        if elements is None:
            return list(flat.split(CHUNK))
        stride = max(1, flat.numel() // elements)
        return [flat[offset % stride :: stride]]

    def facts() -> Facts:
        return {name: str(digest_of(looked_at(tensor))) for name, tensor in tensors.items()}

    whole = digest_of([chunk for tensor in tensors.values() for chunk in looked_at(tensor)])
    return Replicas(digest=whole, facts=facts, cure=cure, part=part, tensors=tensors)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest_of(chunks: Sequence[Tensor]) -> int:
    """A signed 64-bit digest of the bits of 1-D tensors and their order, the same on every kind of device.

    Integers that wrap add up to the same number in any order; each counts with an odd factor of its own, so that no
    change of a single element goes unseen.
    """
    total, small = 0, dict[int, list[Tensor]]()
    for chunk in chunks:
        if len(chunk) < CHUNK:
            small.setdefault(chunk.element_size(), []).append(_bits(chunk))
        else:
            total = total * 31 + _weighted(_bits(chunk))
    for alike in small.values():  # together, for each operator has its fixed cost
        total = total * 31 + _weighted(torch.cat(alike))
    return (total + 2**63) % 2**64 - 2**63


def _bits(chunk: Tensor) -> Tensor:
    return chunk.contiguous().view(INTEGERS.get(chunk.element_size(), torch.int64))


def _weighted(bits: Tensor) -> int:
    factors = torch.arange(1, 2 * len(bits) + 1, 2, device=bits.device)
    return int((bits.long() * factors).sum())


class GatheringRanks:
    """The ranks of a comparison, by their number in the group, and how a message calls them.

    Args:
        group: all ranks by default.
        device: that the group's collectives take tensors of.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None):
        self.device, self.group = device, group
        self.own, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """A plain value of every rank."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def named(self, ranks: Sequence[int]) -> str:
        """``rank 1``, or ``ranks 0, 2``; of many the first four."""
        known = [rank if self.group is None else dist.get_global_rank(self.group, rank) for rank in ranks]
        more = f" and {len(known) - 4} more" if len(known) > 4 else ""
        return f"rank{'s' if len(known) > 1 else ''} {', '.join(map(str, known[:4]))}{more}"

    def by_value(self, values: Mapping[int, str]) -> str:
        """``0.001 on ranks 0, 2 and 0.002 on rank 1``."""
        ranks: dict[str, list[int]] = {}
        for rank, value in values.items():
            ranks.setdefault(value, []).append(rank)
        return " and ".join(f"{value} on {self.named(holders)}" for value, holders in ranks.items())


def compare(topics: Sequence[Topic], when: str, ranks: GatheringRanks) -> None:
    """Raise where ranks that should agree do not; a collective call.

    Args:
        topics: in the order in which they are looked at; as many on every rank.
        when: for the message, for example ``after step 100``.
        ranks: that are compared.
    Raises:
        DesyncError: on every rank, with the first thing that differs, and each rank's value.
    """
    mine = torch.tensor([[topic.part, topic.digest] for topic in topics], device=ranks.device)
    rows = [torch.empty_like(mine) for _ in range(ranks.count)]
    dist.all_gather(rows, mine, group=ranks.group)
    parts, digests = torch.stack(rows).permute(2, 1, 0).tolist()  # [part or digest, topic, rank]
    for i, topic in enumerate(topics):
        if odd := _disagreeing(parts[i], digests[i]):
            raise DesyncError(f"ranks disagree {when}: {topic.told(ranks, odd)}", topic.cure)


def _disagreeing(parts: list[int], digests: list[int]) -> list[int]:
    """The ranks of the first part that is not of one mind."""
    for part in dict.fromkeys(parts):
        ranks = [rank for rank, theirs in enumerate(parts) if theirs == part]
        if len({digests[rank] for rank in ranks}) > 1:
            return ranks
    return []


def _first_difference(facts: Sequence[Facts]) -> str:
    """The first name whose value is not the same in all of them; empty where only the order of the names differs."""
    names = dict.fromkeys(name for own in facts for name in own)
    return next((name for name in names if len({own.get(name) for own in facts}) > 1), "")
