"""Ring attention: the keys and values travel round the ranks, each of which keeps its own queries.

Every rank holds some tokens of each sequence. Step by step the block of keys and values of another rank comes by; the
rank attends to it, and merges what it finds into what it has, by the sums of the exponentials (the online softmax), so
that the result is exact. In the forward no rank sends from and into more than two blocks at a time, whatever
their number, in the backward six, those of gradients among them::

    step 0         step 1         step 2            rank r has its own block first, then that of rank r - 1, …
    q0 with kv0    q0 with kv2    q0 with kv1       while it computes with one, the next is on its way
    q1 with kv1    q1 with kv0    q1 with kv2
    q2 with kv2    q2 with kv1    q2 with kv0

Backward goes round once more. The gradient of a block's keys and values travels one step behind the block: each rank
adds its share, and after N steps it is at home, whole.

What a rank does with one block is :mod:`course_lib.parallel.block_attention`.

Source: Liu et al., "Ring Attention with Blockwise Transformers" (arXiv 2310.01889), section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.parallel.block_attention import Block, PartialAttention, PartialGradients
from course_lib.parallel.sequence_layout import SequenceLayout

Group = dist.ProcessGroup | None
NOWHERE = -1
"""Document of a padding token: nobody attends to it, and it attends to nobody."""


@dataclass(frozen=True)
class Sight:
    """Keys that a query may see.

    Attributes:
        layout: where each rank's tokens are.
        causal: none after itself.
        documents: by rank (rows, tokens) int64, equal within a document and NOWHERE for padding: none of another one.
            None: all tokens are of one document.
    """

    layout: SequenceLayout
    causal: bool
    documents: tuple[Tensor, ...] | None = None

    def blocks(self, rank: int, owner: int) -> Iterator[tuple[slice, slice, Block]]:
        """The pairs of chunks, a rank's queries and an owner's keys, that see each other at all.

        Yields:
            queries, keys: where they are in what the two ranks hold.
            block: what these queries see of these keys.
        """
        size = self.layout.chunk
        for i, query in enumerate(self.layout.starts(rank)):
            for j, key in enumerate(self.layout.starts(owner)):
                if self.causal and key > query:
                    continue  # all of these keys come after all of these queries: not masked, but left out
                queries, keys = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                yield queries, keys, Block(self.causal and key == query, self._same(rank, owner, queries, keys))

    def _same(self, rank: int, owner: int, queries: slice, keys: slice) -> Tensor | None:
        """(rows, 1, 1, queries, keys) bool, whether both are of one document; None where all are."""
        if self.documents is None:
            return None
        of_query, of_key = self.documents[rank][:, queries, None], self.documents[owner][:, None, keys]
        return ((of_query == of_key) & (of_query != NOWHERE))[:, None, None]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group = None, scale: float | None = None
) -> Tensor:
    """Attention of this rank's queries to all ranks' keys and values; with its own backward.

    Sends, of blocks of 2 x key's bytes, N - 1 in the forward and N - 1 in the backward, and in the backward N blocks of
    gradients in float32 (float64 for float64 inputs).

    Args:
        query: (rows, heads, tokens, width), this rank's tokens in the layout's order.
        key: (rows, key heads, tokens, width); the heads are a multiple of the key heads, as in grouped queries.
        value: as ``key``.
        sight: the same on every rank, except for documents.
        group: whose ranks hold the sequence.
        scale: of the scores; 1 / sqrt(width) by default.
    Returns:
        As ``query``; 0 where a query sees no key.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query, key, value, sight, group, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sight: Sight, group: Group, scale: float
    ) -> Tensor:
        ring, attention = Ring(group), PartialAttention(query, scale)
        block = torch.stack((key, value))  # (2, rows, key heads, tokens, width): one message
        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            # --- the next block sets out before this one is computed with ---
            coming = ring.pass_on(block) if step + 1 < ring.ranks else None
            attention.add(block[0], block[1], sight.blocks(ring.rank, owner))
            if coming is not None:
                block, coming = coming.arrived(), None  # and lets go of what it has sent

        result = attention.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, attention.log_sum)
        ctx.sight, ctx.group, ctx.scale = sight, group, scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        query, key, value, result, log_sum = ctx.saved_tensors
        ring, gradients = Ring(ctx.group), PartialGradients(gradient, query, result, log_sum, ctx.scale)
        block, returning = torch.stack((key, value)), None
        for step in range(ring.ranks):
            owner = (ring.rank - step) % ring.ranks
            coming = ring.pass_on(block) if step + 1 < ring.ranks else None
            share = gradients.add(block[0], block[1], ctx.sight.blocks(ring.rank, owner))
            # --- what the ranks before this one have added comes one step behind the block, and goes on with ours ---
            if returning is not None:
                share += returning.arrived()
            returning = ring.pass_on(share) if ring.ranks > 1 else None
            if coming is not None:
                block, coming = coming.arrived(), None  # and lets go of what it has sent

        home = returning.arrived() if returning is not None else share
        return gradients.of_query.to(query.dtype), home[0].to(key.dtype), home[1].to(value.dtype), None, None, None


@dataclass
class Coming:
    """A message on its way, with what it is sent from, which has to stay until it has left."""

    tensor: Tensor
    works: list[dist.Work]
    sent: Tensor

    def arrived(self) -> Tensor:
        """Block that the rank before has sent, as soon as it is here."""
        for work in self.works:
            work.wait()
        return self.tensor


class Ring:
    """This rank's place in a group, and its two neighbours."""

    def __init__(self, group: Group):
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def pass_on(self, tensor: Tensor) -> Coming:
        """Send to the next rank what the rank before sends the like of; both go together, or NCCL would lock up."""
        received = torch.empty_like(tensor)
        messages = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=(self.rank + 1) % self.ranks),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.ranks),
        ]
        return Coming(received, dist.batch_isend_irecv(messages), tensor)
