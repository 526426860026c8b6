"""The way of tokens to their experts and back, where the experts are spread over ranks.

Expert parallelism gives each of N ranks an N-th of the experts, in order. A token is copied once per expert that it
chose; the copies are put in the order of the experts, which is that of the ranks, and one all-to-all takes them there.
How many go to whom is up to the router: the all-to-all is uneven, and the ranks first tell each other their counts::

    rank 0    tokens a b c    choose experts 1 3 0     in order  c a | b    rank 0 has experts 0 1, rank 1 has 2 3
    rank 1    tokens d e f    choose experts 0 0 1     in order  d e f |    rank 0 then works on c a d e f: it is late

The outputs come back by the same all-to-all with both counts exchanged, and so do the gradients.

Sources: Lepikhin et al., "GShard" (arXiv 2006.16668), section 3, with a capacity; Gale et al., "MegaBlocks" (arXiv
2211.15841), without one.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.tp_collectives import Group


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; backward is the same with what is sent and what is received exchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _moved(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        return _moved(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _moved(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    moved = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(moved, rows.contiguous(), received, sent, group=group)
    return moved


@dataclass(frozen=True)
class Dispatch:
    """Destination of each copy of a token; made by :func:`plan`.

    Attributes:
        kept: (copies,) int64, the copies that go anywhere, in the order of their experts: index // tokens is the
            choice of which it is, index % tokens the token.
        sent: copies to each rank.
        received: copies from each rank.
        order: (sum of received,) int64: where in what arrives, sorted by rank, the copies are in the order of experts.
        per_expert: copies that each of this rank's experts gets, from all ranks.
        dropped: this rank's copies for which their expert had no room.
    """

    tokens: int
    kept: Tensor
    sent: list[int]
    received: list[int]
    order: Tensor
    per_expert: list[int]
    dropped: int
    group: Group

    @property
    def away(self) -> int:
        """Copies that this rank sends to others, and outputs that it sends back to them."""
        own = dist.get_rank(self.group)
        return sum(self.sent) - self.sent[own] + sum(self.received) - self.received[own]

    def to_experts(self, tokens: Tensor) -> Tensor:
        """(tokens, width) of this rank -> (copies, width) for its experts, one expert after the other."""
        copies = tokens.index_select(0, self.kept % self.tokens)
        return _AllToAll.apply(copies, self.sent, self.received, self.group).index_select(0, self.order)

    def to_tokens(self, outputs: Tensor, weights: Tensor) -> Tensor:
        """The experts' outputs back at their tokens, weighted and summed.

        Args:
            outputs: (copies, width), as :meth:`to_experts` gave the inputs.
            weights: (tokens, k), the router's, of this rank's tokens.
        Returns:
            (tokens, width) of ``outputs``' dtype; 0 for a token of which no copy was kept.
        """
        home = _AllToAll.apply(outputs.index_select(0, self.order.argsort()), self.received, self.sent, self.group)
        home = home * weights.T.flatten().index_select(0, self.kept)[:, None]
        result = outputs.new_zeros(self.tokens, outputs.shape[1])
        return result.index_add(0, self.kept % self.tokens, home.to(outputs.dtype))


def plan(chosen: Tensor, experts: int, capacity_factor: float | None = None, group: Group = None) -> Dispatch:
    """Find out what goes where; the ranks tell each other their counts, and the host waits for them.

    Args:
        chosen: (tokens, k) int64, as in ``Routing.experts``.
        experts: on all ranks together; a multiple of the ranks.
        capacity_factor: None drops nothing. Else an expert takes at most :func:`capacity` copies from each rank: first
            choices before second ones, and early tokens before late ones; the others are dropped.
        group: whose ranks share the experts.
    """
    ranks, (tokens, k) = dist.get_world_size(group), chosen.shape
    order = chosen.T.flatten().argsort(stable=True)  # first choices before second ones, within an expert
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    if capacity_factor is not None:
        room = capacity(tokens, k, experts, capacity_factor)
        first = (counts.cumsum(0) - counts).repeat_interleave(counts)
        order = order[torch.arange(tokens * k, device=order.device) - first < room]
        counts = counts.clamp(max=room)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)  # (experts,) -> (ranks × own experts,), from each rank
    here = arriving.view(ranks, -1)
    # What arrives is in the order of ranks, and within it of experts: (ranks, own experts) -> by expert, then by rank.
    expert_of = torch.arange(here.numel(), device=here.device).remainder(here.shape[1]).repeat_interleave(arriving)
    sent, received, per_expert = counts.view(ranks, -1).sum(1), here.sum(1), here.sum(0)
    return Dispatch(
        tokens,
        order,
        sent.tolist(),
        received.tolist(),
        expert_of.argsort(stable=True),
        per_expert.tolist(),
        tokens * k - len(order),
        group,
    )


def capacity(tokens: int, k: int, experts: int, factor: float) -> int:
    """Copies that an expert takes from a rank: ``factor`` times what an even router would send it, rounded up."""
    return math.ceil(factor * tokens * k / experts)


def bytes_sent(copies: int, ranks: int, experts: int, width: int, itemsize: int, backward: bool = False) -> int:
    """Bytes that a rank sends in one forward, or one backward, of one layer.

    Each of its copies that goes to another rank, and each output that it owes another rank; backward their gradients,
    as many. In the forward the counts go first, in int64.

    Args:
        copies: :attr:`Dispatch.away`; with an even router 2 (N - 1) / N times what the rank's tokens have.
        ranks: N.
        experts: on all ranks together.
        width: of a token.
        itemsize: bytes of a number of a token.
        backward: count a backward, not a forward.
    """
    return copies * width * itemsize + (0 if backward else (ranks - 1) * experts // ranks * 8)
